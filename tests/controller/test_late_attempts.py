"""Attempts that were given up: they are aborted, and their worker slots count until their calls have really ended."""

import asyncio

import pytest
from kinlog_bench import Bench
from kinlog_fake_parts import Identity
from kinlog_interleavings import run_by_chance, ticks
from kinlog_lives import run_config

from kinlog.lineage.state import GroupPhase
from kinlog.schemas import events as e
from kinlog.schemas.orders import RolloutFailed, RolloutOrder
from kinlog.schemas.reasons import Granularity, Reason

COHORT = Granularity.PROMPT_GROUP
TIMEOUT_S = 10.0


def bench_of(workers: int, **changes: object) -> Bench:
    return Bench(
        run_config(rollout__max_inflight_siblings=workers, rollout__sibling_timeout_s=TIMEOUT_S, **changes)
    )


def obey_aborts(bench: Bench) -> None:
    """Let calls that are held end when they are aborted, as workers' calls do."""

    def abort(worker: str, order: RolloutOrder) -> None:
        identity = (order.group_id, order.generation, order.attempt)
        bench.pool.aborted.append(identity)
        bench.pool.answers[identity] = lambda order: RolloutFailed(
            group_id=order.group_id,
            generation=order.generation,
            attempt=order.attempt,
            reason=Reason.SUPERSEDED_ATTEMPT,
            detail="aborted",
        )
        if identity in bench.pool.gates:
            bench.pool.gates[identity].set()

    bench.pool.abort = abort  # type: ignore[method-assign]


def sent_at(bench: Bench) -> dict[Identity, float]:
    """Virtual times at which attempts are sent to workers, from now on."""
    times: dict[Identity, float] = {}
    run = bench.pool.run

    async def timed(worker: str, order: RolloutOrder):
        times[order.group_id, order.generation, order.attempt] = asyncio.get_running_loop().time()
        return await run(worker, order)

    bench.pool.run = timed  # type: ignore[method-assign]
    return times


def test_attempt_that_timed_out_is_aborted_and_made_again_when_its_call_has_ended():
    async def main() -> None:
        bench = bench_of(workers=1)
        obey_aborts(bench)
        group_id = bench.admitted(siblings=1)
        bench.pool.hold(group_id, 0, 1)
        await bench.driver.drive(group_id)
        assert bench.pool.aborted == [(group_id, 0, 1)]
        assert bench.pool.max_running == 1
        assert bench.p.superseded == {Reason.TIMEOUT: 1}
        assert bench.events(e.LateResultRejected) == []
        assert bench.runtime.budget.in_use == 0

    run_by_chance(main())


@pytest.mark.parametrize("ends_after_s", [3.0, 8.0])
def test_slot_of_a_late_call_is_nobody_else_s_before_it_has_ended(ends_after_s: float):
    async def main() -> None:
        bench = bench_of(workers=1)
        times = sent_at(bench)
        group_id = bench.admitted(siblings=1)
        gate = bench.pool.hold(group_id, 0, 1)
        asyncio.get_running_loop().call_later(TIMEOUT_S + ends_after_s, gate.set)
        await bench.driver.drive(group_id)
        await ticks()
        assert times[group_id, 0, 2] >= TIMEOUT_S + ends_after_s
        assert bench.pool.max_running == 1
        assert len(bench.events(e.LateResultRejected)) == 1

    run_by_chance(main())


def test_worker_that_hangs_for_ever_keeps_its_slot_for_one_more_time_out_and_no_longer(
    caplog: pytest.LogCaptureFixture,
):
    async def main() -> None:
        bench = bench_of(workers=1)
        times = sent_at(bench)
        group_id, other = bench.admitted(siblings=1), bench.admitted(siblings=1)
        bench.pool.hold(group_id, 0, 1)
        hung = asyncio.create_task(bench.driver.drive(group_id))
        await bench.until_called(1)
        await asyncio.gather(hung, bench.driver.drive(other))
        assert min(times[group_id, 0, 2], times[other, 0, 1]) == pytest.approx(2 * TIMEOUT_S)
        assert bench.p.groups[group_id].phase is bench.p.groups[other].phase is GroupPhase.FINALIZED
        await bench.driver.close()
        assert bench.runtime.budget.in_use == 0

    run_by_chance(main())
    assert (
        "generation-0 has not stopped group 0/0 attempt 1 in 10 s: its slot is given to others" in caplog.text
    )


def test_others_of_a_failed_cohort_are_aborted_and_the_next_attempt_waits_for_their_slots():
    async def main() -> None:
        bench = bench_of(workers=3)
        obey_aborts(bench)
        group_id = bench.admitted(granularity=COHORT)
        bench.pool.lose_worker(group_id, 1, 1)
        for generation in (0, 2):
            bench.pool.hold(group_id, generation, 1)
        await bench.driver.drive(group_id)
        assert sorted(bench.pool.aborted) == [(group_id, 0, 1), (group_id, 2, 1)]
        assert bench.pool.max_running <= 3
        assert bench.p.groups[group_id].phase is GroupPhase.FINALIZED

    run_by_chance(main())


def test_cohort_that_times_out_is_superseded_for_one_sibling_and_all_its_calls_are_aborted():
    async def main() -> None:
        bench = bench_of(workers=3)
        obey_aborts(bench)
        group_id = bench.admitted(granularity=COHORT)
        for generation in range(3):
            bench.pool.hold(group_id, generation, 1)
        await bench.driver.drive(group_id)
        assert bench.p.superseded == {Reason.TIMEOUT: 1, Reason.COHORT_RESTART: 2}
        assert len(bench.pool.aborted) == 3
        assert bench.pool.max_running == 3

    run_by_chance(main())


@pytest.mark.parametrize("policy", ["park", "drop"])
def test_siblings_of_a_group_that_leaves_are_aborted_and_charged_to_nobody(policy: str):
    async def main() -> None:
        bench = bench_of(workers=3, rollout__max_data_retries=0, rollout__spent_retry_budget=policy)
        obey_aborts(bench)
        group_id = bench.admitted()
        for generation in (0, 2):
            bench.pool.hold(group_id, generation, 1)
        bench.pool.fail(group_id, 1, 1, Reason.DATA_FAILURE)
        async with asyncio.timeout(1):
            await bench.driver.drive(group_id)
        assert {(group_id, 0, 1), (group_id, 2, 1)} <= set(bench.pool.aborted)
        assert bench.p.superseded == {Reason.DATA_FAILURE: 1}
        assert bench.runtime.budget.in_use == 0

    run_by_chance(main())


def test_close_leaves_no_call_behind():
    async def main() -> None:
        bench = bench_of(workers=3)
        group_id = bench.admitted()
        bench.pool.hold(group_id, 1, 1)
        await bench.driver.drive(group_id)
        assert bench.pool.running == 1
        await bench.driver.close()
        assert bench.pool.running == 0

    run_by_chance(main())
