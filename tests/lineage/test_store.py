"""What kinlog asks of a store, asked of each: of the disk, and of those that stand in for it."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from kinlog_crash_disk import Disk, Process
from kinlog_late_names import LateNamesStore
from kinlog_stores import FaultyStore

from kinlog.lineage.store import LocalStore, Store, replace_durably, write_durably

Place = tuple[Store, Path]

STORES: dict[str, Callable[[], Store]] = {
    "local disk": LocalStore,
    "disk that may fail": FaultyStore,
    "disk that shows names late": lambda: LateNamesStore({}),
    "disk that remembers": lambda: Process(Disk()),
}


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A store, and a new directory in it."""
    store = STORES[request.param]()
    store.make_directory(tmp_path / "place")
    return store, tmp_path / "place"


def put(store: Store, path: Path, data: bytes = b"data") -> Path:
    write_durably(store, path, data)
    return path


def test_file_is_written_at_offsets_cut_and_read_in_parts(place: Place):
    store, directory = place
    file = store.create(directory / "a")
    file.write_at(0, b"hello")
    file.write_at(8, memoryview(b"there"))
    file.sync()
    assert bytes(store.read(directory / "a")) == b"hello\0\0\0there"
    assert bytes(store.read_part(directory / "a", 1, 3)) == b"ell"
    assert bytes(store.read_part(directory / "a", -5, 3)) == b"the"
    assert bytes(store.read_part(directory / "a", -50, 100)) == b"hello\0\0\0there"
    file.truncate(4)
    file.close()
    again = store.open(directory / "a")
    again.write_at(4, b"!")
    again.close()
    assert bytes(store.read(directory / "a")) == b"hell!"


def test_names_are_sorted_and_there_are_none_in_a_directory_that_is_absent(place: Place):
    store, directory = place
    for name in ("b", "c", "a"):
        put(store, directory / name)
    assert store.names(directory) == ["a", "b", "c"]
    assert store.names(directory / "absent") == []
    assert store.exists(directory / "a")
    assert not store.exists(directory / "absent")


def test_existing_file_is_not_created_copied_or_linked_over(place: Place):
    store, directory = place
    old, new = put(store, directory / "old", b"old"), put(store, directory / "new", b"new")
    for action in (lambda: store.create(old), lambda: store.copy(new, old), lambda: store.link(new, old)):
        with pytest.raises(FileExistsError):
            action()
    assert bytes(store.read(old)) == b"old"


def test_rename_replaces_a_file_or_an_empty_directory_and_no_other(place: Place):
    store, directory = place
    put(store, directory / "old", b"old")
    store.rename(put(store, directory / "new", b"new"), directory / "old")
    assert bytes(store.read(directory / "old")) == b"new"
    store.make_directory(directory / "full")
    put(store, directory / "full" / "file")
    store.make_directory(directory / "target")
    store.rename(directory / "full", directory / "target")
    assert store.names(directory) == ["old", "target"]
    store.make_directory(directory / "other")
    with pytest.raises(OSError, match="not empty"):
        store.rename(directory / "other", directory / "target")


def test_copy_and_link_have_the_content_and_only_the_copy_keeps_it(place: Place):
    store, directory = place
    source = put(store, directory / "source", b"one")
    store.copy(source, directory / "copy")
    store.link(source, directory / "link")
    file = store.open(source)
    file.write_at(0, b"two")
    file.close()
    assert bytes(store.read(directory / "copy")) == b"one"
    assert bytes(store.read(directory / "link")) == b"two"


def test_file_and_tree_are_removed_and_an_absent_tree_is_none(place: Place):
    store, directory = place
    store.create(directory / "empty").close()
    store.remove(directory / "empty")
    store.make_directory(directory / "tree" / "branch")
    put(store, directory / "tree" / "branch" / "leaf")
    store.remove_tree(directory / "tree")
    store.remove_tree(directory / "tree")
    assert store.names(directory) == []


def test_directories_are_made_with_their_parents_as_often_as_asked(place: Place):
    store, directory = place
    for _ in range(2):
        store.make_directory(directory / "a" / "b")
        store.sync_directory(directory / "a")
    assert store.names(directory / "a") == ["b"]


def test_lock_is_one_at_a_time(place: Place):
    store, directory = place
    lock = store.lock(directory / "lock")
    with pytest.raises(BlockingIOError):
        store.lock(directory / "lock")
    lock.release()
    store.lock(directory / "lock").release()


def test_seized_lock_is_held_against_all_and_not_given_back_by_its_old_holder(place: Place):
    store, directory = place
    old = store.lock(directory / "lock")
    seized = store.seize_lock(directory / "lock")
    old.release()
    with pytest.raises(BlockingIOError):
        store.lock(directory / "lock")
    seized.release()
    store.lock(directory / "lock").release()
    assert store.names(directory) == ["lock"]


def test_replaced_file_is_the_old_one_or_the_new_one_and_leaves_no_other(place: Place):
    store, directory = place
    put(store, directory / "file", b"old")
    replace_durably(store, directory / "file", b"new")
    assert bytes(store.read(directory / "file")) == b"new"
    assert store.names(directory) == ["file"]


# ---- the local disk ---------------------------------------------------------------------------------------------


def test_file_system_without_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "EXDEV")

    monkeypatch.setattr(os, "link", refuse)
    store = LocalStore()
    store.link(put(store, tmp_path / "a", b"content"), tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"content"


class SyncsSeen(LocalStore):
    def __init__(self) -> None:
        self.synced: list[Path] = []

    def sync_directory(self, path: Path) -> None:
        self.synced.append(path)
        super().sync_directory(path)


def test_name_of_each_directory_that_is_made_is_durable_and_of_the_one_it_is_made_in(tmp_path: Path):
    store = SyncsSeen()
    store.make_directory(tmp_path / "a" / "b")
    assert store.synced == [tmp_path.parent, tmp_path, tmp_path / "a"]
    store.synced.clear()
    store.make_directory(tmp_path / "a" / "b")
    assert tmp_path / "a" in store.synced, "whoever made it may have been killed before its name was durable"


def test_directory_that_may_not_be_listed_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = SyncsSeen()

    def refuse(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(store, "sync_directory", refuse)
    store.make_directory(tmp_path / "a")
    assert (tmp_path / "a").is_dir()
