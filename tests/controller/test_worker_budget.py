"""The worker budget: first come, first served, a cohort whole or not at all, and nothing lost to cancellation."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinlog_interleavings import run_by_chance, side_by_side, ticks

from kinlog.controller.worker_budget import WorkerBudget


class Taker:
    """Takes slots and keeps them until told to give them back."""

    def __init__(self, budget: WorkerBudget, slots: int, journal: list[int] | None = None) -> None:
        self.slots = slots
        self.holding = False
        self._budget = budget
        self._journal = journal if journal is not None else []
        self._done = asyncio.Event()
        self.task = asyncio.create_task(self._take())

    async def _take(self) -> None:
        async with self._budget.take(self.slots):
            self.holding = True
            self._journal.append(self.slots)
            await self._done.wait()
        self.holding = False

    async def give_back(self) -> None:
        assert self.holding, f"{self.slots} slots were never granted"
        self._done.set()
        await self.task
        await ticks()

    async def cancel(self) -> None:
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task
        await ticks()


async def test_slots_are_handed_out_first_come_first_served():
    budget, journal = WorkerBudget(4), []
    first = Taker(budget, 4, journal)
    await ticks()
    waiting = [Taker(budget, slots, journal) for slots in (3, 1, 2)]
    await ticks()
    await first.give_back()
    assert journal == [4, 3, 1]
    await waiting[1].give_back()
    assert journal == [4, 3, 1]  # one is free, the next in line wants two
    await waiting[0].give_back()
    assert journal == [4, 3, 1, 2]
    await waiting[2].give_back()
    assert budget.in_use == 0


async def test_single_sibling_does_not_overtake_a_cohort_that_waits():
    budget = WorkerBudget(4)
    busy = [Taker(budget, 1), Taker(budget, 1)]
    await ticks()
    cohort = Taker(budget, 4)
    await ticks()
    single = Taker(budget, 1)
    await ticks()
    assert budget.in_use == 2
    for taker in busy:
        await taker.give_back()
    assert [cohort.holding, single.holding] == [True, False]
    await cohort.give_back()
    assert single.holding
    await single.give_back()


async def test_two_cohorts_never_hold_half_of_the_budget_each():
    budget = WorkerBudget(4)
    single = Taker(budget, 1)
    await ticks()
    cohorts = [Taker(budget, 4), Taker(budget, 4)]
    await ticks()
    assert budget.in_use == 1  # a cohort that waits holds nothing
    await single.give_back()
    for cohort in cohorts:
        assert cohort.holding
        await cohort.give_back()
    assert budget.in_use == 0


async def test_more_than_the_whole_budget_is_refused_at_once():
    budget = WorkerBudget(4)
    with pytest.raises(ValueError, match="5 worker slots of 4"):
        async with budget.take(5):
            pass
    assert budget.in_use == 0


async def test_error_while_holding_gives_the_slots_back():
    budget = WorkerBudget(2)
    with pytest.raises(ZeroDivisionError):
        async with budget.take(2):
            raise ZeroDivisionError
    assert budget.in_use == 0


async def test_cancelled_while_waiting_leaves_its_place_to_those_behind():
    budget = WorkerBudget(4)
    single = Taker(budget, 1)
    await ticks()
    cohort = Taker(budget, 4)
    await ticks()
    behind = Taker(budget, 3)
    await ticks()
    assert not behind.holding
    await cohort.cancel()
    assert behind.holding
    await behind.give_back()
    await single.give_back()
    assert budget.in_use == 0


async def test_granted_in_the_same_tick_as_cancelled_gives_the_slots_back():
    budget = WorkerBudget(2)
    holder, waiting, behind = Taker(budget, 2), Taker(budget, 2), Taker(budget, 2)
    await ticks()
    holder._done.set()
    await holder.task  # the grant is made, and the one it was made to has not run yet
    waiting.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting.task
    await ticks()
    assert behind.holding
    await behind.give_back()
    assert budget.in_use == 0


async def test_cancelled_in_the_same_tick_as_slots_come_free_is_cancelled_and_nothing_else():
    budget = WorkerBudget(2)
    waiting: list[asyncio.Task[None]] = []
    done = asyncio.Event()

    async def hold() -> None:
        async with budget.take(2):
            await done.wait()
            waiting[0].cancel()  # and the slots come free before it has run

    holder = asyncio.create_task(hold())
    await ticks()
    waiting.append(Taker(budget, 2).task)
    await ticks()
    done.set()
    await holder
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    assert budget.in_use == 0


ACTOR = st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(0, 4), st.none() | st.integers(0, 12))
"""Slots, ticks before it asks, ticks it holds them, and the tick at which it is cancelled."""


@settings(max_examples=400)
@given(actors=st.lists(ACTOR, min_size=2, max_size=9), seed=st.integers(0, 2**32))
def test_no_interleaving_exceeds_the_budget_or_leaks_from_it(
    actors: list[tuple[int, int, int, int | None]], seed: int
):
    async def main() -> None:
        budget, held = WorkerBudget(5), [0]

        async def act(slots: int, before: int, stay: int) -> None:
            await ticks(before)
            async with budget.take(slots):
                held[0] += slots
                assert held[0] <= budget.in_use <= 5
                try:
                    await ticks(stay)
                finally:
                    held[0] -= slots

        await side_by_side([(act(*actor), cancelled) for *actor, cancelled in actors])
        assert budget.in_use == 0

    run_by_chance(main(), seed)
