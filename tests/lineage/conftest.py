"""Logs that a test opens are closed after it, whatever became of them."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from kinlog_builders import new_log, reopened

from kinlog.lineage.log import OpenedLog
from kinlog.schemas.errors import LogWriteError


@pytest.fixture
def opening(tmp_path: Path) -> Iterator[Callable[..., OpenedLog]]:
    """Create the log in ``tmp_path / "log"``, or open it again; keywords go to the builders."""
    opened: list[OpenedLog] = []

    def open_or_create(**options: object) -> OpenedLog:
        directory = tmp_path / "log"
        one = reopened(directory, **options) if directory.exists() else new_log(directory, **options)  # type: ignore[arg-type]
        opened.append(one)
        return one

    yield open_or_create
    for one in opened:
        with suppress(LogWriteError):
            one.close()
