"""Choosing a checkpoint: the newest complete one, and the reason for each that is skipped."""

import errno
import shutil
from pathlib import Path

import msgspec
import pytest
from kinlog_builders import DATASET, LOG_ID, RUN_ID

from kinlog.replay import checkpoints
from kinlog.replay.checkpoints import (
    MANIFEST_NAME,
    file_digest,
    find_checkpoints,
    read_manifest,
    verify_files,
)
from kinlog.schemas.events import Position
from kinlog.schemas.manifest import MANIFEST_FORMAT, FileEntry, Manifest
from kinlog.schemas.reasons import CheckpointKind


def write_checkpoint(directory: Path, name: str, seq: int, **changed: object) -> Path:
    path = directory / name
    (path / "trainer").mkdir(parents=True)
    (path / "projection.zst").write_bytes(b"projection of " + name.encode())
    (path / "trainer" / "weights").write_bytes(b"weights of " + name.encode() * 50)
    entries = tuple(
        FileEntry(path=str(file.relative_to(path)), size_bytes=file.stat().st_size, blake2b=file_digest(file))
        for file in sorted(path.rglob("*"))
        if file.is_file()
    )
    facts = {
        "kind": CheckpointKind.TRAINER,
        "run_id": RUN_ID,
        "log_id": LOG_ID,
        "kinlog_version": "0",
        "created_us": 1,
        "position": Position(1, seq, 7),
        "projection_digest": "",
        "train_step": seq // 10,
        "weight_version": 0,
        "dataset_fingerprint": DATASET,
        "draw_cursor": 0,
        "num_storage_units": 1,
        "staging_rows": 0,
        "staging_digest": "",
        "training_rows": 0,
        "training_digest": "",
        "files": entries,
    }
    manifest = Manifest(**{**facts, **changed})  # type: ignore[arg-type]
    (path / MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))
    return path


def found(directory: Path, **options: bool) -> dict[str, str]:
    """Name -> why it is skipped, in the order of preference."""
    return {c.path.name: c.problem for c in find_checkpoints(directory, log_id=LOG_ID, **options)}


@pytest.fixture
def three(tmp_path) -> Path:
    for name, seq in (("step_b", 20), ("step_a", 30), ("step_c", 10)):
        write_checkpoint(tmp_path, name, seq)
    return tmp_path


def test_no_directory_and_an_empty_one_hold_no_checkpoints(tmp_path):
    assert found(tmp_path / "absent") == found(tmp_path) == {}


def test_newest_position_comes_first_whatever_the_names(three):
    assert found(three) == {"step_a": "", "step_b": "", "step_c": ""}
    assert all(c.usable for c in find_checkpoints(three, log_id=LOG_ID))


def test_later_rollout_checkpoint_comes_before_a_trainer_checkpoint_of_a_higher_step(three):
    write_checkpoint(three, "rollout", 40, kind=CheckpointKind.ROLLOUT, train_step=0, anchor="step_c")
    assert next(iter(found(three))) == "rollout"


def test_manifest_comes_back_as_it_was_written(three):
    assert read_manifest(three / "step_a").position == Position(1, 30, 7)
    verify_files(three / "step_a", read_manifest(three / "step_a"))


def damage_size(path: Path) -> str:
    with (path / "trainer" / "weights").open("ab") as file:
        file.write(b"!")
    size = (path / "trainer" / "weights").stat().st_size
    return f"trainer/weights: expected {size - 1} bytes, found {size}"


def damage_content(path: Path) -> str:
    file = path / "trainer" / "weights"
    content = bytearray(file.read_bytes())
    content[9] ^= 1
    file.write_bytes(content)
    return "trainer/weights: expected digest"


def damage_missing(path: Path) -> str:
    (path / "projection.zst").unlink()
    return "projection.zst is missing"


def damage_no_manifest(path: Path) -> str:
    (path / MANIFEST_NAME).unlink()
    return f"is incomplete: it has no {MANIFEST_NAME}"


def damage_manifest_cut(path: Path) -> str:
    manifest = path / MANIFEST_NAME
    manifest.write_bytes(manifest.read_bytes()[:-9])
    return "cannot be read"


def damage_manifest_unreadable(path: Path) -> str:
    (path / MANIFEST_NAME).unlink()
    (path / MANIFEST_NAME).mkdir()
    return "cannot be read"


def damage_newer_format(path: Path) -> str:
    manifest = msgspec.structs.replace(read_manifest(path), format=MANIFEST_FORMAT + 1)
    (path / MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))
    return f"has format {MANIFEST_FORMAT + 1}"


def damage_foreign(path: Path) -> str:
    manifest = msgspec.structs.replace(read_manifest(path), log_id="another")
    (path / MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))
    return f"belongs to log another, not to {LOG_ID}"


DAMAGES = [value for name, value in sorted(globals().items()) if name.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES)
def test_newest_that_cannot_be_used_never_hides_an_older_good_one(three, damage):
    reason = damage(three / "step_a")
    checkpoints_found = list(find_checkpoints(three, log_id=LOG_ID))
    newest = next(c for c in checkpoints_found if c.path.name == "step_a")
    assert not newest.usable
    assert reason in newest.problem
    assert [c.path.name for c in checkpoints_found if c.usable] == ["step_b", "step_c"]


def test_file_that_cannot_be_read_is_a_reason_and_not_a_crash(three, monkeypatch):
    def failing(path: Path) -> str:
        if "step_a" in path.parts:
            raise OSError(errno.EIO, "Input/output error")
        return file_digest(path)

    monkeypatch.setattr(checkpoints, "file_digest", failing)
    problems = found(three)
    assert "Input/output error" in problems["step_a"]
    assert problems["step_b"] == ""


def test_files_are_compared_lazily_and_only_when_asked(three, monkeypatch):
    read = []
    monkeypatch.setattr(checkpoints, "file_digest", lambda path: read.append(path) or file_digest(path))
    assert next(find_checkpoints(three, log_id=LOG_ID)).path.name == "step_a"
    assert {path.relative_to(three).parts[0] for path in read} == {"step_a"}
    read.clear()
    damage_content(three / "step_a")
    assert found(three, verify=False)["step_a"] == ""
    assert read == []


def test_checkpoint_that_was_copied_elsewhere_still_verifies(three, tmp_path):
    shutil.copytree(three / "step_a", tmp_path / "elsewhere" / "kept")
    assert found(tmp_path / "elsewhere") == {"kept": ""}


def test_files_beside_the_checkpoints_are_none(three):
    (three / "notes.txt").write_text("mine")
    assert list(found(three)) == ["step_a", "step_b", "step_c"]


def test_compacted_segments_are_compared_by_size_only_where_a_restart_has_no_use_for_them(three):
    log = three / "step_a" / "log"
    log.mkdir()
    archive = log / "compacted-00000001-00000000-00000001-00000000.arrows"
    archive.write_bytes(b"history")
    entry = FileEntry(path=f"log/{archive.name}", size_bytes=7, blake2b=file_digest(archive))
    manifest = read_manifest(three / "step_a")
    manifest = msgspec.structs.replace(manifest, files=(*manifest.files, entry))
    (three / "step_a" / MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))
    archive.write_bytes(b"histor?")
    assert found(three, read_archive=False)["step_a"] == ""
    assert "digest" in found(three)["step_a"]
    archive.write_bytes(b"histor")
    assert "7 bytes" in found(three, read_archive=False)["step_a"]
