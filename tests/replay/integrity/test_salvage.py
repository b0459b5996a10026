"""Salvage writes the longest beginning of a damaged log elsewhere, as a log like any other, and says what is not in it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from kinlog_builders import append_now, directory_bytes, log_settings, numbered, reopened
from kinlog_damage import change, damageable_run, flip, frame_of, segments_of
from kinlog_golden import log_path

from kinlog.lineage.log import create_log
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import scan_log
from kinlog.lineage.segment import scan_segment, segment_name
from kinlog.replay.integrity.left_out import Why
from kinlog.replay.integrity.salvage import LEFT_OUT_NAME, Salvage, salvage_log
from kinlog.replay.integrity.verify import verify_everything
from kinlog.replay.projection import project
from kinlog.schemas.errors import LogDamagedError, LogUnsupportedError, RunExistsError, RunNotFoundError
from kinlog.schemas.events import RecordedEvent, StepApplied


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damageable_run(tmp_path_factory.mktemp("salvage") / "run").directory.path


@pytest.fixture
def run(intact: Path, tmp_path: Path) -> RunDirectory:
    """A copy of the run, to be damaged."""
    shutil.copytree(intact, tmp_path / "run")
    return RunDirectory(tmp_path / "run")


@pytest.fixture(scope="module")
def events(intact: Path) -> list[RecordedEvent]:
    return list(scan_log(intact / "log").events())


def salvaged(
    run: RunDirectory, tmp_path: Path, events: list[RecordedEvent], *, export: bool = True
) -> Salvage:
    """Salvage, and hold what holds always: the source is as it was, the copy is sound and is a beginning of the log."""
    before = directory_bytes(run.path)
    target = tmp_path / "salvaged"
    salvage = salvage_log(run, target, export=export)
    assert directory_bytes(run.path) == before
    if salvage.segments:
        copy = RunDirectory(target)
        verification = verify_everything(copy)
        assert verification.sound
        assert verification.stray == ()
        scan = scan_log(copy.log)
        assert scan.end.seq == salvage.last_seq == salvage.events
        assert list(scan.events()) == events[: salvage.events]
        assert project(scan).last_seq == salvage.last_seq
    return salvage


def left_out_seqs(salvage: Salvage) -> set[int]:
    return {seq for part in salvage.left_out for first, last in part.seqs for seq in range(first, last + 1)}


def test_sound_log_is_copied_whole(run: RunDirectory, tmp_path: Path, events: list[RecordedEvent]):
    salvage = salvaged(run, tmp_path, events)
    assert salvage.events == len(events)
    assert (salvage.faults, salvage.left_out, salvage.missing, salvage.exported) == ((), (), (), ())
    assert salvage.checkpoints == ("step_000001",)
    assert (
        directory_bytes(tmp_path / "salvaged" / "log")
        == {name: content for name, content in directory_bytes(run.log).items() if name.endswith(".arrows")}
        or salvage.segments
    )


@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("segment", [0, 1, 2, 3])
def test_flipped_bit_costs_its_frame_and_what_follows(
    run: RunDirectory, tmp_path: Path, events: list[RecordedEvent], segment: int, place: int
):
    path = segments_of(run.log)[segment]
    frames = scan_segment(memoryview(path.read_bytes())).frames
    where = frame_of(path, place)
    frame = next(f for f in frames if f.offset == where.start)
    flip(path, where.start + 300)
    salvage = salvaged(run, tmp_path, events)
    assert salvage.last_seq == frame.first_seq - 1
    assert salvage.missing == (((frame.first_seq, frame.last_seq),) if frame.last_seq < len(events) else ())
    assert left_out_seqs(salvage) == set(range(frame.last_seq + 1, len(events) + 1))
    damaged = next(part for part in salvage.left_out if part.why is Why.DAMAGED)
    # Where nothing is kept of a segment, all of it is left out.
    assert (damaged.segment, damaged.offset_bytes) == (path.name, where.start if salvage.events else 0)
    behind = [part for part in salvage.left_out if part is not damaged]
    assert {part.why for part in behind} <= {Why.BEHIND_GAP}
    lost = [record for record in events if record.seq > frame.last_seq]
    assert sum(sum(part.kinds.values()) for part in salvage.left_out) == len(lost)


def _drop(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _zero_opening(path: Path) -> None:
    end = scan_segment(memoryview(path.read_bytes())).frames[0].end
    change(path, lambda content: content.__setitem__(slice(0, end), bytes(end)))


def _flip_opening(path: Path) -> None:
    flip(path, 100)


DAMAGES: list[Callable[[Path], None]] = [_drop, _empty, _zero_opening, _flip_opening]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("segment", [1, 2, 3])
def test_segment_that_is_gone_or_has_no_beginning_ends_what_is_saved(
    run: RunDirectory,
    tmp_path: Path,
    events: list[RecordedEvent],
    segment: int,
    damage: Callable[[Path], None],
):
    path = segments_of(run.log)[segment]
    scan = scan_segment(memoryview(path.read_bytes()))
    damage(path)
    salvage = salvaged(run, tmp_path, events)
    assert salvage.last_seq == scan.frames[0].first_seq - 1
    assert salvage.faults


def test_nothing_can_be_saved_without_the_first_segment_and_the_rest_is_exported(
    run: RunDirectory, tmp_path: Path, events: list[RecordedEvent]
):
    first = segments_of(run.log)[0]
    last_seq = scan_segment(memoryview(first.read_bytes())).frames[-1].last_seq
    first.unlink()
    salvage = salvaged(run, tmp_path, events)
    assert (salvage.events, salvage.last_seq, salvage.segments) == (0, 0, ())
    assert not (tmp_path / "salvaged" / "log").exists()
    assert left_out_seqs(salvage) == set(range(last_seq + 1, len(events) + 1))
    assert salvage.missing == ((1, last_seq),)
    assert salvage.checkpoints_lost == ("step_000001",)


def test_renamed_segments_are_known_by_what_they_say(
    run: RunDirectory, tmp_path: Path, events: list[RecordedEvent]
):
    one, two = segments_of(run.log)[:2]
    one.rename(one.with_name(segment_name(9, 0)))
    two.rename(two.with_name(segment_name(1, 7)))
    salvage = salvaged(run, tmp_path, events)
    assert salvage.events == len(events)
    assert salvage.left_out == ()


def test_copy_of_a_segment_under_another_name_is_left_out(
    run: RunDirectory, tmp_path: Path, events: list[RecordedEvent]
):
    one = segments_of(run.log)[0]
    shutil.copy(one, one.with_name(segment_name(9, 0)))
    with pytest.raises(LogDamagedError):
        scan_log(run.log)
    salvage = salvaged(run, tmp_path, events)
    assert (salvage.events, salvage.left_out) == (len(events), ())


def test_segment_of_another_log_is_left_out_and_named(
    run: RunDirectory, tmp_path: Path, events: list[RecordedEvent]
):
    other = create_log(
        tmp_path / "other", log_id="log-2", run_id="run-2", writer_version="test", settings=log_settings()
    )
    append_now(other, numbered(1))
    other.close()
    shutil.copy(tmp_path / "other" / segment_name(1, 0), run.log / segment_name(9, 0))
    salvage = salvaged(run, tmp_path, events)
    assert salvage.events == len(events)
    (part,) = salvage.left_out
    assert (part.segment, part.why, part.events) == (segment_name(9, 0), Why.FOREIGN, 1)


def test_segment_that_cannot_say_what_it_is_takes_nothing_with_it(
    run: RunDirectory, tmp_path: Path, events: list[RecordedEvent]
):
    """A copy under a newer epoch's name, whose beginning is broken: its frames say that they are of another epoch."""
    stray = run.log / segment_name(9, 0)
    shutil.copy(segments_of(run.log)[0], stray)
    flip(stray, 100)
    salvage = salvaged(run, tmp_path, events)
    assert salvage.events == len(events)
    assert [(part.segment, part.why) for part in salvage.left_out] == [(stray.name, Why.DAMAGED)]


def test_events_that_cannot_follow_those_before_them_are_left_out_by_whole_frames(
    run: RunDirectory, tmp_path: Path, events: list[RecordedEvent]
):
    log = reopened(run.log)
    append_now(log, numbered(1))
    append_now(log, numbered(2), StepApplied(train_step=99, group_ids=(3,)))
    append_now(log, numbered(3))
    log.close()
    salvage = salvaged(run, tmp_path, [*events, *list(scan_log(run.log).events())[len(events) :]])
    assert salvage.faults == ()
    assert "step_applied" in salvage.impossible
    assert salvage.last_seq == len(events) + 1
    (part,) = salvage.left_out
    assert (part.why, part.kinds, part.groups) == (
        Why.MISFIT,
        {"step_applied": 1, "weights_published": 2},
        (3,),
    )


def test_torn_tail_is_left_out_and_is_no_fault(
    run: RunDirectory, tmp_path: Path, events: list[RecordedEvent]
):
    path = segments_of(run.log)[-1]
    end = scan_segment(memoryview(path.read_bytes())).end_offset
    path.write_bytes(path.read_bytes()[:end] + b"half a frame")
    salvage = salvaged(run, tmp_path, events)
    assert salvage.events == len(events)
    assert [(part.why, part.size_bytes) for part in salvage.left_out] == [(Why.TORN, 12)]


def test_what_an_older_writer_wrote_past_a_take_over_does_not_become_history(tmp_path: Path):
    """The segment that fenced it is damaged, and still says where its epoch had begun."""
    run = RunDirectory(tmp_path / "run")
    shutil.copytree(log_path("v1/fenced"), run.log)
    fence = run.log / segment_name(2, 0)
    append = reopened(run.log)
    append_now(append, numbered(4))
    append_now(append, numbered(5))
    append.close()
    flip(fence, 100)
    salvage = salvage_log(run, tmp_path / "salvaged")
    assert [r.event.weight_version for r in scan_log(tmp_path / "salvaged" / "log").events()] == [1, 2]
    assert salvage.last_seq == 2


def test_exported_events_and_bytes_are_what_lay_behind_the_gap(
    run: RunDirectory, tmp_path: Path, events: list[RecordedEvent]
):
    path = segments_of(run.log)[1]
    where = frame_of(path, 1)
    flip(path, where.start + 300)
    damaged = path.read_bytes()
    salvage = salvaged(run, tmp_path, events)
    target = tmp_path / "salvaged"
    assert (target / LEFT_OUT_NAME / f"{path.name}.{where.start}").read_bytes() == damaged[
        where.start :
    ].rstrip(b"\0")
    lines = [
        json.loads(line)
        for name in salvage.exported
        if name.endswith(".jsonl")
        for line in (target / name).read_text(encoding="utf-8").splitlines()
    ]
    assert {line["seq"] for line in lines} == left_out_seqs(salvage)
    by_seq = {line["seq"]: line for line in lines}
    for record in events:
        if record.seq in by_seq and hasattr(record.event, "group_id"):
            assert by_seq[record.seq]["group_id"] == record.event.group_id


def test_without_export_only_the_log_is_written(
    run: RunDirectory, tmp_path: Path, events: list[RecordedEvent]
):
    flip(segments_of(run.log)[1], 300)
    salvaged(run, tmp_path, events, export=False)
    assert [path.name for path in (tmp_path / "salvaged").iterdir()] == ["log"]


def test_salvaged_log_goes_on(run: RunDirectory, tmp_path: Path, events: list[RecordedEvent]):
    path = segments_of(run.log)[1]
    flip(path, frame_of(path, 1).start + 300)
    salvage = salvaged(run, tmp_path, events)
    log = reopened(tmp_path / "salvaged" / "log")
    assert append_now(log, numbered(7)) == salvage.last_seq + 1
    log.close()
    assert scan_log(tmp_path / "salvaged" / "log").end.seq == salvage.last_seq + 1


@pytest.mark.parametrize("kind", ["file", "filled", "run itself", "inside"])
def test_occupied_target_is_refused_and_nothing_is_written(run: RunDirectory, tmp_path: Path, kind: str):
    target = {
        "file": tmp_path / "f",
        "filled": tmp_path / "d",
        "run itself": run.path,
        "inside": run.log / "new",
    }[kind]
    if kind == "file":
        target.write_text("x")
    elif kind == "filled":
        target.mkdir()
        (target / "x").touch()
    before = directory_bytes(tmp_path)
    with pytest.raises(RunExistsError, match="directory"):
        salvage_log(run, target)
    assert directory_bytes(tmp_path) == before


def test_no_log_and_a_newer_log_are_refused(tmp_path: Path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(RunNotFoundError):
        salvage_log(RunDirectory(tmp_path / "nothing"), tmp_path / "to")
    with pytest.raises(LogUnsupportedError, match="braids"):
        salvage_log(RunDirectory(log_path("v1/required_feature").parent), tmp_path / "to")
    with pytest.raises(LogUnsupportedError, match="weather_observed"):
        salvage_log(RunDirectory(log_path("v1/unknown_kind").parent), tmp_path / "to")
    assert not (tmp_path / "to").exists()
