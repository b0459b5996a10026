"""Ctrl-C for commands that go on until it comes."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["sleep_until_ctrl_c"]


@contextmanager
def sleep_until_ctrl_c() -> Iterator[Callable[[float], None]]:
    """Yield a ``sleep(seconds)`` that raises ``KeyboardInterrupt`` also if Ctrl-C came before, and nothing came of it.

    An exception that is raised while Python cleans up an object is printed, and forgotten: without this, a Ctrl-C in such
    a moment would be, too.
    """
    came = False

    def note(signal_number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    def sleep(seconds: float) -> None:
        if not came:
            time.sleep(seconds)
        if came:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield sleep  # no thread but the main one is told of signals
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield sleep
    finally:
        signal.signal(signal.SIGINT, before)
