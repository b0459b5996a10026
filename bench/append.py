"""Durable appends: kinlog's log beside SQLite (WAL, ``synchronous=FULL``) and JSON Lines with ``fdatasync``.

Every contender stores the same events with the same seq, epoch and time, and makes each commit durable before the next
begins. SQLite gets kinlog's own rows in one table without further indexes, by ``executemany`` in one transaction. JSON
Lines gets one write of ``msgspec.json`` lines. Both are written as one would: their files grow as they go.

Each size is measured twice. *Awaited*: a coroutine waits for the commit while its event loop stays free, as kinlog's
controller does. The others then need a thread as well, and get one that lives as long as the loop. *Blocking*: nothing
else runs, and a caller simply blocks. Kinlog hands its commit to its own thread here too; the others need not.

    python bench/append.py [--smoke] [--json FILE] [--directory DIR]
"""

import asyncio
import os
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
from measure import Comparison, Setup, compare, run_bench, take_turns

from kinlog.lineage.log import create_log
from kinlog.schemas.codec import encode_event
from kinlog.schemas.events import Event, RecordedEvent, SiblingDispatched
from kinlog.schemas.settings import LogSettings

EVENTS_PER_COMMIT = (1, 16, 256)
#: What is aimed at, by events per commit.
AT_LEAST = {1: {"sqlite": 1.0, "jsonl": 1.0}, 16: {"sqlite": 1.0, "jsonl": 1.0}, 256: {"sqlite": 2.0}}


def dispatches(count: int) -> list[Event]:
    """Return events as a run dispatches siblings."""
    return [
        SiblingDispatched(
            group_id=1000 + n // 8,
            generation=n % 8,
            attempt=1,
            weight_version=17,
            worker="generation-0",
            seed=n * 2654435761 % 2**63,
        )
        for n in range(count)
    ]


class Contender(Protocol):
    """One way to keep events. Made for a directory that does not exist yet."""

    def commit(self, events: Sequence[Event]) -> None:
        """Return once the events are durable."""

    async def commit_awaited(self, events: Sequence[Event]) -> None:
        """The same, while the event loop stays free."""

    def close(self) -> None: ...


class Kinlog:
    def __init__(self, directory: Path) -> None:
        self._log = create_log(
            directory, log_id="l", run_id="r", writer_version="bench", settings=LogSettings()
        )

    def commit(self, events: Sequence[Event]) -> None:
        self._log.writer.append([encode_event(event) for event in events], _now_us()).wait()

    async def commit_awaited(self, events: Sequence[Event]) -> None:
        await self._log.writer.append([encode_event(event) for event in events], _now_us()).durable()

    def close(self) -> None:
        self._log.close()


class _InThread(ABC):
    """What blocks is awaited by giving it to a thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    @abstractmethod
    def commit(self, events: Sequence[Event]) -> None: ...

    async def commit_awaited(self, events: Sequence[Event]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self.commit, events)

    def close(self) -> None:
        self._thread.shutdown()


class Sqlite(_InThread):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        directory.mkdir()
        self._database = sqlite3.connect(
            directory / "log.sqlite", isolation_level=None, check_same_thread=False
        )
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.execute(
            "CREATE TABLE events (seq INTEGER PRIMARY KEY, epoch INTEGER, time INTEGER, kind TEXT, version INTEGER, "
            "group_id INTEGER, generation INTEGER, attempt INTEGER, train_step INTEGER, weight_version INTEGER, "
            "reason TEXT, payload BLOB)"
        )

    def commit(self, events: Sequence[Event]) -> None:
        now_us = _now_us()
        self._database.execute("BEGIN")
        self._database.executemany(
            "INSERT INTO events VALUES (NULL, 1, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(now_us, *encode_event(event)) for event in events],
        )
        self._database.execute("COMMIT")

    def close(self) -> None:
        super().close()
        self._database.close()


class JsonLines(_InThread):
    def __init__(self, directory: Path) -> None:
        super().__init__()
        directory.mkdir()
        self._encode = msgspec.json.Encoder().encode
        self._file = open(directory / "log.jsonl", "ab", buffering=0)  # noqa: SIM115 - closed below
        self._seq = 0

    def commit(self, events: Sequence[Event]) -> None:
        now_us, seq = _now_us(), self._seq
        self._file.write(
            b"".join(
                [
                    self._encode(RecordedEvent(seq + place, 1, now_us, event)) + b"\n"
                    for place, event in enumerate(events, 1)
                ]
            )
        )
        os.fdatasync(self._file.fileno())
        self._seq += len(events)

    def close(self) -> None:
        super().close()
        self._file.close()


CONTENDERS: dict[str, Callable[[Path], Contender]] = {
    "kinlog": Kinlog,
    "sqlite": Sqlite,
    "jsonl": JsonLines,
}


def _now_us() -> int:
    return time.time_ns() // 1000


def _blocking_us(contender: Contender, events: Sequence[Event], commits: int) -> float:
    began = time.perf_counter()
    for _ in range(commits):
        contender.commit(events)
    return (time.perf_counter() - began) / commits * 1e6


def _awaited_us(contender: Contender, events: Sequence[Event], commits: int) -> float:
    async def run() -> float:
        began = time.perf_counter()
        for _ in range(commits):
            await contender.commit_awaited(events)
        return (time.perf_counter() - began) / commits * 1e6

    return asyncio.run(run())


def measure_appends(setup: Setup) -> Iterator[Comparison]:
    """Measure every size, awaited and blocking."""
    commits, rounds = (2, 2) if setup.smoke else (5, 120)
    for way, round_us in (("awaited", _awaited_us), ("blocking", _blocking_us)):
        for size in EVENTS_PER_COMMIT:
            events = dispatches(size)
            made = {
                name: contender(setup.directory / f"{name}-{way}-{size}")
                for name, contender in CONTENDERS.items()
            }
            try:
                turns = {name: partial(round_us, one, events, commits) for name, one in made.items()}
                costs = take_turns(turns, rounds=rounds)
            finally:
                for one in made.values():
                    one.close()
            yield compare(f"{size} events a commit, {way}", "µs", costs, at_least=AT_LEAST[size])


if __name__ == "__main__":
    run_bench("append", "Durable appends beside SQLite and JSON Lines", measure_appends)
