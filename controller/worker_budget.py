"""The worker budget: how many siblings run at once, fresh work and recovery together."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any

__all__ = ["Work", "HeldSlots", "WorkerBudget"]

#: While both wait, at least every such grant goes to fresh work.
FRESH_EVERY = 4


class Work(Enum):
    """What slots are asked for."""

    RECOVERY = "recovery"
    """A group that this life found alive when it began."""
    FRESH = "fresh"
    """A group that was drawn in this life."""


class HeldSlots:
    """Slots that were granted. They are given back at the end of the block, except those whose calls have not ended:
    these follow as their calls end, whoever waits for them.

    An attempt that was given up goes on running on its worker for a while: were its slot free at once, workers would be
    given more than the budget allows.
    """

    def __init__(self, budget: "WorkerBudget", slots: int) -> None:
        self._budget = budget
        self._slots = slots
        self._calls: list[asyncio.Future[Any]] = []

    def occupy(self, call: "asyncio.Future[Any]") -> None:
        """Let a call occupy one of the slots, beyond the end of the block if need be."""
        assert len(self._calls) < self._slots, "more calls than slots"
        self._calls.append(call)

    def vacate(self, call: "asyncio.Future[Any]") -> None:
        """Give back the slot of a call that outlived the block, and that nobody expects to end any more. Harmless when it
        has ended."""
        if call.remove_done_callback(self._budget._call_ended):
            self._budget._release(1)

    def end(self) -> None:
        """The block is over."""
        going_on = [call for call in self._calls if not call.done()]
        for call in going_on:
            call.add_done_callback(self._budget._call_ended)
        self._budget._release(self._slots - len(going_on))


class WorkerBudget:
    """Slots, granted to recovery before fresh work, and in either to who asked first.

    A cohort takes all of its slots at once, or waits for all: taking them one by one would let two cohorts hold half
    each, and wait for each other for ever. Whose turn it is, is waited for, and is not overtaken by who needs less: a
    stream of single siblings would keep a cohort waiting for ever. Likewise recovery does not keep fresh work out for
    good: after three grants in a row past somebody fresh, the turn is theirs.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._free = slots
        self._waiting: dict[Work, deque[tuple[int, asyncio.Future[None]]]] = {work: deque() for work in Work}
        self._past_fresh = 0
        """Grants to recovery in a row while somebody fresh waited."""

    def __str__(self) -> str:
        waiting = ", ".join(f"{len(queue)} {work.value}" for work, queue in self._waiting.items() if queue)
        return f"{self.in_use} of {self._slots} worker slots are taken; requests waiting: {waiting or 'none'}"

    @property
    def in_use(self) -> int:
        return self._slots - self._free

    @property
    def waiting(self) -> dict[Work, int]:
        """How many requests wait."""
        return {work: len(queue) for work, queue in self._waiting.items()}

    @asynccontextmanager
    async def take(self, slots: int = 1, work: Work = Work.FRESH) -> AsyncIterator[HeldSlots]:
        """Hold ``slots`` of the budget for the length of the block, and those that calls occupy until these have ended.

        Raises
        ------
        ValueError
            More than the whole budget is asked for: it would never be granted.
        """
        if slots > self._slots:
            raise ValueError(f"asked for {slots} worker slots of {self._slots}")
        await self._acquire(slots, work)
        held = HeldSlots(self, slots)
        try:
            yield held
        finally:
            held.end()

    async def _acquire(self, slots: int, work: Work) -> None:
        if self._free >= slots and not any(self._waiting.values()):
            self._free -= slots
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (slots, future)
        self._waiting[work].append(entry)
        self._grant()  # recovery goes before fresh work that waits for more than is free
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._free += slots  # granted in the same tick as cancelled
            elif entry in self._waiting[work]:  # else whoever gave slots back meanwhile has passed it over
                self._waiting[work].remove(entry)
            self._grant()
            raise

    def _call_ended(self, call: "asyncio.Future[Any]") -> None:
        self._release(1)

    def _release(self, slots: int) -> None:
        self._free += slots
        self._grant()

    def _grant(self) -> None:
        while (work := self._next()) is not None:
            slots, future = self._waiting[work][0]
            if not future.done():
                if slots > self._free:
                    return
                self._free -= slots
                passed_over = work is Work.RECOVERY and bool(self._waiting[Work.FRESH])
                self._past_fresh = self._past_fresh + 1 if passed_over else 0
                future.set_result(None)
            self._waiting[work].popleft()

    def _next(self) -> Work | None:
        """Return whose turn it is."""
        recovery, fresh = self._waiting[Work.RECOVERY], self._waiting[Work.FRESH]
        if fresh and (not recovery or self._past_fresh >= FRESH_EVERY - 1):
            return Work.FRESH
        return Work.RECOVERY if recovery else None
