"""Verification tells the story of a whole log, and says exactly where trust ends."""

from pathlib import Path

import msgspec
from kinlog_builders import append_now, directory_bytes, reopened
from kinlog_run_fixtures import DiskRun, small_run

from kinlog.lineage.segment import scan_segment, segment_name
from kinlog.replay.checkpoints import MANIFEST_NAME
from kinlog.replay.inspection import SegmentState
from kinlog.replay.integrity.verify import verify_everything
from kinlog.schemas.events import StepApplied


def _killed(path: Path) -> DiskRun:
    run = small_run(path)
    run.kill()
    return run


def _append_torn_tail(run: DiskRun, name: str) -> int:
    path = run.directory.log / name
    end = scan_segment(memoryview(path.read_bytes())).end_offset
    with open(path, "r+b") as file:
        file.seek(end)
        file.write(b"half a frame")
    return end


def test_a_killed_run_is_sound_and_its_checkpoint_replays(tmp_path: Path):
    verification = verify_everything(_killed(tmp_path / "run").directory)
    assert verification.sound
    assert verification.broken_checkpoints == ()
    (checkpoint,) = verification.checkpoints
    assert (checkpoint.name, checkpoint.in_log, checkpoint.projection_equal) == ("step_000001", True, True)
    assert len(verification.lives) == 2


def test_verifying_a_log_that_is_being_written_changes_nothing(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.position()
    before = directory_bytes(run.directory.path)
    assert verify_everything(run.directory).sound
    assert directory_bytes(run.directory.path) == before
    run.close()


def test_a_torn_tail_is_no_damage_and_its_repair_is_told(tmp_path: Path):
    run = _killed(tmp_path / "run")
    end = _append_torn_tail(run, segment_name(2, 0))
    verification = verify_everything(run.directory)
    assert verification.sound
    (stray,) = verification.stray
    assert (stray.offset_bytes, stray.content_bytes, stray.fenced) == (end, 12, False)

    run.restart()
    run.kill()
    after = verify_everything(run.directory)
    (repair,) = after.repairs
    assert (repair.offset_bytes, repair.quarantined_bytes, repair.kept) == (end, 12, True)
    assert after.stray == ()

    (run.directory.log / repair.quarantined_to).unlink()
    assert verify_everything(run.directory).repairs[0].kept is False


def test_a_flipped_bit_is_located(tmp_path: Path):
    run = _killed(tmp_path / "run")
    path = run.directory.log / segment_name(1, 0)
    data = bytearray(path.read_bytes())
    frame = scan_segment(memoryview(data)).frames[1]
    data[frame.offset + 100] ^= 4
    path.write_bytes(data)
    verification = verify_everything(run.directory)
    assert not verification.sound
    assert verification.damage is not None
    assert (verification.damage.segment, verification.damage.offset_bytes) == (path.name, frame.offset)
    assert verification.damage.seq == frame.first_seq - 1
    assert [segment.state for segment in verification.segments][1] is SegmentState.LIVE
    assert verification.checkpoints[0].problem == ""


def test_a_log_shorter_than_a_checkpoint_promises_is_damaged(tmp_path: Path):
    run = _killed(tmp_path / "run")
    (run.directory.log / segment_name(2, 0)).unlink()
    path = run.directory.log / segment_name(1, 0)
    opening = scan_segment(memoryview(path.read_bytes())).frames[0]
    path.write_bytes(path.read_bytes()[: opening.end])
    verification = verify_everything(run.directory)
    assert verification.damage is not None
    assert "promised" in verification.damage.what
    assert verification.checkpoints[0].in_log is False


def test_a_half_written_checkpoint_is_told_and_is_no_fault_of_the_log(tmp_path: Path):
    run = _killed(tmp_path / "run")
    (run.directory.checkpoints / "half").mkdir()
    verification = verify_everything(run.directory)
    half = next(check for check in verification.checkpoints if check.name == "half")
    assert half.kind is None
    assert half.problem.startswith("is incomplete")
    assert verification.sound
    assert verification.broken_checkpoints == ()


def test_a_checkpoint_whose_projection_is_not_what_the_log_amounts_to_is_broken(tmp_path: Path):
    run = _killed(tmp_path / "run")
    path = run.directory.checkpoints / "step_000001" / MANIFEST_NAME
    manifest = msgspec.json.decode(path.read_bytes())
    manifest["projection_digest"] = "0" * 32
    path.write_bytes(msgspec.json.encode(manifest))
    verification = verify_everything(run.directory)
    assert [check.projection_equal for check in verification.broken_checkpoints] == [False]


def test_events_that_do_not_fit_each_other_are_named_and_the_bytes_are_sound(tmp_path: Path):
    run = _killed(tmp_path / "run")
    opened = reopened(run.directory.log)
    seq = append_now(opened, StepApplied(train_step=9, group_ids=(0,)))
    opened.close()
    verification = verify_everything(run.directory)
    assert verification.damage is None
    assert not verification.sound
    assert f"seq {seq}, step_applied" in verification.impossible
