"""Compaction: fewer and smaller files, the same history, whatever is compacted when, and wherever it is killed."""

import errno
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinlog_builders import append_now, directory_bytes, new_log, numbered, reopened
from kinlog_compaction import (
    LOG,
    Killed,
    MortalStore,
    compacted,
    end_unclosed,
    events_of,
    folded,
    framed_life,
    live,
    small_life,
    told_life,
)
from kinlog_stores import Failing, FaultyStore

from kinlog.lineage.compaction import choose_groups, compact_log
from kinlog.lineage.log import OpenedLog
from kinlog.lineage.log_copy import copy_log
from kinlog.lineage.names import QUARANTINE_NAME, TRASH_NAME, log_files
from kinlog.lineage.scan import holds_mark, scan_log
from kinlog.lineage.segment import segment_name
from kinlog.lineage.state import encode_projection
from kinlog.lineage.store import LocalStore
from kinlog.replay.projection import project
from kinlog.schemas.errors import LogDamagedError, WriterFencedError
from kinlog.schemas.events import Position, TailTruncated
from kinlog.schemas.settings import LogSettings


def kinds(store, directory=LOG) -> list[str]:
    return [file.kind for file in log_files(store.names(directory))]


def only_the_newest_is_left(store) -> bool:
    *older, newest = kinds(store)
    return set(older) == {"compacted"} and newest == "segment"


def first_compacted(store) -> Path:
    return min(path for path in store.files if path.name.startswith("compacted-"))


@pytest.fixture
def three_lives() -> MortalStore:
    """A log of three lives: the first rolled over and was closed, the second was killed, the third is the newest."""
    store = MortalStore()
    live(store, told_life(1, groups=40))
    live(store, framed_life, cleanly=False)
    live(store, small_life)
    return store


def test_history_and_projection_are_the_same_afterwards(three_lives):
    before = scan_log(LOG, store=three_lives)
    history, projection = events_of(before), folded(before)
    result = compacted(three_lives)
    after = scan_log(LOG, store=three_lives)
    assert only_the_newest_is_left(three_lives)
    assert result.segments_replaced == len(before.segments) - 1
    assert events_of(after) == history
    assert encode_projection(folded(after)) == encode_projection(projection)
    assert encode_projection(project(after)) == encode_projection(projection)
    assert (after.end, after.log_id, after.run_id) == (before.end, before.log_id, before.run_id)


def test_nothing_is_left_in_the_trash_nor_half_built(three_lives):
    compacted(three_lives)
    assert {path.parent.name for path in three_lives.files} == {LOG.name}
    assert not [path for path in three_lives.files if path.name.startswith(".")]


def test_any_arrow_reader_reads_a_compacted_segment(tmp_path):
    store = LocalStore()
    live(store, told_life(1, groups=20), directory=tmp_path)
    live(store, small_life, directory=tmp_path)
    history = events_of(scan_log(tmp_path))
    compacted(store, directory=tmp_path)
    file = min(tmp_path.glob("compacted-*"))
    table = pa.ipc.open_stream(file).read_all()
    assert table.column("seq").to_pylist() == [record.seq for record in history[: table.num_rows]]


def test_newest_segment_is_never_touched_and_its_writer_goes_on(three_lives):
    opened = reopened(LOG, store=three_lives)
    append_now(opened, numbered(1))
    compact_log(three_lives, LOG, epoch=opened.writer.epoch, checkpoints=())
    append_now(opened, numbered(2))
    opened.close()
    assert only_the_newest_is_left(three_lives)
    assert [record.event for record in scan_log(LOG, store=three_lives).events()][-2:] == [
        numbered(1),
        numbered(2),
    ]


def test_next_life_takes_the_next_epoch_and_chains_to_what_was_replaced(three_lives):
    compacted(three_lives)
    end = scan_log(LOG, store=three_lives).end
    opened = live(three_lives, small_life)
    assert opened.writer.epoch == 4
    assert scan_log(LOG, store=three_lives, marks=[end]).end.seq == end.seq + 1


def test_a_segment_with_the_place_of_a_checkpoint_inside_stays_as_it_is(three_lives):
    segment = scan_log(LOG, store=three_lives).segments[-2]
    frame = segment.frames[len(segment.frames) // 2]
    mark = Position(segment.info.epoch, frame.last_seq, frame.checksum)
    compacted(three_lives, checkpoints=[mark])
    after = scan_log(LOG, store=three_lives, marks=[mark])
    assert segment.path in [s.path for s in after.segments if not s.compacted]
    assert holds_mark(after, mark) is True


def test_the_end_of_a_compacted_segment_can_be_the_place_of_a_checkpoint(three_lives):
    mark = scan_log(LOG, store=three_lives).segments[1].end
    compacted(three_lives, checkpoints=[mark])
    scan = scan_log(LOG, store=three_lives, marks=[mark])
    assert mark in [segment.end for segment in scan.segments if segment.compacted]


def test_a_place_inside_compacted_history_is_no_damage_and_cannot_be_compared(three_lives):
    frame = scan_log(LOG, store=three_lives).segments[-2].frames[3]
    mark = Position(2, frame.last_seq, frame.checksum)
    compacted(three_lives)
    assert holds_mark(scan_log(LOG, store=three_lives, marks=[mark]), mark) is None


def test_log_that_is_shorter_than_a_checkpoint_promises_is_refused_all_the_same(three_lives):
    compacted(three_lives)
    end = scan_log(LOG, store=three_lives).end
    with pytest.raises(LogDamagedError, match="promised"):
        scan_log(LOG, store=three_lives, marks=[Position(end.epoch, end.seq + 1, end.checksum)])


@pytest.mark.parametrize("place", range(0, 100, 3))
def test_damage_in_a_compacted_segment_is_found_when_it_is_read(three_lives, place):
    compacted(three_lives)
    path = first_compacted(three_lives)
    content = three_lives.files[path]
    content[len(content) * place // 100] ^= 0x10
    with pytest.raises(LogDamagedError, match=path.name):
        events_of(scan_log(LOG, store=three_lives))


@pytest.mark.parametrize("size", [0, 10, 5000, -8, -1])
def test_a_compacted_segment_that_was_cut_off_is_refused_at_opening(three_lives, size):
    compacted(three_lives)
    path = first_compacted(three_lives)
    del three_lives.files[path][size:]
    with pytest.raises(LogDamagedError, match=path.name):
        reopened(LOG, store=three_lives)


def test_opening_reads_the_ends_of_a_compacted_segment_only(three_lives, monkeypatch):
    compacted(three_lives)
    read = []
    monkeypatch.setattr(
        three_lives, "read", lambda path, own=three_lives.read: read.append(path.name) or own(path)
    )
    parts = []
    monkeypatch.setattr(
        three_lives,
        "read_part",
        lambda path, offset, size, own=MortalStore.read_part: (
            parts.append(path.name) or memoryview(bytes(three_lives.files[path]))[offset:][:size]
        ),
    )
    scan_log(LOG, store=three_lives)
    assert not [name for name in read if name.startswith("compacted-")]
    assert [name for name in parts if name.startswith("compacted-")]


def test_wherever_a_compaction_is_killed_the_next_life_finds_the_same_history(three_lives):
    history = events_of(scan_log(LOG, store=three_lives))
    files = three_lives.copy_of_files()
    operations = 0
    while True:
        store = MortalStore(files, lives_for=operations)
        try:
            compacted(store)
        except Killed:
            operations += 1
        else:
            break
        store.left = None
        assert events_of(scan_log(LOG, store=store)) == history
        live(store, small_life)
        assert events_of(scan_log(LOG, store=store))[:-1] == history
        compacted(store)
        assert events_of(scan_log(LOG, store=store))[:-1] == history
        assert only_the_newest_is_left(store)
        assert not [p for p in store.files if QUARANTINE_NAME in p.parts or TRASH_NAME in p.parts]
    assert operations > 6


def test_wherever_dropping_history_is_killed_what_is_left_amounts_to_the_same(three_lives):
    before = scan_log(LOG, store=three_lives)
    projection, through = folded(before), before.segments[1].end.seq
    files = three_lives.copy_of_files()
    operations = 0
    while True:
        store = MortalStore(files, lives_for=operations)
        try:
            compacted(store, drop_through_seq=through)
        except Killed:
            operations += 1
        else:
            break
        store.left = None
        assert folded(scan_log(LOG, store=store)) == projection
        live(store, small_life)
        compacted(store, drop_through_seq=through)
        after = scan_log(LOG, store=store)
        assert (after.first_seq, after.end.seq) == (through + 1, before.end.seq + 1)
        assert not [p for p in store.files if QUARANTINE_NAME in p.parts or TRASH_NAME in p.parts]
    assert operations > 6


_Step = st.one_of(
    st.tuples(st.just("life"), st.integers(0, 99), st.booleans()),
    st.tuples(st.just("small life"), st.just(0), st.booleans()),
    st.tuples(st.just("compact"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("drop"), st.integers(0, 100), st.booleans()),
)


@settings(max_examples=8, deadline=None)
@given(st.lists(_Step, min_size=2, max_size=10))
def test_any_compactions_and_drops_of_any_history_leave_the_same_projection(steps):
    """Two logs live the same lives; one is compacted now and then."""
    plain, store = MortalStore(), MortalStore()
    for what, number, flag in [("life", 0, True), *steps]:
        if what == "life" or what == "small life":
            for one in (plain, store):
                live(one, told_life(number, groups=4) if what == "life" else small_life, cleanly=flag)
            continue
        scan = scan_log(LOG, store=store)
        marks = [segment.frames[len(segment.frames) // 2] for segment in scan.segments[:number]]
        places = [Position(0, frame.last_seq, frame.checksum) for frame in marks]
        through = scan.end.seq * number // 100 if what == "drop" else 0
        compacted(store, checkpoints=places, drop_through_seq=through)
    expected, found = scan_log(LOG, store=plain), scan_log(LOG, store=store)
    history = events_of(expected)
    assert events_of(found) == history[found.first_seq - 1 :]
    assert encode_projection(folded(found)) == encode_projection(folded(expected))
    assert encode_projection(project(found)) == encode_projection(folded(expected))


def test_files_stay_few_over_many_restarts():
    store = MortalStore()
    live(store, told_life(1, groups=20))
    most = 0
    for _ in range(60):
        live(store, small_life, cleanly=False)
        compacted(store)
        most = max(most, len(kinds(store)))
    scan = scan_log(LOG, store=store)
    assert scan.segments[-1].info.epoch == 61
    assert [record.seq for record in scan.events()] == list(range(1, scan.end.seq + 1))
    assert most <= 10


def test_nothing_is_dropped_unless_asked_for_also_of_lives_without_events():
    store = MortalStore()
    for _ in range(3):
        live(store, lambda ledger: None)
    compacted(store)
    scan = scan_log(LOG, store=store)
    assert (scan.base, scan.first_seq) == (None, 1)
    assert only_the_newest_is_left(store)
    live(store, told_life(1))
    assert [record.seq for record in scan_log(LOG, store=store).events()][:1] == [1]


def test_groups_shrink_by_half_from_each_to_the_next():
    store = MortalStore()
    live(store, told_life(1, groups=20))
    for _ in range(12):
        live(store, small_life)
    run = scan_log(LOG, store=store).segments
    sizes = [sum(s.end.seq + 1 - s.info.first_seq for s in group) for group in choose_groups(run)]
    assert sum(sizes) == run[-1].end.seq
    assert all(older > 2 * newer for older, newer in pairwise(sizes))


def test_a_writer_that_was_taken_over_replaces_nothing(three_lives):
    files = three_lives.copy_of_files()
    with pytest.raises(WriterFencedError):
        compact_log(three_lives, LOG, epoch=2, checkpoints=())
    assert {path for path in three_lives.files if not path.name.startswith(".")} == set(files)


def taken_over_and_compacted(store: MortalStore) -> OpenedLog:
    """A log of which nothing is left that an old writer, which is returned, or the one that fenced it had written."""
    settings = LogSettings(durability="os", segment_bytes=65_536)
    old = new_log(LOG, store=store, settings=settings)
    append_now(old, numbered(1))
    taken = reopened(LOG, store=store, take_over=True)
    append_now(taken, *map(numbered, range(10, 20)))
    end_unclosed(taken)
    newest = reopened(LOG, store=store, take_over=True)
    compact_log(store, LOG, epoch=newest.writer.epoch, checkpoints=())
    append_now(newest, numbered(2))
    newest.close()
    assert [file.last for file in log_files(store.names(LOG))] == [(2, 0), (3, 0)]
    return old


def test_a_writer_that_was_taken_over_is_fenced_also_when_compaction_has_removed_what_fenced_it():
    store = MortalStore()
    old = taken_over_and_compacted(store)
    with pytest.raises(WriterFencedError, match="is gone"):
        append_now(old, numbered(3))
    assert numbered(3) not in [record.event for record in scan_log(LOG, store=store).events()]


BULKY = [
    TailTruncated(segment="s" * 3000, offset_bytes=number, quarantined_bytes=1, quarantined_to="t")
    for number in range(30)
]


def test_a_late_roll_over_is_fenced_too():
    store = MortalStore()
    old = taken_over_and_compacted(store)
    history = events_of(scan_log(LOG, store=store))
    with pytest.raises(WriterFencedError, match="is gone"):
        append_now(old, *BULKY)
    assert LOG / segment_name(1, 1) in store.files
    assert events_of(scan_log(LOG, store=store)) == history
    live(store, small_life)
    assert LOG / segment_name(1, 1) not in store.files
    assert events_of(scan_log(LOG, store=store))[:-1] == history


def test_events_that_a_late_writer_left_among_replaced_segments_are_kept_aside():
    elsewhere, store = MortalStore(), MortalStore()
    alone = new_log(LOG, store=elsewhere, settings=LogSettings(durability="os", segment_bytes=65_536))
    append_now(alone, numbered(1))
    append_now(alone, *BULKY)
    alone.close()
    taken_over_and_compacted(store)
    history = events_of(scan_log(LOG, store=store))
    late = LOG / segment_name(1, 1)
    store.files[late] = elsewhere.files[late]
    assert events_of(scan_log(LOG, store=store)) == history
    live(store, small_life)
    assert late not in store.files
    assert [path.name for path in store.files if path.parent.name == QUARANTINE_NAME] == [f"{late.name}.0"]
    assert events_of(scan_log(LOG, store=store))[:-1] == history


@pytest.mark.parametrize("operation", ["create", "write", "sync"])
def test_a_full_disk_costs_the_compaction_and_leaves_nothing_in_the_way(tmp_path, operation):
    store = FaultyStore()
    live(store, told_life(1, groups=20), directory=tmp_path)
    live(store, small_life, directory=tmp_path)
    before = directory_bytes(tmp_path)
    store.before = Failing(operation, errno.ENOSPC)
    with pytest.raises(OSError, match="ENOSPC"):
        compacted(store, directory=tmp_path)
    assert directory_bytes(tmp_path) == before


def test_readers_of_a_running_log_are_not_disturbed(three_lives):
    scan = scan_log(LOG, store=three_lives)
    history = events_of(scan)
    reading = scan.events()
    first = [next(reading)]
    compacted(three_lives)
    assert first + list(reading) == history
    assert list(scan.events(10)) == history[10:]


def test_a_copy_of_a_compacted_log_is_a_log_of_its_own(three_lives):
    compacted(three_lives)
    end = scan_log(LOG, store=three_lives).end
    copy = Path("run/copy")
    copy_log(three_lives, LOG, copy, end)
    assert events_of(scan_log(copy, store=three_lives, marks=[end])) == events_of(
        scan_log(LOG, store=three_lives)
    )
