"""Ends of a drive: a bug ends the run as the very exception, and a group that has left is let go."""

import asyncio

import pytest
from kinlog_bench import Bench
from kinlog_driving import COHORT, canonical, phase_of, staged, until
from kinlog_interleavings import apart, ticks
from kinlog_lives import run_config

from kinlog.controller.rollout_pump import RolloutPump
from kinlog.controller.supervise import supervise
from kinlog.lineage.state import GroupPhase
from kinlog.schemas import events as e
from kinlog.schemas.errors import DataPlaneError, WorkerLostError
from kinlog.schemas.orders import FinalizeRejected, RolloutFailed, RolloutOrder
from kinlog.schemas.reasons import Granularity, Reason

# ---- bugs end the run -------------------------------------------------------------------------------------------


async def supervised(bench: Bench) -> None:
    """The rollout pump beside a training that never ends."""

    async def train() -> None:
        await asyncio.Event().wait()

    await supervise(
        [("rollout", RolloutPump(bench.runtime, bench.driver).run()), ("train", train())], until="train"
    )


@pytest.mark.parametrize("granularity", list(Granularity))
async def test_unexpected_error_of_a_worker_ends_the_run_as_the_very_exception(granularity: Granularity):
    bench = Bench(run_config(rollout_recovery__default_granularity=granularity))
    error = ZeroDivisionError("a bug")

    def broken(order: RolloutOrder) -> RolloutFailed:
        raise error

    bench.pool.answers[1, 2, 1] = broken
    async with asyncio.timeout(600):
        with pytest.raises(ZeroDivisionError) as caught:
            await supervised(bench)
    assert caught.value is error


async def test_unexpected_error_of_a_late_call_ends_the_run_too():
    bench = Bench(run_config(rollout_recovery__default_granularity=COHORT))
    error = ZeroDivisionError("a bug")

    def broken(order: RolloutOrder) -> RolloutFailed:
        raise error

    gate = bench.pool.hold(0, 2, 1)
    bench.pool.answers[0, 2, 1] = broken
    bench.pool.lose_worker(0, 1, 1)
    task = asyncio.create_task(supervised(bench))
    await until(lambda: phase_of(bench, 0) is GroupPhase.FINALIZED)
    gate.set()
    async with asyncio.timeout(600):
        with pytest.raises(ZeroDivisionError) as caught:
            await task
    assert caught.value is error


async def test_unexpected_error_of_the_finalizer_ends_the_run_as_the_very_exception():
    bench = Bench()
    error = ZeroDivisionError("a bug")

    async def broken(order: object) -> None:
        raise error

    bench.finalizer.finalize = broken  # type: ignore[method-assign, assignment]
    async with asyncio.timeout(600):
        with pytest.raises(ZeroDivisionError) as caught:
            await supervised(bench)
    assert caught.value is error


@pytest.mark.parametrize("error", [WorkerLostError("died"), DataPlaneError("slow")])
async def test_late_call_whose_worker_is_lost_ends_nothing(error: Exception):
    bench = Bench(run_config(rollout_recovery__default_granularity=COHORT, rollout__max_live_groups=2))

    def lost(order: RolloutOrder) -> RolloutFailed:
        raise error

    gate = bench.pool.hold(0, 2, 1)
    bench.pool.answers[0, 2, 1] = lost
    bench.pool.lose_worker(0, 1, 1)
    task = asyncio.create_task(supervised(bench))
    await until(lambda: phase_of(bench, 0) is GroupPhase.FINALIZED)
    gate.set()
    await ticks(60)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_call_that_is_cancelled_by_the_worker_s_side_costs_one_attempt():
    bench = Bench()
    group_id = bench.admitted()

    def cancelled(order: RolloutOrder) -> RolloutFailed:
        raise asyncio.CancelledError

    bench.pool.answers[group_id, 1, 1] = cancelled
    async with asyncio.timeout(600):
        await bench.driver.drive(group_id)
    assert phase_of(bench, group_id) is GroupPhase.FINALIZED
    assert bench.p.superseded == {Reason.WORKER_LOST: 1}


async def test_drive_that_is_cancelled_leaves_no_call_behind():
    for granularity in Granularity:
        bench = Bench()
        group_id = bench.admitted(granularity=granularity)
        for generation in range(3):
            bench.pool.hold(group_id, generation, 1)
        task = asyncio.create_task(bench.driver.drive(group_id))
        await bench.until_called(3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await ticks()
        assert bench.pool.running == 0
        assert bench.runtime.budget.in_use == 0


# ---- groups that leave while they are driven --------------------------------------------------------------------


async def test_group_that_leaves_before_it_is_admitted_is_let_go():
    bench = Bench()
    group_id = bench.story.reserve()
    async with bench.runtime.barrier.exclusive("checkpoint"):
        task = apart(bench.driver.drive(group_id))
        await ticks()
        bench.drop(group_id)
    await task
    assert bench.pool.calls == []


@pytest.mark.parametrize("granularity", list(Granularity))
async def test_group_that_leaves_while_its_dispatch_becomes_durable_is_let_go(granularity: Granularity):
    bench = Bench()
    group_id = bench.admitted(granularity=granularity)
    await bench.writer.position()
    bench.writer.held = True
    task = asyncio.create_task(bench.driver.drive(group_id))
    await until(lambda: bool(bench.events(e.SiblingDispatched)))
    bench.drop(group_id)
    bench.writer.held = False
    await task
    assert staged(bench) == set()


@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize("leave", ["drop", "park"])
async def test_results_of_a_group_that_left_while_its_siblings_ran_are_rejected(
    granularity: Granularity, leave: str
):
    bench = Bench()
    group_id = bench.admitted(granularity=granularity)
    gates = [bench.pool.hold(group_id, generation, 1) for generation in range(3)]
    task = asyncio.create_task(bench.driver.drive(group_id))
    await bench.until_called(3)
    if leave == "drop":
        bench.drop(group_id)
    else:
        bench.story.commit(e.GroupParked(group_id=group_id, reason=Reason.RETRY_BUDGET))
    for gate in gates:
        gate.set()
    await task
    assert {(r.generation, r.attempt) for r in bench.events(e.LateResultRejected)} == {
        (0, 1),
        (1, 1),
        (2, 1),
    }
    assert staged(bench) == set()
    assert bench.finalizer.calls == []


@pytest.mark.parametrize("outcome", ["finalized", "rejected", "lost", "parked"])
async def test_group_that_leaves_while_it_is_finalized_stays_gone(outcome: str):
    bench = Bench(run_config(rollout__max_infrastructure_retries=0 if outcome == "parked" else 5))
    group_id = bench.admitted()
    if outcome == "rejected":
        bench.finalizer.reject[group_id] = FinalizeRejected(
            group_id=group_id, generation=1, reason=Reason.ROWS_MISSING, detail="scripted"
        )
    bench.finalizer.lose_answers = outcome in ("lost", "parked")
    finalize = bench.finalizer.finalize

    async def leaving(order):
        try:
            return await finalize(order)
        finally:
            bench.drop(group_id)

    bench.finalizer.finalize = leaving  # type: ignore[method-assign]
    async with asyncio.timeout(600):
        await bench.driver.drive(group_id)
    assert bench.p.dropped == {Reason.EVICTED: 1}
    assert bench.events(e.GroupFinalized) == []
    if outcome == "finalized":
        # Published by an answer that came too late to count: nobody would ever clear them.
        assert canonical(bench) == set()
