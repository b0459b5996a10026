"""The barrier: many cuts at once, or one exclusive hold.

A *cut* is the capability to change lineage and data plane together, passed as an argument to every function that needs
it. A checkpoint takes the exclusive hold: it waits for the cuts that are open, and lets new ones wait. A cut never spans
a wait for a condition or a remote call of unknown length, so that wait is short.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar

import msgspec

__all__ = ["Barrier", "BarrierCut", "WaitStats"]


class BarrierCut:
    """An open cut, or an exclusive hold. Invalid once its ``async with`` block is left."""

    __slots__ = ("_open", "kind")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._open = True

    def require(self) -> None:
        """Raise ``RuntimeError`` when the cut is over: it must not be kept."""
        if not self._open:
            raise RuntimeError(f"the cut {self.kind!r} is over: a cut is not kept beyond its block")

    def end(self) -> None:
        self._open = False

    @property
    def is_open(self) -> bool:
        return self._open


class WaitStats(msgspec.Struct):
    """What cuts of one kind cost."""

    count: int = 0
    waited: int = 0
    """How many had to wait."""
    waited_s: float = 0.0
    max_waited_s: float = 0.0
    held_s: float = 0.0
    max_held_s: float = 0.0


#: The cut that this task, or the task that started it, is in. A child that asked for its own while its parent holds one
#: and waits for the child would deadlock with a checkpoint that waits for the parent.
_HELD: ContextVar[BarrierCut | None] = ContextVar("kinlog_held_cut", default=None)


class Barrier:
    """Hands out cuts. Belongs to one event loop."""

    def __init__(self, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._clock_s = clock_s
        self._open_cuts = 0
        self._exclusive = False
        self._waiting_exclusive: deque[asyncio.Future[None]] = deque()
        self._waiting_cuts: deque[asyncio.Future[None]] = deque()
        self.stats: dict[str, WaitStats] = {}
        """By kind of cut."""

    @asynccontextmanager
    async def cut(self, kind: str) -> AsyncIterator[BarrierCut]:
        """Open a cut beside others. Waits while a checkpoint holds or awaits the barrier.

        Raises
        ------
        RuntimeError
            The task, or one that it was started by, is inside a cut: pass that one on instead.
        """
        async with self._hold(kind, exclusive=False) as cut:
            yield cut

    @asynccontextmanager
    async def exclusive(self, kind: str) -> AsyncIterator[BarrierCut]:
        """Hold the barrier alone: no cut is open meanwhile. Raises as :meth:`cut`."""
        async with self._hold(kind, exclusive=True) as cut:
            yield cut

    @asynccontextmanager
    async def _hold(self, kind: str, *, exclusive: bool) -> AsyncIterator[BarrierCut]:
        held = _HELD.get()
        if held is not None and held.is_open:
            raise RuntimeError(
                f"asked for cut {kind!r} inside cut {held.kind!r}: pass the open one as an argument"
            )
        stats = self.stats.setdefault(kind, WaitStats())
        asked = self._clock_s()
        waited = await (self._enter_exclusive() if exclusive else self._enter_cut())
        entered = self._clock_s()
        stats.count += 1
        if waited:
            stats.waited += 1
            stats.waited_s += entered - asked
            stats.max_waited_s = max(stats.max_waited_s, entered - asked)
        cut = BarrierCut(kind)
        token = _HELD.set(cut)
        try:
            yield cut
        finally:
            cut.end()
            _HELD.reset(token)
            held_s = self._clock_s() - entered
            stats.held_s += held_s
            stats.max_held_s = max(stats.max_held_s, held_s)
            if exclusive:
                self._exclusive = False
            else:
                self._open_cuts -= 1
            self._admit()

    async def _enter_cut(self) -> bool:
        if not self._exclusive and not self._waiting_exclusive:
            self._open_cuts += 1
            return False
        await self._wait_in(self._waiting_cuts, exclusive=False)
        return True

    async def _enter_exclusive(self) -> bool:
        if not self._exclusive and self._open_cuts == 0 and not self._waiting_exclusive:
            self._exclusive = True
            return False
        await self._wait_in(self._waiting_exclusive, exclusive=True)
        return True

    async def _wait_in(self, queue: "deque[asyncio.Future[None]]", *, exclusive: bool) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                # Admitted in the same tick as cancelled: give the place back.
                if exclusive:
                    self._exclusive = False
                else:
                    self._open_cuts -= 1
            elif future in queue:
                queue.remove(future)
            self._admit()
            raise

    def _admit(self) -> None:
        """Let in whoever may enter now. Admitting counts at once, so nobody slips in between."""
        if self._exclusive:
            return
        while self._waiting_exclusive:
            if self._open_cuts:
                return
            future = self._waiting_exclusive.popleft()
            if not future.done():
                self._exclusive = True
                future.set_result(None)
                return
        while self._waiting_cuts:
            future = self._waiting_cuts.popleft()
            if not future.done():
                self._open_cuts += 1
                future.set_result(None)
