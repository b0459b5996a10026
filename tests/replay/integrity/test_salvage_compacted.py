"""Salvage of a log that was compacted, or whose oldest events were dropped."""

import shutil
from pathlib import Path

import pytest
from kinlog_builders import append_now, directory_bytes, numbered, reopened
from kinlog_damage import damageable_run, flip

from kinlog.lineage import compacted as compacted_module
from kinlog.lineage.compaction import compact_log
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import scan_log
from kinlog.lineage.segment import scan_segment
from kinlog.lineage.store import LocalStore
from kinlog.replay.integrity.left_out import Why
from kinlog.replay.integrity.salvage import Salvage, salvage_log
from kinlog.replay.integrity.verify import verify_everything
from kinlog.replay.projection import project
from kinlog.schemas.errors import LogDamagedError
from kinlog.schemas.events import RecordedEvent


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damageable_run(tmp_path_factory.mktemp("salvage") / "run").directory.path


@pytest.fixture(scope="module")
def events(intact: Path) -> list[RecordedEvent]:
    return list(scan_log(intact / "log").events())


@pytest.fixture
def run(intact: Path, tmp_path: Path) -> RunDirectory:
    shutil.copytree(intact, tmp_path / "run")
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def compacted(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's first compacted segment, of many small frames."""
    monkeypatch.setattr(compacted_module, "_EVENTS_PER_FRAME", 10)
    compact_log(LocalStore(), run.log, epoch=3, checkpoints=[])
    return min(run.log.glob("compacted-*"))


def salvaged(run: RunDirectory, tmp_path: Path, events: list[RecordedEvent]) -> Salvage:
    before = directory_bytes(run.path)
    salvage = salvage_log(run, tmp_path / "saved", export=True)
    assert directory_bytes(run.path) == before
    if salvage.events:
        copy = RunDirectory(tmp_path / "saved")
        assert verify_everything(copy).sound
        scan = scan_log(copy.log)
        expected = [r for r in events if scan.first_seq <= r.seq <= salvage.last_seq]
        assert list(scan.events()) == expected
        assert salvage.events == len(expected)
    return salvage


def test_sound_compacted_log_is_copied_whole(
    run: RunDirectory, compacted: Path, tmp_path: Path, events: list[RecordedEvent]
):
    salvage = salvaged(run, tmp_path, events)
    assert (salvage.events, salvage.left_out) == (len(events), ())
    assert compacted.name in salvage.segments


def test_frames_before_the_damage_in_a_compacted_segment_are_kept(
    run: RunDirectory, compacted: Path, tmp_path: Path, events: list[RecordedEvent]
):
    frame = scan_segment(memoryview(compacted.read_bytes())).frames[4]
    flip(compacted, frame.offset + 700)
    with pytest.raises(LogDamagedError) as refused:
        list(scan_log(run.log).events())
    assert (refused.value.offset_bytes, refused.value.seq) == (frame.offset, frame.first_seq - 1)
    salvage = salvaged(run, tmp_path, events)
    assert salvage.last_seq == frame.first_seq - 1 == 30
    damaged, *behind = salvage.left_out
    assert (damaged.segment, damaged.offset_bytes, damaged.why) == (compacted.name, frame.offset, Why.DAMAGED)
    assert salvage.missing == ((frame.first_seq, frame.last_seq),)
    assert {part.why for part in behind} == {Why.BEHIND_GAP}
    assert sum(part.events for part in salvage.left_out) == len(events) - 40


def test_verify_locates_damage_in_a_compacted_segment(run: RunDirectory, compacted: Path):
    frame = scan_segment(memoryview(compacted.read_bytes())).frames[4]
    flip(compacted, frame.offset + 700)
    verification = verify_everything(run)
    assert verification.damage is not None
    assert (verification.damage.segment, verification.damage.offset_bytes) == (compacted.name, frame.offset)
    assert verification.damage.seq == verification.salvageable_seq == frame.first_seq - 1
    assert any("kinlog log salvage" in step for step in verification.advice)


def test_salvaged_part_of_a_compacted_segment_goes_on(
    run: RunDirectory, compacted: Path, tmp_path: Path, events: list[RecordedEvent]
):
    flip(compacted, scan_segment(memoryview(compacted.read_bytes())).frames[4].offset + 700)
    salvaged(run, tmp_path, events)
    log = reopened(tmp_path / "saved" / "log")
    assert append_now(log, numbered(7)) == 31
    log.close()
    assert scan_log(tmp_path / "saved" / "log").end.seq == 31


@pytest.mark.parametrize("where", ["first frame", "opening"])
def test_compacted_segment_damaged_at_its_beginning_saves_nothing_and_is_exported(
    run: RunDirectory, compacted: Path, tmp_path: Path, events: list[RecordedEvent], where: str
):
    frames = scan_segment(memoryview(compacted.read_bytes())).frames
    flip(compacted, frames[1].offset + 700 if where == "first frame" else 100)
    salvage = salvaged(run, tmp_path, events)
    assert salvage.events == 0
    damaged = salvage.left_out[0]
    assert damaged.events == frames[-1].last_seq - (frames[1].num_events if where == "first frame" else 0)
    # Without the schema and dictionaries, frames can be counted and not read.
    assert bool(damaged.kinds) is (where == "first frame")


def test_log_without_its_oldest_events_is_salvaged_from_its_base_on(
    run: RunDirectory, tmp_path: Path, events: list[RecordedEvent]
):
    compact_log(LocalStore(), run.log, epoch=3, checkpoints=[], drop_through_seq=40)
    first_seq = scan_log(run.log).first_seq
    assert first_seq > 1
    whole = project(scan_log(run.log))
    salvage = salvaged(run, tmp_path, events)
    assert (salvage.events, salvage.last_seq) == (len(events) - first_seq + 1, len(events))
    assert project(scan_log(tmp_path / "saved" / "log")) == whole


def test_log_whose_base_is_damaged_saves_nothing_and_exports_what_follows(
    run: RunDirectory, tmp_path: Path, events: list[RecordedEvent]
):
    compact_log(LocalStore(), run.log, epoch=3, checkpoints=[], drop_through_seq=40)
    first_seq = scan_log(run.log).first_seq
    (base,) = run.log.glob("base-*")
    flip(base, 30)
    salvage = salvaged(run, tmp_path, events)
    assert salvage.events == 0
    assert salvage.left_out[0].segment == base.name
    assert sum(part.events for part in salvage.left_out) == len(events) - first_seq + 1
