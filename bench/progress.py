"""Keeping the tokens of rollouts under way: what writing them down costs, and what it adds for each token.

Many rollouts generate at once, and have come to some length. *kinlog* appends what is new since the last time. The other
contender writes every unfinished completion as a whole each time, as a snapshot of what is in memory would. Both go to the
same kind of file, and are durable when they return.

    python bench/progress.py [--smoke] [--json FILE] [--directory DIR]
"""

import asyncio
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

from measure import Comparison, Setup, compare, run_bench

from kinlog.lineage.journal import PROGRESS, Journal
from kinlog.lineage.store import LocalStore
from kinlog.workers.engines import GeneratedTokens
from kinlog.workers.progress_journal import ProgressJournal
from kinlog.workers.progress_rows import CallPart, parts_to_batch

#: Two seconds at 30 tokens a second.
NEW_TOKENS = 60
LENGTHS = (500, 4_000, 16_000)
ROLLOUTS, SMOKE_ROLLOUTS = 256, 8


class Rollouts:
    """Rollouts under way, each with so many tokens."""

    def __init__(self, directory: Path, count: int, length: int) -> None:
        self.tokens = [GeneratedTokens() for _ in range(count)]
        self._numbers = itertools.count()
        self._directory = directory
        self._journal = self._new_journal()
        self.progress = ProgressJournal(self._journal, every_s=1e9, every_tokens=10**9)
        for _ in range(length):
            self.generate(1)

    def _new_journal(self) -> Journal:
        return Journal(
            LocalStore(),
            self._directory / str(next(self._numbers)),
            PROGRESS,
            writer_version="bench",
            segment_bytes=2**40,
            clock_us=lambda: 0,
        )

    def generate(self, count: int) -> None:
        for tokens in self.tokens:
            for _ in range(count):
                tokens.append(150_000 - len(tokens), -0.25 * (len(tokens) % 64), 3)

    def append_whole(self) -> None:
        """Write every completion as it is."""
        self._journal.append(
            parts_to_batch(
                [
                    CallPart((number, 0, 1), 0, 0, bytes(16), tokens.part(), None, None)
                    for number, tokens in enumerate(self.tokens)
                ]
            )
        )

    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self._directory.rglob("*") if file.is_file())


async def measured(directory: Path, *, rollouts: int, length: int, rounds: int) -> Iterator[Comparison]:
    under_way = Rollouts(directory, rollouts, length)
    for number, tokens in enumerate(under_way.tokens):
        under_way.progress.begin((number, 0, 1)).begin_call(0, bytes(16), tokens)
    await under_way.progress.write()
    seconds: dict[str, list[float]] = {"kinlog": [], "every completion whole": []}
    size: dict[str, list[float]] = {name: [] for name in seconds}
    for _ in range(rounds):
        under_way.generate(NEW_TOKENS)
        for name in seconds:
            before, began = under_way.size_bytes(), time.perf_counter()
            if name == "kinlog":
                await under_way.progress.write()
            else:
                await asyncio.to_thread(under_way.append_whole)
            seconds[name].append((time.perf_counter() - began) * 1000)
            size[name].append((under_way.size_bytes() - before) / (rollouts * NEW_TOKENS))
    case = f"{rollouts} rollouts of {length:,} tokens, {NEW_TOKENS} new ones each"
    return iter(
        [
            compare(f"{case}: time of a write", "ms", seconds),
            compare(f"{case}: written for a new token", "bytes", size),
        ]
    )


def measure_progress(setup: Setup) -> Iterator[Comparison]:
    for length in LENGTHS[:1] if setup.smoke else LENGTHS:
        yield from asyncio.run(
            measured(
                setup.directory / str(length),
                rollouts=SMOKE_ROLLOUTS if setup.smoke else ROLLOUTS,
                length=length,
                rounds=1 if setup.smoke else 9,
            )
        )


if __name__ == "__main__":
    run_bench("progress", "Keeping the tokens of rollouts under way", measure_progress)
