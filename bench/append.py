"""Durable appends: kinlog's log beside SQLite (WAL, synchronous=FULL) and JSON Lines with fdatasync, in one run.

Every contender stores the same events, and makes each commit durable before the next begins. Rounds of the contenders
alternate, so that a noisy moment hits all of them; the figures are medians over the rounds. Ratios above 1 mean that
kinlog is faster.

    python bench/append.py                    the figures
    python bench/append.py --commits 3        a smoke run
    python bench/append.py --json out.json    the figures, for machines
"""

import argparse
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kinlog.lineage.log import create_log
from kinlog.schemas.codec import encode_event
from kinlog.schemas.events import Event, SiblingDispatched
from kinlog.schemas.settings import LogSettings

EVENTS_PER_COMMIT = (1, 16, 256)


class Measurement(msgspec.Struct, frozen=True):
    """Seconds for one commit, by contender: the median over rounds, and the quarter of rounds on either side."""

    events_per_commit: int
    median_s: dict[str, float]
    quartiles_s: dict[str, tuple[float, float]]


def events_of(count: int) -> list[Event]:
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


def kinlog_round(directory: Path, events: Sequence[Event], commits: int) -> float:
    log = create_log(directory, log_id="l", run_id="r", writer_version="bench", settings=LogSettings())
    began = time.perf_counter()
    for _ in range(commits):
        log.writer.append([encode_event(event) for event in events], time.time_ns() // 1000).wait()
    seconds = time.perf_counter() - began
    log.close()
    return seconds / commits


def sqlite_round(directory: Path, events: Sequence[Event], commits: int) -> float:
    directory.mkdir()
    database = sqlite3.connect(directory / "log.sqlite", isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.execute(
        "CREATE TABLE events (seq INTEGER PRIMARY KEY, time INTEGER, kind TEXT, version INTEGER, group_id INTEGER, "
        "generation INTEGER, attempt INTEGER, train_step INTEGER, weight_version INTEGER, reason TEXT, payload BLOB)"
    )
    began = time.perf_counter()
    for _ in range(commits):
        now = time.time_ns() // 1000
        database.execute("BEGIN")
        database.executemany(
            "INSERT INTO events VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [(now, *encode_event(event)) for event in events],
        )
        database.execute("COMMIT")
    seconds = time.perf_counter() - began
    database.close()
    return seconds / commits


def jsonl_round(directory: Path, events: Sequence[Event], commits: int) -> float:
    directory.mkdir()
    encoder = msgspec.json.Encoder()
    with open(directory / "log.jsonl", "ab", buffering=0) as file:
        began = time.perf_counter()
        for _ in range(commits):
            file.write(b"".join(encoder.encode(event) + b"\n" for event in events))
            os.fdatasync(file.fileno())
        seconds = time.perf_counter() - began
    return seconds / commits


CONTENDERS: dict[str, Callable[[Path, Sequence[Event], int], float]] = {
    "kinlog": kinlog_round,
    "sqlite": sqlite_round,
    "jsonl": jsonl_round,
}


def measure(directory: Path, events_per_commit: int, *, commits: int, rounds: int) -> Measurement:
    """Run every contender ``rounds`` times, in turn."""
    events = events_of(events_per_commit)
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for number in range(rounds):
        for name, contender in CONTENDERS.items():
            place = directory / f"{name}-{events_per_commit}-{number}"
            seconds[name].append(contender(place, events, commits))
    quartiles = {name: statistics.quantiles(values, n=4) for name, values in seconds.items()}
    return Measurement(
        events_per_commit,
        {name: statistics.median(values) for name, values in seconds.items()},
        {name: (cuts[0], cuts[2]) for name, cuts in quartiles.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Durable appends beside SQLite and JSON Lines.")
    parser.add_argument("--commits", type=int, default=200, help="commits of one round")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each contender")
    parser.add_argument("--directory", type=Path, help="where to write; by default a temporary directory")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        measured = [
            measure(Path(directory), size, commits=options.commits, rounds=options.rounds)
            for size in EVENTS_PER_COMMIT
        ]
    print("events/commit   kinlog µs (quartiles)    sqlite µs   jsonl µs   sqlite/kinlog   jsonl/kinlog")
    for m in measured:
        low, high = m.quartiles_s["kinlog"]
        median = m.median_s
        print(
            f"{m.events_per_commit:>13} {median['kinlog'] * 1e6:>11.0f} ({low * 1e6:.0f}-{high * 1e6:.0f})"
            f" {median['sqlite'] * 1e6:>16.0f} {median['jsonl'] * 1e6:>10.0f}"
            f" {median['sqlite'] / median['kinlog']:>15.2f} {median['jsonl'] / median['kinlog']:>14.2f}"
        )
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(measured)))


if __name__ == "__main__":
    main()
