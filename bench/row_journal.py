"""The row journal beside a full snapshot of the data plane: what it costs to have 1,000 new rows on disk.

The data plane is a real TransferQueue that holds so many rows already. *Journal* is a worker's append of the new rows,
durable when it returns. *Snapshot* is TransferQueue's own checkpoint, which writes all rows each time. Besides seconds and
bytes, the slowest put that is made meanwhile shows what each holds up.

    python bench/row_journal.py [--smoke] [--json FILE] [--directory DIR]
"""

import asyncio
import itertools
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import ray
import torch
from measure import Comparison, Setup, compare, run_bench

from kinlog.lineage.journal import Journal
from kinlog.schemas.settings import DataPlaneSettings, RowJournalSettings
from kinlog.workers.data_plane import TQ_ENVIRONMENT, DataPlane, required_cpus
from kinlog.workers.journal_rows import rows_to_batch
from kinlog.workers.row_journalling import open_journal
from kinlog.workers.rows import StagedRow

SETTINGS = DataPlaneSettings(num_storage_units=2, call_timeout_s=120.0)
ROWS_HELD = (1_000, 10_000, 50_000)
NEW_ROWS = 1_000
ROWS_PER_PUT = 250
TOKENS_PER_ROW = 512
ROUNDS = 3

_groups = itertools.count()


def rows_of(count: int) -> list[StagedRow]:
    """Rows that nobody has seen before."""
    half = TOKENS_PER_ROW // 2
    return [
        StagedRow(
            group_id=next(_groups),
            generation=0,
            attempt=1,
            call=0,
            token_ids=torch.randint(0, 150_000, (TOKENS_PER_ROW,)),
            prompt_tokens=half,
            logprobs=-torch.rand(half),
            weight_versions=torch.zeros(half, dtype=torch.int32),
        )
        for _ in range(count)
    ]


async def with_puts_beside(data_plane: DataPlane, work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Do the work while rows are put one by one. Returns its seconds, and those of the slowest put."""
    slowest = [0.0]

    async def put_on() -> None:
        while True:
            began = time.perf_counter()
            await data_plane.put_staged(rows_of(1))
            slowest[0] = max(slowest[0], time.perf_counter() - began)

    putting = asyncio.create_task(put_on())
    await asyncio.sleep(0.05)
    began = time.perf_counter()
    await work()
    seconds = time.perf_counter() - began
    putting.cancel()
    await asyncio.wait([putting])
    return seconds, slowest[0]


def bytes_below(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


class Contest:
    """One data plane, which is filled further and further."""

    def __init__(self, directory: Path, data_plane: DataPlane, new_rows: int) -> None:
        self._directory = directory
        self._data_plane = data_plane
        self._new_rows = new_rows
        self._numbers = itertools.count()

    async def fill(self, rows: int) -> None:
        for start in range(0, rows, ROWS_PER_PUT):
            await self._data_plane.put_staged(rows_of(min(ROWS_PER_PUT, rows - start)))

    async def journal(self) -> tuple[float, float, float]:
        """Returns seconds, bytes, and seconds of the slowest put meanwhile."""
        directory = self._directory / f"journal-{next(self._numbers)}"
        journal: Journal = open_journal(directory, RowJournalSettings())
        rows = rows_of(self._new_rows)

        async def append() -> None:
            for start in range(0, len(rows), ROWS_PER_PUT):
                part = rows[start : start + ROWS_PER_PUT]
                await asyncio.to_thread(lambda part=part: journal.append(rows_to_batch(part)))

        seconds, slowest = await with_puts_beside(self._data_plane, append)
        journal.close()
        return seconds, bytes_below(directory), slowest

    async def snapshot(self) -> tuple[float, float, float]:
        directory = self._directory / f"snapshot-{next(self._numbers)}"

        async def save() -> None:
            await self._data_plane.save(directory, {}, timeout_s=600.0)

        seconds, slowest = await with_puts_beside(self._data_plane, save)
        size = bytes_below(directory)
        shutil.rmtree(directory)
        return seconds, size, slowest


async def measured(setup: Setup) -> list[Comparison]:
    held, new_rows, rounds = ((200,), 50, 1) if setup.smoke else (ROWS_HELD, NEW_ROWS, ROUNDS)
    data_plane = await DataPlane.start(SETTINGS)
    contest = Contest(setup.directory, data_plane, new_rows)
    comparisons = []
    filled = 0
    for rows in held:
        await contest.fill(rows - filled)
        filled = rows
        ours, theirs = [], []
        for _ in range(rounds):
            ours.append(await contest.journal())
            theirs.append(await contest.snapshot())
        for place, (what, unit, scale) in enumerate(
            (("to disk", "ms", 1e3), ("on disk", "MB", 1e-6), ("slowest put meanwhile", "ms", 1e3))
        ):
            costs = {
                "journal": [one[place] * scale for one in ours],
                "snapshot": [one[place] * scale for one in theirs],
            }
            comparisons.append(compare(f"{new_rows:,} new rows at {rows:,} held, {what}", unit, costs))
    await data_plane.close()
    return comparisons


def measure_journal(setup: Setup) -> Iterator[Comparison]:
    ray.init(
        num_cpus=required_cpus(SETTINGS) + 1,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": dict(TQ_ENVIRONMENT)},
    )
    try:
        yield from asyncio.run(measured(setup))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    run_bench("row_journal", "The row journal beside a full snapshot of the data plane", measure_journal)
