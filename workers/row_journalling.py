"""Staging with the row journal on: rows go to the data plane and to this process's journal, and count when in both."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib.metadata import version as package_version
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from kinlog.lineage.journal import Journal
from kinlog.lineage.store import LocalStore
from kinlog.schemas.settings import RowJournalSettings
from kinlog.workers.journal_rows import rows_to_batch
from kinlog.workers.rows import StagedRow

__all__ = ["PutStaged", "journalled", "open_journal"]

PutStaged: TypeAlias = Callable[[Sequence[StagedRow]], Awaitable[None]]

#: A frame takes no further attempt beyond so many tokens, about 100 MB: one write takes no more than 2 GiB, and a column
#: no more than 2**31 tokens. Long rollouts of many siblings that end at once would come to that.
_TOKENS_PER_FRAME = 8 * 1024 * 1024


def open_journal(directory: Path, settings: RowJournalSettings) -> Journal:
    """Return the journal of this process. Nothing is written before the first row."""
    return Journal(
        LocalStore(),
        directory,
        writer_version=package_version("kinlog"),
        segment_bytes=settings.segment_bytes,
        clock_us=lambda: time.time_ns() // 1000,
    )


def journalled(put: PutStaged, journal: Journal) -> PutStaged:
    """Return a put that returns once rows are visible in the data plane *and* durable in the journal.

    Both are under way at the same time, and neither holds up the event loop. One put at a time, as with
    :class:`kinlog.workers.staging.StagingQueue`: the journal is for one thread.
    """

    async def put_both(rows: Sequence[StagedRow]) -> None:
        appending = asyncio.ensure_future(asyncio.to_thread(_append, journal, rows))
        try:
            await put(rows)
        finally:
            # Also when the put failed: the next append may not begin before this one has ended.
            await appending

    return put_both


def _append(journal: Journal, rows: Sequence[StagedRow]) -> None:
    for frame in _frames(rows):
        journal.append(rows_to_batch(frame))


def _frames(rows: Sequence[StagedRow]) -> Iterator[list[StagedRow]]:
    """Cut rows into frames of bounded size. Those of one attempt stay together: a segment has all of them, or none."""
    frame: list[StagedRow] = []
    tokens = 0
    for _, of_attempt in groupby(rows, key=lambda row: (row.group_id, row.generation, row.attempt)):
        whole = list(of_attempt)
        more = sum(len(row.token_ids) for row in whole)
        if frame and tokens + more > _TOKENS_PER_FRAME:
            yield frame
            frame, tokens = [], 0
        frame += whole
        tokens += more
    if frame:
        yield frame
