"""Driving a group: budgets and pauses, cohorts, late results, finalizes."""

import asyncio
import itertools
from collections.abc import Callable

import pytest
from kinlog_bench import Bench
from kinlog_driving import COHORT, canonical, orders, phase_of, staged, until
from kinlog_interleavings import run_by_chance, ticks
from kinlog_lives import run_config

from kinlog.controller.attempts import sibling_seed
from kinlog.lineage.state import GroupPhase
from kinlog.schemas import events as e
from kinlog.schemas.orders import FinalizeOrder, FinalizeRejected, RolloutFailed, RolloutOrder
from kinlog.schemas.reasons import Granularity, Reason
from kinlog.schemas.receipts import canonical_key

# ---- pauses and budgets -----------------------------------------------------------------------------------------


async def test_pause_before_a_retry_doubles_up_to_its_bound():
    bench = Bench(
        run_config(
            supervision__retry_backoff_s=0.5,
            supervision__max_retry_backoff_s=3.0,
            rollout__max_infrastructure_retries=9,
        )
    )
    group_id = bench.admitted(siblings=1)
    for attempt in range(1, 7):
        bench.pool.lose_worker(group_id, 0, attempt)
    await bench.driver.drive(group_id)
    assert bench.slept_s == [0.5, 1.0, 2.0, 3.0, 3.0, 3.0]
    assert phase_of(bench, group_id) is GroupPhase.FINALIZED


async def test_pause_stays_bounded_after_thousands_of_failures():
    bench = Bench(
        run_config(supervision__max_retry_backoff_s=3.0, rollout__max_infrastructure_retries=1_000_000)
    )
    group_id = bench.admitted(siblings=1)
    bench.p.groups[group_id].siblings[0].infrastructure_failures = 5_000
    await bench.driver.drive(group_id)
    assert bench.slept_s == [3.0]


async def test_sibling_that_never_failed_starts_without_a_pause():
    bench = Bench()
    await bench.driver.drive(bench.admitted())
    assert bench.slept_s == []


@pytest.mark.parametrize(
    ("reason", "budget"),
    [
        (Reason.WORKER_LOST, "rollout__max_infrastructure_retries"),
        (Reason.TIMEOUT, "rollout__max_infrastructure_retries"),
        (Reason.INFRASTRUCTURE_FAILURE, "rollout__max_infrastructure_retries"),
        (Reason.DATA_FAILURE, "rollout__max_data_retries"),
    ],
)
async def test_each_class_of_failure_has_its_own_budget(reason: Reason, budget: str):
    bench = Bench(run_config(**{budget: 1}))
    group_id = bench.admitted()
    for attempt in range(1, 9):
        bench.pool.fail(group_id, 1, attempt, reason)
    await bench.driver.drive(group_id)
    assert phase_of(bench, group_id) is GroupPhase.PARKED
    assert bench.p.groups[group_id].parked_reason is Reason.RETRY_BUDGET
    assert orders(bench, group_id)[1, 2] == 1
    assert orders(bench, group_id)[1, 3] == 0
    (parked,) = bench.events(e.GroupParked)
    assert parked.detail == f"generation 1: {reason}: scripted"


async def test_failures_of_one_class_do_not_spend_the_budget_of_the_other():
    bench = Bench(run_config(rollout__max_infrastructure_retries=1, rollout__max_data_retries=1))
    group_id = bench.admitted()
    bench.pool.fail(group_id, 1, 1, Reason.DATA_FAILURE)
    bench.pool.fail(group_id, 1, 2, Reason.WORKER_LOST)
    await bench.driver.drive(group_id)
    assert phase_of(bench, group_id) is GroupPhase.FINALIZED


@pytest.mark.parametrize("granularity", list(Granularity))
async def test_budget_is_spent_over_all_lives_together(granularity: Granularity):
    bench = Bench(run_config(rollout__max_infrastructure_retries=3))
    group_id = bench.admitted(granularity=granularity)
    for attempt in range(1, 20):
        bench.pool.answers[group_id, 1, attempt] = failing(Reason.WORKER_LOST)
    for failures in range(1, 4):
        bench = await life_with_one_failure(bench, group_id)
        assert bench.p.groups[group_id].siblings[1].infrastructure_failures == failures
    await bench.driver.drive(group_id)
    assert phase_of(bench, group_id) is GroupPhase.PARKED
    assert bench.p.superseded[Reason.WORKER_LOST] == 4  # one more than may be retried


async def life_with_one_failure(bench: Bench, group_id: int) -> Bench:
    """Drive a group until generation 1 has failed once more and runs again; kill, and return the next life."""
    attempt = bench.p.groups[group_id].siblings[1].attempt
    bench.pool.hold(group_id, 1, attempt + 2)
    task = asyncio.create_task(bench.driver.drive(group_id))
    await until(lambda: bench.p.groups[group_id].siblings[1].attempt == attempt + 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    life = bench.restarted()
    life.pool.answers = bench.pool.answers
    return life


def failing(reason: Reason) -> Callable[[RolloutOrder], RolloutFailed]:
    return lambda order: RolloutFailed(
        group_id=order.group_id,
        generation=order.generation,
        attempt=order.attempt,
        reason=reason,
        detail="scripted",
    )


def test_seed_changes_only_with_a_failure_of_the_data():
    assert sibling_seed(7, 1, 2, 0) == sibling_seed(7, 1, 2, 0)
    seeds = [sibling_seed(*numbers) for numbers in itertools.product((7, 8), (1, 2), (1, 2), (0, 1))]
    assert len(set(seeds)) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_sibling_redone_after_a_crash_samples_what_it_would_have_and_after_bad_data_does_not():
    bench = Bench()
    group_id = bench.admitted(siblings=1)
    bench.pool.lose_worker(group_id, 0, 1)
    bench.pool.fail(group_id, 0, 2, Reason.DATA_FAILURE)
    await bench.driver.drive(group_id)
    first, second, third = (order.seed for order in bench.pool.calls)
    assert first == second != third


# ---- cohorts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing_generation", range(3))
@pytest.mark.parametrize("arrival", list(itertools.permutations(range(3))))
async def test_cohort_with_a_failure_keeps_no_result_whatever_order_they_come_in(
    failing_generation: int, arrival: tuple[int, ...]
):
    bench = Bench()
    group_id = bench.admitted(granularity=COHORT)
    bench.pool.lose_worker(group_id, failing_generation, 1)
    gates = {generation: bench.pool.hold(group_id, generation, 1) for generation in range(3)}
    task = asyncio.create_task(bench.driver.drive(group_id))
    await bench.until_called(3)
    for generation in arrival:
        gates[generation].set()
        await ticks()
    await task
    await bench.driver.close()
    assert orders(bench, group_id) == {(g, a): 1 for g in range(3) for a in (1, 2)}
    assert {seal.attempt for seal in bench.events(e.SiblingSealed)} == {2}
    rejected = {(r.generation, r.attempt) for r in bench.events(e.LateResultRejected)}
    assert rejected == {(g, 1) for g in range(3) if g != failing_generation}
    reasons = {event.generation: event.reason for event in bench.events(e.AttemptSuperseded)}
    assert reasons == {
        g: Reason.WORKER_LOST if g == failing_generation else Reason.COHORT_RESTART for g in range(3)
    }
    assert staged(bench) == set()
    assert canonical(bench) == {canonical_key(group_id, g, 2) for g in range(3)}


async def test_cohort_in_which_all_fail_at_once_is_charged_for_one_of_them_only():
    bench = Bench()
    group_id = bench.admitted(granularity=COHORT)
    for generation in range(3):
        bench.pool.lose_worker(group_id, generation, 1)
    await bench.driver.drive(group_id)
    assert bench.p.superseded == {Reason.WORKER_LOST: 1, Reason.COHORT_RESTART: 2}
    assert phase_of(bench, group_id) is GroupPhase.FINALIZED


async def test_result_that_comes_while_a_failed_cohort_waits_for_the_barrier_is_rejected_too():
    bench = Bench()
    group_id = bench.admitted(granularity=COHORT)
    bench.pool.lose_worker(group_id, 0, 1)
    gates = [bench.pool.hold(group_id, generation, 1) for generation in range(3)]
    task = asyncio.create_task(bench.driver.drive(group_id))
    await bench.until_called(3)
    async with bench.runtime.barrier.exclusive("checkpoint"):
        gates[0].set()
        await ticks()
        gates[1].set()  # its answer is there before the failure is recorded
        await ticks()
    gates[2].set()
    await task
    await ticks()
    assert {(r.generation, r.attempt) for r in bench.events(e.LateResultRejected)} == {(1, 1), (2, 1)}
    assert staged(bench) == set()


async def test_cohort_seals_in_one_unit():
    bench = Bench()
    group_id = bench.admitted(granularity=COHORT)
    await bench.driver.drive(group_id)
    kinds = [type(event) for event in bench.writer.events]
    start = kinds.index(e.CohortSealed)
    assert kinds[start : start + 4] == [e.CohortSealed, *[e.SiblingSealed] * 3]


# ---- late results -----------------------------------------------------------------------------------------------


async def test_result_that_comes_after_its_group_was_parked_is_rejected_and_its_rows_are_cleared():
    bench = Bench(run_config(rollout__max_data_retries=0))
    group_id = bench.admitted()
    gate = bench.pool.hold(group_id, 0, 1)
    bench.pool.fail(group_id, 1, 1, Reason.DATA_FAILURE)
    task = asyncio.create_task(bench.driver.drive(group_id))
    await until(lambda: phase_of(bench, group_id) is GroupPhase.PARKED)
    gate.set()
    await task
    (late,) = [r for r in bench.events(e.LateResultRejected) if r.generation == 0]
    assert late.attempt == 1
    assert staged(bench) == set()  # nor those of generation 2, which was sealed before


def test_result_that_comes_after_its_time_out_is_rejected_and_the_next_attempt_counts():
    async def main() -> None:
        bench = Bench(run_config(rollout__sibling_timeout_s=10.0))
        group_id = bench.admitted()
        gate = bench.pool.hold(group_id, 1, 1)
        await bench.driver.drive(group_id)
        assert bench.p.superseded == {Reason.TIMEOUT: 1}
        gate.set()
        await ticks(60)
        assert [(r.generation, r.attempt) for r in bench.events(e.LateResultRejected)] == [(1, 1)]
        assert canonical(bench) == {canonical_key(group_id, g, 1 + (g == 1)) for g in range(3)}
        assert staged(bench) == set()

    run_by_chance(main())


# ---- finalize ---------------------------------------------------------------------------------------------------


async def test_lost_finalizes_are_driven_again_after_bounded_pauses_then_the_group_is_parked():
    bench = Bench(
        run_config(
            supervision__retry_backoff_s=0.5,
            supervision__max_retry_backoff_s=3.0,
            rollout__max_infrastructure_retries=4,
        )
    )
    group_id = bench.admitted()
    bench.finalizer.lose_answers = 99
    await bench.driver.drive(group_id)
    assert bench.finalizer.calls == [group_id] * 5
    assert bench.slept_s == [0.5, 1.0, 2.0, 3.0]
    (parked,) = bench.events(e.GroupParked)
    assert parked.reason is Reason.RETRY_BUDGET
    assert "finalized 5 times without an answer" in parked.detail
    assert phase_of(bench, group_id) is GroupPhase.PARKED
    assert staged(bench) == canonical(bench) == set()


async def test_rejected_finalizes_are_bounded_too():
    """A staging partition that loses every row must not have the same siblings generated for ever."""
    bench = Bench(run_config(rollout__max_infrastructure_retries=2))
    group_id = bench.admitted()

    class Rejecting(type(bench.finalizer)):  # type: ignore[misc]
        async def finalize(self, order):
            self.calls.append(order.group_id)
            await asyncio.sleep(0)
            return FinalizeRejected(
                group_id=order.group_id, generation=1, reason=Reason.ROWS_MISSING, detail="scripted"
            )

    bench.finalizer.__class__ = Rejecting
    async with asyncio.timeout(600):
        await bench.driver.drive(group_id)
    assert bench.finalizer.calls == [group_id] * 3
    assert phase_of(bench, group_id) is GroupPhase.PARKED


async def test_rows_of_a_lost_finalize_are_not_left_behind_when_their_sibling_is_generated_again():
    bench = Bench()
    group_id = bench.admitted()
    finalize = bench.finalizer.finalize
    rejected = FinalizeRejected(
        group_id=group_id, generation=1, reason=Reason.ROWS_MISSING, detail="scripted"
    )

    async def lost_then_rejected(order: FinalizeOrder) -> tuple[e.CanonicalRowRef, ...] | FinalizeRejected:
        bench.finalizer.lose_answers = not bench.finalizer.calls
        if len(bench.finalizer.calls) == 1:
            bench.finalizer.reject[group_id] = rejected
        return await finalize(order)

    bench.finalizer.finalize = lost_then_rejected  # type: ignore[method-assign]
    await bench.driver.drive(group_id)
    assert canonical(bench) == {canonical_key(group_id, g, 1 + (g == 1)) for g in range(3)}
    assert staged(bench) == set()


async def test_finalizer_that_never_answers_costs_its_time_out_and_is_asked_again():
    bench = Bench(run_config(data_plane__call_timeout_s=0.01))
    group_id = bench.admitted()
    finalize = bench.finalizer.finalize
    hangs = iter([True])

    async def once_hanging(order):
        if next(hangs, False):
            await asyncio.Event().wait()
        return await finalize(order)

    bench.finalizer.finalize = once_hanging  # type: ignore[method-assign]
    await bench.driver.drive(group_id)
    assert phase_of(bench, group_id) is GroupPhase.FINALIZED
