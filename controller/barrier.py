"""The barrier: many cuts at once, or one exclusive hold.

A *cut* is the capability to change lineage and data plane together, passed as an argument to every function that needs
it. A checkpoint takes the exclusive hold: it waits for the cuts that are open, and lets new ones wait. A cut never spans
a wait for a condition or a remote call of unknown length, so that wait is short.
"""

import asyncio
import time
from collections import Counter, deque
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
        self._holders: Counter[str] = Counter()
        # In the order of asking, cuts and exclusive holds alike: a stream of cuts does not keep a checkpoint out, nor
        # checkpoints back to back the cuts.
        self._waiting: deque[tuple[asyncio.Future[None], bool, str]] = deque()
        self.stats: dict[str, WaitStats] = {}
        """By kind of cut."""

    def __str__(self) -> str:
        """Say who holds the barrier, and who waits for it, by the kinds of their cuts."""
        waiting = Counter(kind for future, _, kind in self._waiting if not future.done())
        return f"the barrier is held by {_counted(self._holders)}; waiting for it: {_counted(waiting)}"

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
        waited = await self._enter(kind, exclusive=exclusive)
        entered = self._clock_s()
        stats.count += 1
        if waited:
            stats.waited += 1
            stats.waited_s += entered - asked
            stats.max_waited_s = max(stats.max_waited_s, entered - asked)
        cut = BarrierCut(kind)
        token = _HELD.set(cut)
        self._holders[kind] += 1
        try:
            yield cut
        finally:
            self._holders[kind] -= 1
            cut.end()
            _HELD.reset(token)
            held_s = self._clock_s() - entered
            stats.held_s += held_s
            stats.max_held_s = max(stats.max_held_s, held_s)
            self._give_back_place(exclusive=exclusive)
            self._admit()

    async def _enter(self, kind: str, *, exclusive: bool) -> bool:
        """Take the place, at once or in turn. Returns whether there was a wait."""
        if not self._waiting and self._is_free_for(exclusive=exclusive):
            self._take_place(exclusive=exclusive)
            return False
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (future, exclusive, kind)
        self._waiting.append(entry)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._give_back_place(exclusive=exclusive)  # admitted in the same tick as cancelled
            elif entry in self._waiting:
                self._waiting.remove(entry)
            self._admit()
            raise
        return True

    def _is_free_for(self, *, exclusive: bool) -> bool:
        return not self._exclusive and not (exclusive and self._open_cuts)

    def _take_place(self, *, exclusive: bool) -> None:
        if exclusive:
            self._exclusive = True
        else:
            self._open_cuts += 1

    def _give_back_place(self, *, exclusive: bool) -> None:
        if exclusive:
            self._exclusive = False
        else:
            self._open_cuts -= 1

    def _admit(self) -> None:
        """Let in whoever may enter now. Admitting counts at once, so nobody slips in between."""
        while self._waiting:
            future, exclusive, _ = self._waiting[0]
            if not future.done():
                if not self._is_free_for(exclusive=exclusive):
                    return
                self._take_place(exclusive=exclusive)
                future.set_result(None)
            self._waiting.popleft()


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted((+kinds).items())) or "nobody"
