"""How many crashes are tried, and the numbers that were, at the end of the run."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_TRIED = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--crash-states",
        type=int,
        help="Crash states of the disk that are tried at most for each operation (tests/crash).",
    )
    parser.addoption(
        "--crash-deeper",
        type=int,
        help="Recoveries of each recording whose own crashes are tried too (tests/crash).",
    )


@pytest.fixture
def crash_states(pytestconfig: pytest.Config) -> int:
    """At most so many states of the disk for each operation."""
    # Not declared when pytest was started from above this directory: then it is the short form.
    return pytestconfig.getoption("--crash-states", default=None) or 5


@pytest.fixture
def crash_deeper(pytestconfig: pytest.Config) -> int:
    """So many recoveries of each recording have their own crashes tried."""
    return pytestconfig.getoption("--crash-deeper", default=None) or 1


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A directory for hundreds of small trees: in memory where there is such a place."""
    in_memory = Path("/dev/shm")
    where = in_memory if os.access(in_memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(prefix="kinlog-crash-", dir=where) as directory:
        yield Path(directory)


@pytest.fixture
def tried(request: pytest.FixtureRequest) -> Callable[[object], None]:
    """Say what was tried: it is printed at the end of the run."""

    def say(tally: object) -> None:
        lines = request.config.stash.setdefault(_TRIED, [])
        lines.append(f"{request.node.name.removeprefix('test_')}: {tally}")

    return say


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(_TRIED, [])
    if lines:
        terminalreporter.section("crash points")
        for line in lines:
            terminalreporter.write_line(line)
