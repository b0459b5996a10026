"""Who waits for which event to become durable, on event loops and in threads.

A waiter is only woken; whether its event is durable it then asks. All that one commit made durable is woken by a single
call into each event loop: such a call is a system call, and hundreds of tasks may wait for one commit.
"""

import asyncio
import heapq
import threading
from collections.abc import Iterable, Sequence

__all__ = ["Waiter", "LoopWaiter", "ThreadWaiter", "Waiters", "wake"]


class LoopWaiter:
    """Waits on an event loop. Made there."""

    __slots__ = ("_future", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()

    async def woken(self) -> None:
        await self._future


class ThreadWaiter:
    """Blocks its thread."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        # The cheapest thing that one thread can wait for and another can give.
        self._lock = threading.Lock()
        self._lock.acquire()

    def woken(self, timeout_s: float | None) -> None:
        """Block until woken; ``TimeoutError`` after ``timeout_s``."""
        if not self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise TimeoutError(f"not durable after {timeout_s} s")


Waiter = LoopWaiter | ThreadWaiter


class Waiters:
    """Waiters by seq. The caller's lock guards it."""

    def __init__(self) -> None:
        # A heap by seq: tickets are not awaited in the order of their appends. The second number breaks ties.
        self._heap: list[tuple[int, int, Waiter]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, seq: int, waiter: Waiter) -> None:
        self._added += 1
        heapq.heappush(self._heap, (seq, self._added, waiter))

    def take(self, up_to_seq: int) -> Sequence[Waiter]:
        """Remove and return who waits for an event up to this one."""
        due = []
        while self._heap and self._heap[0][0] <= up_to_seq:
            due.append(heapq.heappop(self._heap)[-1])
        return due

    def take_all(self) -> Sequence[Waiter]:
        """Remove and return everyone."""
        everyone = [waiter for *_, waiter in self._heap]
        self._heap.clear()
        return everyone


def wake(waiters: Iterable[Waiter]) -> None:
    """Wake waiters, from any thread. Not to be called with a lock held that they take."""
    futures: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for waiter in waiters:
        if isinstance(waiter, ThreadWaiter):
            waiter._lock.release()
        else:
            futures.setdefault(waiter._loop, []).append(waiter._future)
    for loop, those in futures.items():
        try:
            loop.call_soon_threadsafe(_resolve, those)
        except RuntimeError:
            # A loop that was closed meanwhile has no one left who waits.
            if not loop.is_closed():
                raise


def _resolve(futures: Sequence[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
