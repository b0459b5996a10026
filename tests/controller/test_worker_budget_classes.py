"""The worker budget's two classes: recovery first, fresh work never kept out, cohorts never starved, slots of late calls
counted; and nothing of it left to chance.
"""

import asyncio
import random
from collections.abc import Sequence

import pytest
from kinlog_interleavings import run_by_chance, ticks

from kinlog.controller.worker_budget import FRESH_EVERY, Work, WorkerBudget

SLOTS = 5
Request = tuple[Work, int]


class Queue:
    """Requests on a budget that is full, granted as slots come free."""

    def __init__(self, budget: WorkerBudget) -> None:
        self.granted: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self._budget = budget
        self._tasks: list[asyncio.Task[None]] = []

    async def ask(self, name: str, work: Work, slots: int = 1) -> None:
        self.gates[name] = asyncio.Event()
        self._tasks.append(asyncio.create_task(self._take(name, work, slots)))
        await ticks()

    async def _take(self, name: str, work: Work, slots: int) -> None:
        async with self._budget.take(slots, work):
            self.granted.append(name)
            await self.gates[name].wait()

    async def give_back(self, name: str) -> None:
        self.gates[name].set()
        await ticks()

    async def end(self) -> None:
        for gate in self.gates.values():
            gate.set()
        await asyncio.gather(*self._tasks)


async def test_recovery_is_granted_before_fresh_work_that_asked_earlier():
    queue = Queue(WorkerBudget(1))
    await queue.ask("busy", Work.FRESH)
    await queue.ask("fresh", Work.FRESH)
    await queue.ask("recovery", Work.RECOVERY)
    await queue.give_back("busy")
    assert queue.granted == ["busy", "recovery"]
    await queue.end()
    assert queue.granted[-1] == "fresh"


async def test_every_fourth_grant_goes_to_fresh_work_however_much_recovery_waits():
    queue = Queue(WorkerBudget(1))
    await queue.ask("busy", Work.FRESH)
    for number in range(3):
        await queue.ask(f"fresh {number}", Work.FRESH)
    for number in range(12):
        await queue.ask(f"recovery {number}", Work.RECOVERY)
    for place in range(15):
        await queue.give_back(queue.granted[place])
    assert FRESH_EVERY == 4
    assert [name.split()[0] for name in queue.granted[1:13]] == [*["recovery"] * 3, "fresh"] * 3
    assert [name for name in queue.granted if name.startswith("recovery")] == [
        f"recovery {n}" for n in range(12)
    ]
    await queue.end()


@pytest.mark.parametrize("only", list(Work))
async def test_whole_budget_goes_to_one_class_when_the_other_asks_for_nothing(only: Work):
    queue = Queue(WorkerBudget(SLOTS))
    for number in range(SLOTS + 1):
        await queue.ask(str(number), only)
    assert len(queue.granted) == SLOTS
    await queue.end()


@pytest.mark.parametrize("of", list(Work))
@pytest.mark.parametrize("singles", list(Work))
async def test_cohort_is_not_starved_by_a_stream_of_singles(of: Work, singles: Work):
    budget = WorkerBudget(3)
    queue = Queue(budget)
    for number in range(3):
        await queue.ask(f"first {number}", Work.FRESH)
    await queue.ask("cohort", of, slots=3)
    for number in range(30):
        await queue.ask(f"single {number}", singles)
    passed = 0
    while "cohort" not in queue.granted:
        await queue.give_back(next(name for name in queue.granted if not queue.gates[name].is_set()))
        passed = sum(name.startswith("single") for name in queue.granted)
    assert passed <= (FRESH_EVERY - 1 if (of, singles) == (Work.FRESH, Work.RECOVERY) else 1)
    await queue.end()
    assert budget.in_use == 0


async def test_slot_of_a_call_that_outlives_its_block_is_given_back_when_the_call_ends():
    budget, call = WorkerBudget(2), asyncio.get_running_loop().create_future()
    async with budget.take(2) as slots:
        slots.occupy(call)
    assert budget.in_use == 1
    call.set_result(None)
    await ticks()
    assert budget.in_use == 0


async def test_slot_is_given_back_once_when_a_call_is_not_waited_for_any_more_and_then_ends():
    budget, call = WorkerBudget(1), asyncio.get_running_loop().create_future()
    async with budget.take() as slots:
        slots.occupy(call)
    slots.vacate(call)
    assert budget.in_use == 0
    call.set_result(None)
    await ticks()
    slots.vacate(call)
    assert budget.in_use == 0


def test_budget_says_what_is_taken_and_who_waits():
    async def main() -> str:
        queue = Queue(WorkerBudget(2))
        await queue.ask("busy", Work.FRESH, slots=2)
        await queue.ask("fresh", Work.FRESH)
        await queue.ask("recovery", Work.RECOVERY)
        told = str(queue._budget)
        await queue.end()
        return told

    assert run_by_chance(main()) == "2 of 2 worker slots are taken; requests waiting: 1 recovery, 1 fresh"


# ---- interleavings ----------------------------------------------------------------------------------------------


async def crowd(chance: random.Random) -> list[Request]:
    """Requests of both classes and all sizes, with calls that end late or are given up; returns them as granted."""
    budget, granted = WorkerBudget(SLOTS), list[Request]()
    sent: list[asyncio.Task[None]] = []

    async def one(work: Work, slots: int, before: int, stay: int, late: int) -> None:
        await ticks(before)
        async with budget.take(slots, work) as mine:
            granted.append((work, slots))
            under_way = sum(not call.done() for call in sent)
            assert under_way + slots <= SLOTS, "more is under way than the budget allows"
            calls = [asyncio.create_task(ticks(stay + late * place)) for place in range(slots)]
            for call in calls:
                mine.occupy(call)
            sent.extend(calls)
            await ticks(stay)
        if chance.random() < 0.2:
            for call in calls:
                call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def given_up(task: "asyncio.Task[None]", after: int) -> None:
        await ticks(after)
        task.cancel()

    tasks = []
    for _ in range(chance.randrange(4, 10)):
        numbers = (chance.randrange(6), chance.randrange(5), chance.randrange(4))
        slots = chance.choice([1, 1, 1, 2, SLOTS])
        tasks.append(asyncio.create_task(one(chance.choice(list(Work)), slots, *numbers)))
    cancels = [
        asyncio.create_task(given_up(task, chance.randrange(12))) for task in tasks if chance.random() < 0.2
    ]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [error for error in results if isinstance(error, Exception)]
    await asyncio.gather(*cancels, *sent, return_exceptions=True)
    await ticks(20)
    assert budget.in_use == 0, "slots have leaked"
    return granted


def test_no_interleaving_of_a_crowd_exceeds_the_budget_leaks_from_it_or_stands_still():
    for seed in range(1_000):
        try:
            run_by_chance(crowd(random.Random(seed)), seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_one_interleaving_is_always_granted_in_the_same_order():
    for seed in range(50):
        first, second = (run_by_chance(crowd(random.Random(seed)), seed) for _ in range(2))
        assert first == second


async def order_of(requests: Sequence[Request]) -> list[Request]:
    """Return the order in which requests that all wait are granted, on a budget that frees all its slots each time."""
    budget, granted = WorkerBudget(SLOTS), list[Request]()

    async def one(request: Request) -> None:
        work, slots = request
        async with budget.take(slots, work):
            granted.append(request)
            await ticks(2)

    async with budget.take(SLOTS):
        tasks = [asyncio.create_task(one(request)) for request in requests]
        await ticks()
    await asyncio.gather(*tasks)
    return granted


async def test_neither_class_waits_for_long_however_the_other_asks():
    """In any order of asking, no fresh request waits for more than three of recovery each, and no request of recovery
    for a fresh one except in the fresh ones' turn."""
    for seed in range(200):
        chance = random.Random(seed)
        requests = [(chance.choice(list(Work)), chance.choice([1, 2, SLOTS])) for _ in range(24)]
        granted = await order_of(requests)
        for work in Work:
            assert [r for r in granted if r[0] is work] == [r for r in requests if r[0] is work]
        fresh_left = sum(work is Work.FRESH for work, _ in requests)
        in_a_row = 0
        for work, _ in granted:
            in_a_row = in_a_row + 1 if work is Work.RECOVERY and fresh_left else 0
            fresh_left -= work is Work.FRESH
            assert in_a_row < FRESH_EVERY
