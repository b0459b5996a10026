"""A staged row counts when it is visible in the data plane and durable in the journal, and not before."""

import asyncio
import errno
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kinlog_interleavings import ticks
from kinlog_stores import Failing, FaultyStore, Gate

from kinlog.lineage.journal import Journal, journal_batches, journal_identities, scan_journal
from kinlog.lineage.store import LocalStore
from kinlog.schemas.errors import DataPlaneError, LogWriteError
from kinlog.workers import row_journalling
from kinlog.workers.row_journalling import journalled
from kinlog.workers.rows import StagedRow
from kinlog.workers.staging import StagingQueue

#: A segment's opening is synced before its first row is.
SYNC_OF_THE_FIRST_ROW = 2


def row(group: int) -> StagedRow:
    return StagedRow(
        group_id=group,
        generation=0,
        attempt=1,
        call=0,
        token_ids=torch.arange(5),
        prompt_tokens=2,
        logprobs=torch.full((3,), -0.5),
        weight_versions=torch.zeros(3, dtype=torch.int32),
    )


class Staging:
    """A worker's staging, with the data plane and the disk in a test's hands."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = FaultyStore()
        self.journal = Journal(
            self.store, directory, writer_version="0", segment_bytes=1 << 20, clock_us=lambda: 1
        )
        self.visible: list[int] = []
        self.may_put = asyncio.Event()
        self.may_put.set()
        self.failure: Exception | None = None
        self.queue = StagingQueue(journalled(self._put, self.journal))

    async def _put(self, rows: Sequence[StagedRow]) -> None:
        await self.may_put.wait()
        if self.failure is not None:
            raise self.failure
        self.visible += [row.group_id for row in rows]

    def stage(self, *groups: int) -> "asyncio.Task[None]":
        return asyncio.create_task(self.queue.stage([row(group) for group in groups]))

    def durable(self) -> list[int]:
        return [
            identity[0]
            for path in sorted(self.directory.iterdir())
            for identity in journal_identities(scan_journal(LocalStore(), path))
        ]


async def test_rows_count_only_once_they_are_durable_in_the_journal(tmp_path: Path):
    staging = Staging(tmp_path)
    gate = staging.store.before = Gate(nth=SYNC_OF_THE_FIRST_ROW)
    staged = staging.stage(1, 2)
    assert await asyncio.to_thread(gate.reached.wait, 20)
    await ticks()
    assert staging.visible == [1, 2]
    assert not staged.done()
    gate.open()
    await staged
    assert staging.durable() == [1, 2]


async def test_rows_count_only_once_they_are_visible_in_the_data_plane(tmp_path: Path):
    staging = Staging(tmp_path)
    staging.may_put.clear()
    gate = staging.store.before = Gate(nth=SYNC_OF_THE_FIRST_ROW)
    staged = staging.stage(1)
    assert await asyncio.to_thread(gate.reached.wait, 20)
    gate.open()
    await asyncio.to_thread(lambda: None)
    await ticks()
    assert not staged.done()
    staging.may_put.set()
    await staged
    assert (staging.visible, staging.durable()) == ([1], [1])


async def test_put_that_fails_is_told_and_what_comes_after_it_is_journalled_all_the_same(tmp_path: Path):
    staging = Staging(tmp_path)
    staging.failure = DataPlaneError("a storage unit is gone")
    with pytest.raises(DataPlaneError, match="a storage unit is gone"):
        await staging.stage(1)
    staging.failure = None
    await staging.stage(2)
    assert staging.visible == [2]
    assert 2 in staging.durable()


async def test_many_long_rollouts_at_once_are_frames_of_bounded_size_with_each_attempt_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(row_journalling, "_TOKENS_PER_FRAME", 24)
    staging = Staging(tmp_path)
    calls = [
        replace(row(group), call=call) for group in range(5) for call in range(2)
    ]  # 10 tokens an attempt
    await staging.queue.stage(calls)
    (path,) = tmp_path.iterdir()
    frames = [
        batch.column("group_id").to_pylist() for batch in journal_batches(scan_journal(LocalStore(), path))
    ]
    assert frames == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4]]
    assert staging.visible == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4], "one put, whatever the journal makes of it"


@pytest.mark.parametrize("operation", ["create", "write", "sync"])
async def test_rows_that_a_full_disk_does_not_take_do_not_count_nor_does_anything_after_them(
    tmp_path: Path, operation: str
):
    staging = Staging(tmp_path)
    await staging.stage(1)
    staging.journal._end()  # the next row begins a segment
    staging.store.before = Failing(operation, errno.ENOSPC)
    for group in (2, 3):
        with pytest.raises(LogWriteError, match="Free or repair the disk, then resume the run"):
            await staging.stage(group)
        staging.store.before = lambda operation, path: None
    assert staging.durable() == [1]
