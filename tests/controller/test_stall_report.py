"""What a stall says: steps and phases, permits, worker slots, the barrier, and every open call and pause."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import pytest
from kinlog_bench import Bench
from kinlog_builders import ManualClock
from kinlog_interleavings import apart, ticks
from kinlog_lives import run_config

from kinlog.controller.barrier import Barrier
from kinlog.controller.rollout_pump import RolloutPump
from kinlog.controller.supervise import describe_waiting
from kinlog.controller.train_pump import TrainPump
from kinlog.controller.waits import Waits
from kinlog.schemas.reasons import Reason


@asynccontextmanager
async def meanwhile(*bodies) -> AsyncIterator[None]:
    """Let coroutines run into whatever they wait for."""
    tasks = [asyncio.create_task(body) for body in bodies]
    await ticks(200)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_stall_counts_groups_by_phase_and_by_the_step_they_were_drawn_for():
    bench = Bench()
    for step in (1, 1, 2):
        bench.story.reserve(train_step=step)
    bench.story.admit(0)
    text = describe_waiting(bench.runtime)
    assert "2 reserved: groups [1, 2]; 1 admitted: groups [0]" in text
    assert "Drawn for step 1: 1 admitted, step 1: 1 reserved, step 2: 1 reserved." in text
    assert "Permits: 3 of 6 are taken" in text


async def test_stall_says_who_holds_the_worker_slots_and_how_many_wait_for_them():
    bench = Bench(run_config(rollout__max_inflight_siblings=2))
    group_id = bench.admitted(siblings=3)
    for generation in range(3):
        bench.pool.hold(group_id, generation, 1)
    async with meanwhile(bench.driver.drive(group_id)):
        assert "2 of 2 worker slots are taken; requests waiting: 1 fresh" in describe_waiting(bench.runtime)
    await bench.driver.close()


async def test_stall_names_the_call_to_the_trainer():
    bench = Bench(run_config(trainer__max_steps=1))
    bench.trainer.gate = asyncio.Event()
    pumps = (
        RolloutPump(bench.runtime, bench.driver).run(),
        TrainPump(bench.runtime, None, lambda metrics: None).run(),  # type: ignore[arg-type]
    )
    async with meanwhile(*pumps):
        assert "waiting for the trainer to train step 1 on groups [0, 1]" in describe_waiting(bench.runtime)
    await bench.driver.close()
    assert "waiting for no call and no pause" in describe_waiting(bench.runtime)


async def test_stall_names_pauses_before_a_retry():
    bench = Bench()
    never = asyncio.Event()

    async def sleeps_for_ever(seconds: float) -> None:
        await never.wait()

    object.__setattr__(bench.runtime, "sleep", sleeps_for_ever)
    group_id = bench.admitted(siblings=1)
    bench.pool.fail(group_id, 0, 1, Reason.DATA_FAILURE)
    async with meanwhile(bench.driver.drive(group_id)):
        expected = f"waiting for the pause of 0.001 s of group {group_id} before its next attempt"
        assert expected in describe_waiting(bench.runtime)


async def test_stall_names_the_finalizer_that_does_not_answer():
    bench = Bench()
    group_id = bench.story.ready()
    never = asyncio.Event()

    async def hangs(order):
        await never.wait()

    bench.finalizer.finalize = hangs  # type: ignore[method-assign]
    async with meanwhile(bench.driver.drive(group_id)):
        expected = f"waiting for the finalizer to finalize group {group_id}"
        assert expected in describe_waiting(bench.runtime)


async def test_barrier_says_who_holds_it_and_who_waits():
    barrier = Barrier()
    assert str(barrier) == "the barrier is held by nobody; waiting for it: nobody"

    async def cut(kind: str) -> None:
        async with barrier.cut(kind):
            await ticks()

    async with barrier.exclusive("checkpoint"):
        waiting = [apart(cut(kind)) for kind in ("seal", "seal", "claim")]
        await ticks(2)
        assert str(barrier) == "the barrier is held by 1 checkpoint; waiting for it: 1 claim, 2 seal"
    await ticks(2)
    assert str(barrier) == "the barrier is held by 1 claim, 2 seal; waiting for it: nobody"
    await asyncio.gather(*waiting)
    assert str(barrier) == "the barrier is held by nobody; waiting for it: nobody"


def test_only_the_oldest_waits_are_named_each_with_its_age():
    clock = ManualClock(0)
    waits = Waits(lambda: clock.now_us / 1e6)
    with waits.on("the first"):
        clock.now_us = 90_000_000
        with waits.on("the second"):
            assert str(waits) == "waiting for the first for 90 s, the second for 0 s"
    with ExitStack() as many:
        for number in range(10):
            many.enter_context(waits.on(f"wait {number}"))
        assert str(waits).endswith("wait 7 for 0 s and 2 more")


@pytest.mark.parametrize("fails", [True, False])
def test_wait_that_has_ended_is_forgotten_however_it_ended(fails: bool):
    waits = Waits()
    try:
        with waits.on("something"):
            if fails:
                raise OSError
    except OSError:
        pass
    assert len(waits) == 0
