"""SIGTERM and Ctrl-C: the first asks a run to stop, the second ends it at once. SIGUSR1 asks for a checkpoint.

The handlers only count. Raised from a handler, an error would come out of the middle of whatever runs, Ray's own code
included; and Ray does not interrupt its waits for SIGTERM. So whoever waits looks here now and then.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopSignals"]

_HEEDED = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """The signals that have come."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""
        """Name of the first one; empty before it."""
        self.checkpoints = 0
        """How many checkpoints were asked for."""

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Count signals for the length of the block, instead of what they would do. In the main thread only."""
        before = {number: signal.signal(number, self._count) for number in _HEEDED}
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._count_checkpoint)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or signal.Signals(number).name

    def _count_checkpoint(self, number: int, frame: FrameType | None) -> None:
        self.checkpoints += 1
