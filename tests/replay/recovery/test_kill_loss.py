"""What a kill would cost, of a run that is alive, is what the restart after it then redoes."""

from pathlib import Path

import pytest
from kinlog_builders import directory_bytes
from kinlog_journal_parts import journal_in, journal_rows
from kinlog_run_fixtures import Chance, DiskRun, small_run

from kinlog.replay.recovery.kill_loss import KillLoss, render_loss
from kinlog.replay.recovery.offline_plan import plan_offline
from kinlog.replay.recovery.plan import RecoveryPolicy
from kinlog.schemas.events import SiblingSealed, StepApplied


def _loss(run: DiskRun) -> KillLoss:
    run.position()
    return plan_offline(run.directory, policy=RecoveryPolicy()).loss


def _words(loss: KillLoss) -> str:
    return " ".join(render_loss(loss).split())


def test_a_live_run_is_told_what_a_kill_would_cost_without_a_lock_and_unchanged(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.story.dispatch(2)
    run.story.train(3)
    run.position()
    before = directory_bytes(run.directory.path)
    loss = _loss(run)
    assert directory_bytes(run.directory.path) == before
    assert (loss.checkpoint, loss.ended_in_order) == ("step_000001", False)
    assert (loss.siblings_in_flight, loss.sealed_siblings_redone) == (1, 0)
    assert (loss.steps_rolled_back, loss.groups_trained_again) == (1, 1)
    words = _words(loss)
    assert "1 sibling in flight would be cut off." in words
    assert "0 siblings of them would go on from 0 tokens that are written down" in words
    assert "No finished sibling would be generated again." in words
    assert (
        "1 step since checkpoint step_000001 would be rolled back: trained again, on the same 1 group"
        in words
    )
    run.close()


@pytest.mark.parametrize("seed", range(4))
def test_the_cost_is_what_the_restart_then_redoes(tmp_path: Path, seed: int):
    run = DiskRun(tmp_path / "run")
    chance = Chance(run, seed, permits=8)
    chance.live(through_step=7, groups_per_step=2, checkpoint_every=3)
    chance.turn(2)
    loss = _loss(run)
    running = sum(s.running for group in run.p.live_groups() for s in group.siblings.values())
    applied = run.p.train_step
    run.kill()
    plan = run.restart()
    assert loss.siblings_in_flight == running
    assert len(plan.superseded) == loss.siblings_in_flight + loss.sealed_siblings_redone
    assert loss.tokens_redone == plan.lost_tokens
    assert loss.steps_rolled_back == applied - plan.train_step
    run.close()


def test_a_run_that_ended_in_order_has_nothing_to_kill(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.close()
    loss = plan_offline(run.directory, policy=RecoveryPolicy()).loss
    assert loss.ended_in_order
    assert "there is nothing to kill" in _words(loss)
    assert "No step would be rolled back: the restart would begin at checkpoint step_000001." in _words(loss)


def test_without_a_checkpoint_all_steps_since_the_start_are_trained_again(tmp_path: Path):
    run = DiskRun(tmp_path / "run")
    run.story.train(run.story.finalized(), run.story.finalized())
    assert StepApplied in map(type, run.story.events)
    loss = _loss(run)
    assert (loss.checkpoint, loss.steps_rolled_back, loss.groups_trained_again) == (None, 1, 2)
    assert loss.sealed_siblings_redone == 4
    assert "4 finished siblings would be generated again, 40 tokens" in _words(loss)
    assert "1 step since the start of the run" in _words(loss)
    run.close()


def test_what_the_row_journal_keeps_is_told_and_not_redone(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.story.dispatch(4)
    run.story.seal(4)
    without = _loss(run)
    journal = journal_in(run.directory)
    for record in run.story.events[-2:]:
        assert isinstance(record, SiblingSealed)
        journal.append(journal_rows(record))
    kept = _loss(run)
    assert (without.sealed_siblings_redone, kept.sealed_siblings_redone) == (2, 0)
    assert (without.rows_kept_by_journal, kept.rows_kept_by_journal) == (0, 4)
    assert (kept.siblings_kept_by_journal, kept.tokens_kept_by_journal) == (2, without.tokens_redone)
    assert "The row journal keeps 4 rows that no checkpoint has" in _words(kept)
    journal.close()
    run.close()
