"""Staging with the row journal on: rows go to the data plane and to this process's journal, and count when in both."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version as package_version
from pathlib import Path
from typing import TypeAlias

from kinlog.lineage.journal import RowJournal
from kinlog.lineage.store import LocalStore
from kinlog.schemas.settings import RowJournalSettings
from kinlog.workers.journal_rows import rows_to_batch
from kinlog.workers.rows import StagedRow

__all__ = ["PutStaged", "journalled", "open_journal"]

PutStaged: TypeAlias = Callable[[Sequence[StagedRow]], Awaitable[None]]


def open_journal(directory: Path, settings: RowJournalSettings) -> RowJournal:
    """Return the journal of this process. Nothing is written before the first row."""
    return RowJournal(
        LocalStore(),
        directory,
        writer_version=package_version("kinlog"),
        segment_bytes=settings.segment_bytes,
        clock_us=lambda: time.time_ns() // 1000,
    )


def journalled(put: PutStaged, journal: RowJournal) -> PutStaged:
    """Return a put that returns once rows are visible in the data plane *and* durable in the journal.

    Both are under way at the same time, and neither holds up the event loop. One put at a time, as with
    :class:`kinlog.workers.staging.StagingQueue`: the journal is for one thread.
    """

    async def put_both(rows: Sequence[StagedRow]) -> None:
        appending = asyncio.ensure_future(asyncio.to_thread(lambda: journal.append(rows_to_batch(rows))))
        try:
            await put(rows)
        finally:
            # Also when the put failed: the next append may not begin before this one has ended.
            await appending

    return put_both
