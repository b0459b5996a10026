"""The worker budget: how many siblings run at once, fresh work and recovery together."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["WorkerBudget"]


class WorkerBudget:
    """Slots, handed out first come, first served. A cohort takes all of its slots at once, or waits for all.

    Taking them one by one would let two cohorts hold half each, and wait for each other for ever.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._free = slots
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def in_use(self) -> int:
        return self._slots - self._free

    @asynccontextmanager
    async def take(self, slots: int = 1) -> AsyncIterator[None]:
        """Hold ``slots`` of the budget for the length of the block.

        Raises
        ------
        ValueError
            More than the whole budget is asked for: it would never be granted.
        """
        if slots > self._slots:
            raise ValueError(f"asked for {slots} worker slots of {self._slots}")
        await self._acquire(slots)
        try:
            yield
        finally:
            self._release(slots)

    async def _acquire(self, slots: int) -> None:
        if not self._waiting and self._free >= slots:
            self._free -= slots
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (slots, future)
        self._waiting.append(entry)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._free += slots  # granted in the same tick as cancelled
            elif entry in self._waiting:  # else whoever gave slots back meanwhile has passed it over
                self._waiting.remove(entry)
            self._grant()
            raise

    def _release(self, slots: int) -> None:
        self._free += slots
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            slots, future = self._waiting.popleft()
            if not future.done():
                self._free -= slots
                future.set_result(None)
