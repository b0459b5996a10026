"""Where ``kinlog train`` says what happens: plain lines, and on a terminal one more that is written over."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

__all__ = ["ProgressOutput"]


class ProgressOutput:
    """Prints lines at once, so that a log file has them when the process is killed. To be used as a context.

    Parameters
    ----------
    quiet:
        Print only what went wrong, and what a restart came to.
    console:
        For tests; by default the standard output.
    """

    def __init__(self, *, quiet: bool, console: Console | None = None) -> None:
        self._quiet = quiet
        # Lines are never wrapped or coloured: they are read by programs, too.
        self._console = console or Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print what happens in order."""
        if not self._quiet:
            self.insist(text)

    def insist(self, text: str) -> None:
        """Print what has to be known in any case."""
        self._console.print(text)
        self._console.file.flush()

    def show(self, text: str) -> None:
        """Show how things are at this moment, in a line that the next one replaces. Only on a terminal."""
        if self._quiet or not self._console.is_terminal:
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
