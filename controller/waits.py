"""Who waits for what at this moment, as far as the log does not say: remote calls, and pauses before a retry.

For the report of a stall. Nothing is decided by it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Waits"]


class Waits:
    """The waits that are open, oldest first."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._open: dict[object, tuple[str, float]] = {}

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Wait for something for the length of the block."""
        token = object()
        self._open[token] = (what, self._clock_s())
        try:
            yield
        finally:
            del self._open[token]

    def __len__(self) -> int:
        return len(self._open)

    def __str__(self) -> str:
        """Name the eight oldest waits, and for how long each has lasted."""
        now_s = self._clock_s()
        named = [f"{what} for {now_s - since_s:.0f} s" for what, since_s in list(self._open.values())[:8]]
        more = f" and {len(self) - 8} more" if len(self) > 8 else ""
        return f"waiting for {', '.join(named)}{more}" if named else "waiting for no call and no pause"
