"""A run that is told to stop: nothing new is begun, what is about to finish is sealed, and it ends in time."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from kinlog_bench import Bench
from kinlog_conformance import COHORT, Act, Given, living, reserved, worker_answers_late, worker_hangs
from kinlog_fake_parts import FakeDataPlane, FakeParts
from kinlog_interleavings import ChanceLoop, apart, ticks
from kinlog_lives import Life, assert_conserved, first_life, history, next_life, replayed, run_config
from kinlog_preemption import Preemption, preempted

from kinlog.controller.preemption import end_when_asked
from kinlog.lineage.state import GroupPhase, Projection
from kinlog.schemas import events as e
from kinlog.schemas.errors import CheckpointError, LogWriteError, PreemptedError
from kinlog.schemas.reasons import Partition, Reason
from kinlog.schemas.rows import RowTag

BEGINNINGS = (e.GroupReserved, e.SiblingDispatched, e.GroupClaimed, e.FinalizeStarted, e.SiblingSealed)


def is_generating(p: Projection) -> bool:
    """Whether group 0 is under way, and something of it is sealed."""
    siblings = p.groups[0].siblings.values() if 0 in p.groups else ()
    return any(s.sealed for s in siblings) and not any(s.waiting for s in siblings)


def after(seq: int) -> Callable[[Projection], bool]:
    return lambda p: p.last_seq >= seq


def generating_still() -> list[Act]:
    """Group 0 lacks one sibling, which hangs; the others get to where they are finalized."""
    return [reserved(siblings=3), worker_hangs(0, 2, 1)]


# ---- nothing new ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq", range(2, 62, 3))
def test_nothing_is_drawn_dispatched_or_claimed_after_the_request_whenever_it_comes(seq: int):
    came = Preemption()
    done = Given().when(preempted(after(seq), then=came)).then()
    later = done.events[came.told_seq :]
    assert not [event for event in later if isinstance(event, BEGINNINGS[:3])]
    assert came.said
    assert came.took_s == 0, "there was nothing to wait for"


def test_failed_attempt_is_not_tried_again():
    history = [reserved(siblings=3), worker_answers_late(0, 0, 1, after_s=2), worker_hangs(0, 1, 1)]
    given = Given(*history, supervision__retry_backoff_s=1.0)

    def fails_later(bench) -> None:
        bench.pool.fail(0, 0, 1, Reason.DATA_FAILURE)

    done = given.when(fails_later, preempted(is_generating)).then()
    assert [d.attempt for d in done.of(e.SiblingDispatched) if (d.group_id, d.generation) == (0, 0)] == [1]


# ---- what is about to finish ------------------------------------------------------------------------------------


def test_sibling_that_finishes_in_the_grace_period_is_sealed_and_its_group_finalized():
    came = Preemption()
    given = Given(reserved(siblings=3), worker_answers_late(0, 2, 1, after_s=6))
    given.when(preempted(is_generating, grace_s=10, then=came)).then(state={0: GroupPhase.FINALIZED})
    assert came.took_s == 6
    assert "0 attempts given up" in came.said


def test_sibling_that_does_not_is_given_up_at_its_end_and_charged_with_nothing():
    came = Preemption()
    given = Given(reserved(siblings=3), worker_answers_late(0, 2, 1, after_s=11))
    done = given.when(preempted(is_generating, grace_s=10, then=came)).then(
        state={0: {"sealed": {0, 1}, "waiting": {2}, "infrastructure_failures": (0, 0, 0)}}
    )
    assert came.took_s == 10
    assert [event.reason for event in done.of(e.AttemptSuperseded)] == [Reason.PREEMPTED]
    assert done.p.groups[0].siblings[2].restarts == 0


def test_cohort_that_does_not_finish_is_given_up_whole():
    given = Given(reserved(siblings=3, granularity=COHORT), worker_hangs(0, 2, 1))

    def is_running(p: Projection) -> bool:
        return all(s.running for s in p.groups[0].siblings.values())

    done = given.when(preempted(is_running)).then(state={0: {"sealed": set(), "waiting": {0, 1, 2}}})
    reasons = [event.reason for event in done.of(e.AttemptSuperseded)]
    assert reasons == [Reason.PREEMPTED, Reason.COHORT_RESTART, Reason.COHORT_RESTART]


# ---- training ---------------------------------------------------------------------------------------------------


def training_takes(seconds: float):
    def act(bench) -> None:
        step = bench.trainer.step

        async def slow(order):
            await asyncio.sleep(seconds)
            return await step(order)

        bench.trainer.step = slow

    return act


def is_training(p: Projection) -> bool:
    return any(group.phase is GroupPhase.CLAIMED for group in p.groups.values())


def test_step_that_is_being_trained_is_finished_and_saved():
    came = Preemption()
    done = Given().when(training_takes(3), preempted(is_training, then=came)).then(state={"train_step": 1})
    assert came.saves_after_s == (3,)
    assert [c.train_step for c in done.p.checkpoints] == [1]
    assert "has, at step 1: " in came.said
    assert "; checkpoint step_000001. " in came.said


def test_step_that_takes_too_long_is_left_claimed_for_the_restart_to_undo():
    came = Preemption()
    done = Given().when(training_takes(30), preempted(is_training, grace_s=10, then=came)).then()
    assert (done.p.train_step, came.took_s, came.saves_after_s) == (0, 10, ())
    assert "no checkpoint, since a step was still trained on" in came.said


# ---- the checkpoint ---------------------------------------------------------------------------------------------


def saving(*, takes_s: float, measured_s: float | None, hangs: bool, **options: object) -> Preemption:
    came = Preemption()
    given = Given(*(generating_still() if hangs else []))
    given.when(
        preempted(is_generating, grace_s=10, takes_s=takes_s, measured_s=measured_s, then=came, **options)  # type: ignore[arg-type]
    ).then()
    return came


def test_checkpoint_is_taken_at_once_when_nothing_is_under_way():
    came = saving(takes_s=2, measured_s=2, hangs=False)
    assert (came.saves_after_s, came.took_s) == ((0,), 2)
    assert "checkpoint step_000000" in came.said


def test_checkpoint_is_begun_as_late_as_its_measured_time_allows_when_something_is():
    came = saving(takes_s=4, measured_s=4, hangs=True)
    assert (came.saves_after_s, came.took_s) == ((5,), 10)
    assert "checkpoint step_000000" in came.said


def test_checkpoint_is_begun_also_by_a_timer_that_is_late_as_every_real_one_is(monkeypatch):
    def time(loop: ChanceLoop) -> float:
        loop._now_s += 1e-6
        return loop._now_s

    monkeypatch.setattr(ChanceLoop, "time", time)
    came = saving(takes_s=4, measured_s=4, hangs=True)
    assert came.saves_after_s == (pytest.approx(5, abs=0.01),)
    assert "checkpoint step_000000" in came.said


def test_checkpoint_that_takes_longer_than_there_is_time_is_not_begun():
    came = saving(takes_s=9, measured_s=9, hangs=True)
    assert (came.saves_after_s, came.took_s) == ((), 10)
    assert "no checkpoint, since it would have taken 11.2 s" in came.said


def test_checkpoint_that_nobody_has_measured_is_tried_once_nothing_else_is_left_to_wait_for():
    assert saving(takes_s=2, measured_s=None, hangs=False).saves_after_s == (0,)
    came = saving(takes_s=2, measured_s=None, hangs=True)
    assert came.saves_after_s == ()
    assert "no checkpoint, since there was no time left for one" in came.said


def test_checkpoint_that_hangs_is_cut_off_at_the_end_of_the_grace_period():
    came = saving(takes_s=1000, measured_s=2, hangs=False)
    assert came.took_s == 10
    assert "no checkpoint, since it took too long" in came.said


def test_checkpoint_that_fails_is_said_and_the_run_ends_all_the_same():
    came = saving(takes_s=1, measured_s=2, hangs=False, problem="the disk is full")
    assert "no checkpoint, since it failed: the disk is full" in came.said


@pytest.mark.parametrize(
    ("journal", "said"),
    [
        (True, "; no new checkpoint, since the last one and the row journal have everything. "),
        (False, "; checkpoint rollout_000000_0001. "),
    ],
)
def test_steps_that_have_their_checkpoint_are_not_saved_again_and_rollouts_only_without_a_journal(
    journal: bool, said: str
):
    came = Preemption()
    given = Given(checkpointing__every_steps=1, row_journal__enabled=journal)
    given.when(preempted(lambda p: bool(p.checkpoints), then=came)).then()
    assert said in came.said


def test_rollouts_without_a_journal_are_saved_although_a_step_is_open():
    came = Preemption()
    given = Given(row_journal__enabled=False)
    given.when(training_takes(30), preempted(is_training, measured_s=4, then=came)).then()
    assert came.saves_after_s == (5,)
    assert "; checkpoint rollout_000000_0001. " in came.said


def test_run_that_has_trained_its_last_step_ends_well_whatever_it_is_told():
    came = Preemption()
    done = Given().when(preempted(lambda p: p.train_step == 4, then=came)).then(state={"train_step": 4})
    assert came.said == ""
    assert [c.train_step for c in done.p.checkpoints] == [2, 4]


def test_checkpoint_that_is_one_failure_too_many_does_not_hide_why_the_run_ended():
    class OneTooMany:
        last_seconds = None

        async def save(self) -> None:
            raise CheckpointError("3 checkpoints in a row have failed")

    async def end(bench: Bench) -> None:
        bench.runtime.stop.training_rests = True
        bench.runtime.stop.asked_at_s = 0.0
        await end_when_asked(bench.runtime, OneTooMany(), grace_s=10)  # type: ignore[arg-type]

    Given().when(end).then(raises=(PreemptedError, "no checkpoint: 3 checkpoints in a row have failed"))


def test_save_of_another_that_hangs_with_everybody_kept_out_does_not_hold_up_the_end():
    came = Preemption()

    async def keep_out(bench: Bench) -> None:
        async def hold() -> None:
            async with bench.runtime.barrier.exclusive("checkpoint"):
                await asyncio.sleep(1000)

        holding = apart(hold())
        await ticks()
        await preempted(grace_s=10, then=came)(bench)
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)

    Given(*generating_still()).when(keep_out).then()
    assert came.took_s == 15
    assert "no attempt given up, since a checkpoint kept everybody out" in came.said


def test_log_that_fails_is_no_preemption():
    class BrokenLog:
        last_seconds = None

        async def save(self) -> None:
            raise LogWriteError("the disk is full")

    async def end(bench: Bench) -> None:
        bench.runtime.stop.training_rests = True
        bench.runtime.stop.asked_at_s = 0.0
        await end_when_asked(bench.runtime, BrokenLog(), grace_s=10)  # type: ignore[arg-type]

    Given().when(end).then(raises=(LogWriteError, "the disk is full"))


# ---- the next life ----------------------------------------------------------------------------------------------


class JournallingParts(FakeParts):
    """Parts whose staged rows outlive them."""

    def __init__(self, journal: dict[str, RowTag]) -> None:
        super().__init__()
        self._journal = journal

    async def start_data_plane(self) -> FakeDataPlane:
        data_plane = await super().start_data_plane()
        data_plane.journal, put = self._journal, data_plane.put

        def put_and_journal(partition: Partition, key: str, tag: RowTag) -> None:
            put(partition, key, tag)
            if partition is Partition.STAGING:
                self._journal[key] = tag

        data_plane.put = put_and_journal  # type: ignore[method-assign]
        return data_plane


def sealed_in(p: Projection) -> set[tuple[int, int]]:
    return {(g.group_id, n) for g in p.live_groups() for n, s in g.siblings.items() if s.sealed}


async def told_to_stop(path: Path, journal: dict[str, RowTag]) -> Life:
    """A life that has sealed siblings, and is told to stop while one of them is held back."""
    parts = JournallingParts(journal)
    parts.prepare = lambda parts: parts.pool.gates.update({(5, 2, 1): asyncio.Event()})
    life = await first_life(path, run_config(trainer__max_steps=6), parts)
    await life.train_until(lambda p: 5 in p.groups and p.groups[5].siblings[1].sealed is not None)
    life.controller.preempt()
    return life


async def test_preempted_run_is_closed_cleanly_and_the_next_life_reuses_and_ends(tmp_path: Path):
    journal: dict[str, RowTag] = {}
    life = await told_to_stop(tmp_path, journal)
    life.parts.pool.gates[5, 2, 1].set()
    assert life._task is not None
    with pytest.raises(PreemptedError, match=f"--run-dir {tmp_path} --resume"):
        await life._task
    await life.controller.close(cleanly=True)
    assert isinstance(history(tmp_path)[-1].event, e.WriterClosed)
    stood = replayed(tmp_path)
    sealed = sealed_in(stood)
    assert (5, 2) in sealed

    resumed = await next_life(tmp_path, run_config(trainer__max_steps=6), JournallingParts(journal))
    assert resumed.p.train_step == stood.train_step
    assert sealed <= sealed_in(resumed.p)
    assert not [r for r in history(tmp_path) if isinstance(r.event, e.AttemptSuperseded)]
    await resumed.train()
    assert resumed.p.train_step == 6
    assert_conserved(resumed.p)


async def test_kill_in_the_grace_period_loses_nothing_sealed(tmp_path: Path):
    journal: dict[str, RowTag] = {}
    life = await told_to_stop(tmp_path, journal)
    await life.kill()
    stood = replayed(tmp_path)
    sealed = sealed_in(stood)

    resumed = await next_life(tmp_path, run_config(trainer__max_steps=6), JournallingParts(journal))
    assert sealed
    assert sealed <= sealed_in(resumed.p)
    await resumed.train()
    assert_conserved(resumed.p)


async def test_request_that_comes_before_training_begins_is_heeded(tmp_path: Path):
    life = await first_life(tmp_path)
    life.controller.preempt()
    with pytest.raises(PreemptedError, match="at step 0"):
        await life.controller.run()
    await life.controller.close(cleanly=True)
    assert replayed(tmp_path).drawn_total == 0


def test_life_after_a_preemption_does_what_was_left():
    given = Given(*generating_still())
    now = given.when(preempted(is_generating)).then(state={0: {"sealed": {0, 1}}})
    now.when(lambda bench: bench.restarted(), living()).then(
        state={"train_step": 4}, events=[], only=(e.AttemptSuperseded,)
    )
