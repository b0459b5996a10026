"""An answer in the very moment of its time-out, and a drive that is cancelled at any moment: nothing breaks or is left."""

import asyncio

import pytest
from kinlog_bench import Bench
from kinlog_conformance import COHORT, SIBLING
from kinlog_interleavings import run_by_chance, ticks
from kinlog_lives import run_config

from kinlog.lineage.state import GroupPhase
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Granularity, Reason

TIME_OUT_S = 100.0


def answering_after(bench: Bench, seconds: float) -> None:
    """Let the first attempt of sibling 0/1 answer after so many seconds of virtual time."""
    run = bench.pool.run

    async def late(worker, order):
        if (order.generation, order.attempt) == (1, 1):
            await asyncio.sleep(seconds)
        return await run(worker, order)

    bench.pool.run = late  # type: ignore[method-assign]
    bench.pool.delay_ticks = lambda order: 0


@pytest.mark.parametrize("granularity", [SIBLING, COHORT])
@pytest.mark.parametrize("after_s", [TIME_OUT_S, TIME_OUT_S + 0.001])
@pytest.mark.parametrize("seed", range(25))
def test_answer_in_the_moment_of_its_time_out_is_used_or_late_and_breaks_nothing(
    seed: int, after_s: float, granularity: Granularity
):
    async def life() -> Bench:
        bench = Bench(run_config(rollout__sibling_timeout_s=TIME_OUT_S))
        group_id = bench.admitted(siblings=3, granularity=granularity)
        answering_after(bench, after_s)
        async with asyncio.TaskGroup() as tasks:
            bench.driver.watch_late_results_in(tasks)
            await bench.driver.drive(group_id)
            await asyncio.sleep(2 * TIME_OUT_S)
        await bench.driver.close()
        return bench

    bench = run_by_chance(life(), seed)
    assert bench.p.groups[0].phase is GroupPhase.FINALIZED
    timed_out = [event for event in bench.events(e.AttemptSuperseded) if event.reason is Reason.TIMEOUT]
    late = [event for event in bench.events(e.LateResultRejected) if event.generation == 1]
    assert len(late) == len(timed_out) <= 1


async def left_over(bench: Bench) -> tuple[int, int]:
    """Return how many calls run on, and how many tasks there are beside this one."""
    await bench.driver.close()
    await ticks()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    running = bench.pool.running
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return running, len(others)


@pytest.mark.parametrize("granularity", [SIBLING, COHORT])
async def test_drive_that_is_cancelled_at_any_tick_leaves_no_call(granularity: Granularity):
    done, tick = False, 0
    while not done:
        bench = Bench()
        group_id = bench.admitted(siblings=3, granularity=granularity)
        bench.pool.fail(group_id, 0, 1, Reason.DATA_FAILURE)
        driving = asyncio.create_task(bench.driver.drive(group_id))
        await ticks(tick)
        done = driving.done()
        driving.cancel()
        await asyncio.gather(driving, return_exceptions=True)
        assert await left_over(bench) == (0, 0), f"tick {tick}"
        tick += 1
    assert tick > 20


@pytest.mark.parametrize("granularity", [SIBLING, COHORT])
async def test_drive_that_is_cancelled_while_a_checkpoint_holds_the_barrier_leaves_no_call(
    granularity: Granularity,
):
    for tick in range(30):
        bench = Bench()
        group_id = bench.admitted(siblings=3, granularity=granularity)
        bench.pool.fail(group_id, 0, 1, Reason.DATA_FAILURE)
        bench.pool.hold(group_id, 1, 1)
        bench.pool.hold(group_id, 2, 1)
        driving = asyncio.create_task(bench.driver.drive(group_id))
        await bench.until_called(3)
        async with bench.runtime.barrier.exclusive("checkpoint"):
            await ticks(tick)
            driving.cancel()
            await asyncio.gather(driving, return_exceptions=True)
        assert await left_over(bench) == (0, 0), f"tick {tick}"
