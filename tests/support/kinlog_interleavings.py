"""Interleavings by chance: an event loop that picks the next of the ready steps by a seed, in virtual time.

One seed is one interleaving, always the same one, provided that nothing in the loop runs in a thread. A wait that
nothing can end is a ``Deadlock``, not a hanging test.
"""

import asyncio
import random
from collections import deque
from collections.abc import Coroutine, Sequence
from contextvars import Context
from typing import TypeVar

T = TypeVar("T")


class Deadlock(AssertionError):
    """Everybody waits, and nothing is due."""


class ChanceLoop(asyncio.SelectorEventLoop):
    """Runs one ready callback at a time, chosen by chance; its clock jumps to the next timer when nothing is ready."""

    # The two private names it leans on are as old as asyncio.
    _ready: "deque[asyncio.Handle]"
    _scheduled: "list[asyncio.TimerHandle]"

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = random.Random(seed)
        self._now_s = 0.0

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        if not self._ready:
            due = [timer.when() for timer in self._scheduled if not timer.cancelled()]
            if not due:
                raise Deadlock("nothing is ready and nothing is due")
            self._now_s = max(self._now_s, min(due))
        rest: list[asyncio.Handle] = []
        if len(self._ready) > 1:
            self._ready.rotate(-self._chance.randrange(len(self._ready)))
            rest = list(self._ready)[1:]
            while len(self._ready) > 1:
                self._ready.pop()
        super()._run_once()  # type: ignore[misc]
        self._ready.extendleft(reversed(rest))


def run_by_chance(main: Coroutine[object, object, T], seed: int = 0) -> T:
    """Run a coroutine to its end in the interleaving of a seed. Nothing it started may be left over."""
    loop = ChanceLoop(seed)
    try:
        result = loop.run_until_complete(main)
        assert not asyncio.all_tasks(loop), "tasks are left over"
        return result
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        if pending := asyncio.all_tasks(loop):
            loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        loop.close()


def apart(coroutine: Coroutine[object, object, T]) -> "asyncio.Task[T]":
    """Start a task that knows nothing of the cut which its starter is in."""
    return asyncio.get_running_loop().create_task(coroutine, context=Context())


async def side_by_side(acts: "Sequence[tuple[Coroutine[object, object, None], int | None]]") -> None:
    """Run coroutines together, each cancelled after so many ticks if a number is given.

    Who is not cancelled ends well, and who is ends well or cancelled: anything else is the test's failure.
    """
    tasks = [asyncio.create_task(act) for act, _ in acts]

    async def cancel(task: "asyncio.Task[None]", after: int) -> None:
        await ticks(after)
        task.cancel()

    cancels = [
        asyncio.create_task(cancel(task, after))
        for task, (_, after) in zip(tasks, acts, strict=True)
        if after is not None
    ]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*cancels)
    for (_, after), result in zip(acts, results, strict=True):
        if result is not None and not (after is not None and isinstance(result, asyncio.CancelledError)):
            raise result


async def ticks(number: int = 20) -> None:
    """Let everybody else run for a while."""
    for _ in range(number):
        await asyncio.sleep(0)
