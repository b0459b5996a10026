"""What is shown of a watched run is what a fresh look at it shows, and what a kill would cost is what a restart redoes."""

import shutil
from pathlib import Path

import msgspec
import pytest
from kinlog_run_fixtures import Chance, DiskRun, small_run

from kinlog.lineage.log import create_log
from kinlog.replay.recovery.offline_plan import plan_offline
from kinlog.replay.recovery.plan import RecoveryPolicy
from kinlog.replay.watch.kill_cost import KillCost
from kinlog.replay.watch.run import WatchedRun, is_process_alive
from kinlog.replay.watch.summary import OldestSibling, RunState, RunView, Staleness
from kinlog.schemas import events as e
from kinlog.schemas.errors import RunNotFoundError
from kinlog.schemas.reasons import CheckpointKind, Reason
from kinlog.schemas.settings import LogSettings

_CONFIG = """\
dataset: {tasks: [{name: sums, generator: basic_arithmetic, agent: single}]}
trainer: {max_steps: 12, groups_per_step: 2}
rollout: {max_live_groups: 8}
"""


def _watch(run: DiskRun, *, alive: bool | None = None, later_us: int = 0) -> WatchedRun:
    return WatchedRun(
        run.directory.path, is_alive=lambda host, pid: alive, now_us=lambda: run._clock.now_us + later_us
    )


def _look(run: DiskRun, *, alive: bool | None = None, later_us: int = 0) -> RunView:
    return _watch(run, alive=alive, later_us=later_us).look()


def test_view_that_is_kept_up_to_date_is_the_view_of_a_fresh_look(tmp_path: Path):
    run = DiskRun(tmp_path / "run", segment_bytes=65_536)
    run.directory.config.write_text(_CONFIG)
    chance = Chance(run, 4, permits=8)
    run.position()
    watched = _watch(run)
    for through_step in range(1, 10):
        chance.live(through_step=through_step, groups_per_step=2, checkpoint_every=3)
        chance.turn(2)
        if through_step == 5:
            run.kill()
            run.restart()
        run.position()
        view = watched.look()
        assert view == _look(run)
        assert (view.state, view.train_step) == (RunState.RUNNING, run.p.train_step)
    assert (view.life, view.restarts) == (2, 1)
    assert view.eta_s is not None
    run.close()
    assert watched.look() == _look(run)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("steps", [2, 7])
def test_cost_of_a_kill_is_what_a_restart_redoes(tmp_path: Path, seed: int, steps: int):
    """There is no row journal here, so the restart is one without it."""
    run = DiskRun(tmp_path / "run")
    chance = Chance(run, seed, permits=8)
    chance.live(through_step=steps, groups_per_step=2, checkpoint_every=3)
    chance.turn(2)
    run.kill()
    cost = _look(run).kill
    report = plan_offline(run.directory, policy=RecoveryPolicy()).report
    assert cost.checkpoint == report.checkpoint
    assert cost.steps_rolled_back == report.steps_undone
    assert cost.siblings_redone_without_journal == sum(report.siblings_sealed_redone.values())
    assert cost.tokens_redone_without_journal == report.tokens_to_redo
    assert cost.siblings_in_flight == (
        sum(report.siblings_redispatched.values()) - sum(report.siblings_sealed_redone.values())
    )


def test_figures_of_a_run_told_by_hand(tmp_path: Path):
    run = DiskRun(tmp_path / "run")
    told = run.story
    first, second = told.finalized(), told.finalized()
    third = told.generating(siblings=3)
    told.seal(third, 1)
    told.train(first, second)
    run.checkpoint()
    told.commit(
        e.CheckpointFailed(name="step_000001", reason=Reason.TIMEOUT, detail="too slow"),
        e.CheckpointCommitted(
            name="rollout_000001_0001",
            checkpoint_kind=CheckpointKind.ROLLOUT,
            train_step=1,
            position=run.position(),
            frontier_step=0,
            duration_us=2_500_000,
            held_us=40_000,
        ),
    )
    fourth = told.generating()
    told.supersede(fourth, 0, Reason.TIMEOUT)
    told.seal(fourth, 1)
    run.position()
    sealed_tokens = told.group(fourth).siblings[1].sealed.completion_tokens
    sent_us = next(
        record.time_us
        for record in WatchedRun(run.directory.path)._log.scan.events()
        if isinstance(record.event, e.SiblingDispatched) and record.event.group_id == third
    )
    view = _look(run, later_us=5_000_000)
    now_us = run._clock.now_us + 5_000_000
    assert view.groups == {"generating": 2}
    assert (view.drawn, view.applied, view.live_groups) == (4, 2, 2)
    assert (view.siblings_in_flight, view.siblings_waiting, view.siblings_sealed) == (2, 1, 2)
    age_s = (now_us - sent_us) / 1e6
    assert view.oldest == OldestSibling(
        group_id=third, generation=0, attempt=1, worker="worker-0", age_s=age_s
    )
    # The third group is of weights 0, and so is what the fourth was reserved under: 1.
    assert view.staleness == Staleness(min=0, mean=0.5, max=1)
    assert view.superseded == {"timeout": 1}
    assert view.checkpoint is not None
    assert (view.checkpoint.name, view.checkpoint.duration_s, view.checkpoint.held_s) == (
        "rollout_000001_0001",
        2.5,
        0.04,
    )
    assert view.checkpoints_failed == 0
    assert view.sealed_tokens == told.p.sealed_tokens_total
    assert view.tokens_per_second == pytest.approx(told.p.sealed_tokens_total / view.life_s)
    assert view.kill == KillCost(
        checkpoint="rollout_000001_0001",
        siblings_in_flight=2,
        seconds_in_flight=pytest.approx(2 * age_s),
        steps_rolled_back=0,
        siblings_redone_without_journal=1,
        tokens_redone_without_journal=sealed_tokens,
    )
    run.close()


def test_state_says_whether_a_run_goes_on_died_stopped_or_is_done(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.story.generating()
    run.position()
    assert _look(run, alive=True).state is RunState.RUNNING
    assert _look(run, alive=None).state is RunState.RUNNING
    died = _look(run, alive=False, later_us=9_000_000)
    assert died.state is RunState.DIED
    assert died.log_lag.newest_event_age_s == 9
    # What was in flight does not get older once nothing runs.
    assert died.kill.seconds_in_flight < _look(run, later_us=9_000_000).kill.seconds_in_flight
    run.close()
    stopped = _look(run, alive=False, later_us=9_000_000)
    assert (stopped.state, stopped.eta_s) == (RunState.STOPPED, None)
    run.directory.config.write_text(_CONFIG.replace("max_steps: 12", "max_steps: 1"))
    assert _look(run, alive=False).state is RunState.DONE


def test_run_that_has_recorded_nothing_has_not_begun(tmp_path: Path):
    created = create_log(
        tmp_path / "run" / "log", log_id="log", run_id="run", writer_version="test", settings=LogSettings()
    )
    with pytest.raises(RunNotFoundError, match="has not begun"):
        WatchedRun(tmp_path / "run").look()
    created.close()


def test_snapshot_that_cannot_be_read_is_made_up_for_by_the_log(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.position()
    before = _look(run)
    for snapshot in run.directory.checkpoints.rglob("projection.zst"):
        snapshot.write_bytes(b"other")
    assert _look(run) == before
    shutil.rmtree(run.directory.checkpoints)
    assert _look(run) == before
    run.close()


def test_process_of_another_machine_is_not_judged():
    assert is_process_alive("some-other-machine", 1) is None


def test_view_is_json(tmp_path: Path):
    run = small_run(tmp_path / "run")
    run.position()
    assert msgspec.json.decode(msgspec.json.encode(_look(run)))["state"] == "running"
    run.close()
