"""The offline plan is what a restart then does, and changes nothing."""

import shutil
from pathlib import Path

import pytest
from kinlog_builders import directory_bytes
from kinlog_run_fixtures import Chance, DiskRun, small_run

from kinlog.lineage.segment import scan_segment
from kinlog.replay.checkpoints import MANIFEST_NAME
from kinlog.replay.projection import SNAPSHOT_NAME
from kinlog.replay.recovery.offline_plan import plan_offline
from kinlog.replay.recovery.plan import RecoveryPolicy
from kinlog.replay.recovery.restore import START
from kinlog.schemas.errors import CheckpointError, LogDamagedError
from kinlog.schemas.reasons import Reason

POLICY = RecoveryPolicy()


def _interrupted(path: Path, seed: int = 1, *, steps: int = 7) -> DiskRun:
    """A run killed between checkpoints, with siblings sealed, running and finalized."""
    run = DiskRun(path)
    chance = Chance(run, seed, permits=8)
    chance.live(through_step=steps, groups_per_step=2, checkpoint_every=3)
    chance.turn(2)
    run.kill()
    return run


@pytest.mark.parametrize("seed", range(4))
def test_the_offline_plan_is_the_plan_that_the_restart_carries_out(tmp_path: Path, seed: int):
    run = _interrupted(tmp_path / "run", seed)
    planned = plan_offline(run.directory, policy=POLICY)
    done = run.restart()
    assert planned.plan == done
    assert planned.report.draw_cursor == run.p.draw_cursor
    assert planned.report.groups_alive == run.p.alive_total
    run.close()


def test_planning_changes_nothing_and_needs_no_lock(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.position()
    before = directory_bytes(run.directory.path)
    report = plan_offline(run.directory, policy=POLICY).report
    assert directory_bytes(run.directory.path) == before
    assert (report.checkpoint, report.executed) == ("step_000001", False)
    run.close()


def test_without_a_checkpoint_everything_sealed_is_generated_again(tmp_path: Path):
    run = _interrupted(tmp_path / "run", steps=2)
    plan, report, _ = plan_offline(run.directory, policy=POLICY)
    assert (report.checkpoint, report.train_step, report.siblings_reused) == (None, 0, 0)
    assert report.steps_undone == 2
    assert plan.lost_tokens == report.tokens_to_redo > 0
    assert any("without a checkpoint" in note for note in report.notes)


def test_a_half_written_newest_checkpoint_is_skipped_with_the_reason(tmp_path: Path):
    run = _interrupted(tmp_path / "run")
    newest = run.directory.checkpoints / "step_000006"
    (newest / MANIFEST_NAME).unlink()
    report = plan_offline(run.directory, policy=POLICY).report
    assert report.checkpoint == "step_000003"
    assert [skipped.name for skipped in report.skipped] == ["step_000006"]
    assert "incomplete" in report.skipped[0].reason


def test_an_explicit_older_checkpoint_is_used(tmp_path: Path):
    run = _interrupted(tmp_path / "run")
    report = plan_offline(run.directory, policy=POLICY, checkpoint="step_000003").report
    assert (report.checkpoint, report.train_step, report.steps_undone) == ("step_000003", 3, 4)
    assert report.skipped == ()


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path):
    run = _interrupted(tmp_path / "run")
    with pytest.raises(
        CheckpointError, match=r"no checkpoint of that name; there are step_000003, step_000006"
    ):
        plan_offline(run.directory, policy=POLICY, checkpoint="step_9")


def test_a_damaged_explicit_checkpoint_is_refused_with_the_difference(tmp_path: Path):
    run = _interrupted(tmp_path / "run")
    (run.directory.checkpoints / "step_000003" / SNAPSHOT_NAME).write_bytes(b"no snapshot")
    with pytest.raises(CheckpointError, match=r"'step_000003' cannot be used: projection\.zst"):
        plan_offline(run.directory, policy=POLICY, checkpoint="step_000003")


def test_a_run_whose_start_is_forgotten_and_whose_checkpoints_are_gone_is_refused(tmp_path: Path):
    run = _interrupted(tmp_path / "run")
    shutil.rmtree(run.directory.checkpoints)
    with pytest.raises(CheckpointError, match="cannot begin again"):
        plan_offline(run.directory, policy=POLICY)


def test_a_checkpoint_before_the_frontier_is_refused(tmp_path: Path):
    run = _interrupted(tmp_path / "run", steps=10)
    with pytest.raises(
        CheckpointError, match="'step_000003' cannot be used: newer checkpoints cover the steps from 3"
    ):
        plan_offline(run.directory, policy=POLICY, checkpoint="step_000003")


def test_a_damaged_log_is_refused(tmp_path: Path):
    run = _interrupted(tmp_path / "run")
    segment = next(run.directory.log.glob("segment-*"))
    data = bytearray(segment.read_bytes())
    data[scan_segment(memoryview(data)).frames[1].offset + 200] ^= 1
    segment.write_bytes(data)
    with pytest.raises(LogDamagedError):
        plan_offline(run.directory, policy=POLICY)


def test_what_the_sampler_calls_stale_is_dropped(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.kill()
    plan, report, _ = plan_offline(
        run.directory, policy=POLICY, is_stale=lambda p, group: p.weight_version == 1 and group.group_id == 2
    )
    assert report.groups_dropped == {"stale": 1}
    assert [event.group_id for event in plan.dropped] == [2]
    assert not any("staleness" in note for note in report.notes)


def test_rollouts_of_weights_newer_than_the_restored_are_discarded_by_choice(tmp_path: Path):
    run = DiskRun(tmp_path / "run")
    told = run.story
    first, second = told.finalized(), told.finalized()
    told.train(first)
    third = told.generating()
    told.seal(third, 0)
    run.checkpoint()
    told.train(second)
    run.kill()
    discard = RecoveryPolicy(future_weights="discard")
    assert plan_offline(run.directory, policy=discard).report.siblings_sealed_redone == {}
    run.restart()
    run.kill()
    newest = run.directory.checkpoints / "step_000001"
    shutil.rmtree(newest)
    report = plan_offline(run.directory, policy=discard, checkpoint=START).report
    assert report.checkpoint is None
    assert set(report.siblings_sealed_redone) == {Reason.ROWS_MISSING}
