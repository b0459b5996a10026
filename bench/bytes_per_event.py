"""Bytes an event takes on disk: live and closed, beside JSON Lines with zstd of the same events.

The events are those of a made-up run, 16 to a commit, with a wall clock that moves on between commits. Each line of JSON
has what a row of the log has: seq, epoch, time and event.

*Live* is what can be written while the run goes on, every commit durable. The JSON Lines go through one zstd stream that is
flushed at each commit, which is the most that a stream can do: it knows all earlier lines. Kinlog's frames are not
compressed, so that any of them can be read without the others, and damage to one leaves the others readable.

*Closed* is what the history of a run takes in the end: kinlog's compacted segments, and JSON Lines compressed as a whole at
the same level.

Digests of rows and seeds of attempts are random: no encoding makes them smaller. Their bytes are given as the floor.

    python bench/bytes_per_event.py [--smoke] [--json FILE] [--directory DIR]
"""

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec
import zstandard
from measure import Comparison, Setup, compare, run_bench
from simulated_run import RunShape, history

from kinlog.lineage.compaction import compact_log
from kinlog.lineage.log import create_log, open_log
from kinlog.lineage.store import LocalStore
from kinlog.schemas.codec import encode_event
from kinlog.schemas.events import Event, GroupFinalized, RecordedEvent, SiblingDispatched, SiblingSealed
from kinlog.schemas.prompts import DIGEST_BYTES
from kinlog.schemas.settings import LogSettings

EVENTS_PER_COMMIT = 16
MEAN_PAUSE_US = 20_000
#: As kinlog compacts.
COMPRESSION_LEVEL = 9
SEED_BYTES = 8
LIVE_AT_MOST, CLOSED_AT_MOST = 200.0, 40.0
#: What the targets are for: a rollout of two model calls.
TARGET_CALLS = 2

Commit = tuple[int, Sequence[Event]]


def commits_of(events: Iterator[Event]) -> list[Commit]:
    """Return the events in commits, each with its wall clock in microseconds."""
    chance = random.Random(0)
    time_us = 1_700_000_000_000_000
    commits: list[Commit] = []
    while batch := list(islice(events, EVENTS_PER_COMMIT)):
        time_us += int(chance.expovariate(1 / MEAN_PAUSE_US))
        commits.append((time_us, batch))
    return commits


def write_log(directory: Path, commits: Sequence[Commit]) -> None:
    # Not synced: bytes are the same.
    settings = LogSettings(durability="os")
    log = create_log(directory, log_id="l", run_id="r", writer_version="bench", settings=settings)
    for time_us, events in commits:
        log.writer.append([encode_event(event) for event in events], time_us).wait()
    log.close()


def compact(directory: Path) -> None:
    """Compact all that was written, as the next controller would."""
    log = open_log(directory, writer_version="bench", settings=LogSettings(durability="os"))
    compact_log(LocalStore(), directory, epoch=log.writer.epoch, checkpoints=[])
    log.close()


def size_of(directory: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in directory.glob(pattern))


def json_lines(commits: Sequence[Commit]) -> Iterator[bytes]:
    """Yield the lines of each commit."""
    encode = msgspec.json.Encoder().encode
    seq = 0
    for time_us, events in commits:
        records = [RecordedEvent(seq + place, 1, time_us, event) for place, event in enumerate(events, 1)]
        yield b"".join([encode(record) + b"\n" for record in records])
        seq += len(events)


def flushed_zstd(lines: Iterator[bytes]) -> int:
    """Return the size of a zstd stream that is flushed after every commit."""
    stream = zstandard.ZstdCompressor().compressobj()
    return sum(
        len(stream.compress(line)) + len(stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)) for line in lines
    )


def random_bytes(events: Sequence[Event]) -> int:
    """Return the bytes of digests and seeds."""
    total = 0
    for event in events:
        match event:
            case SiblingDispatched():
                total += SEED_BYTES
            case SiblingSealed(receipt=receipt) if receipt is not None:
                total += DIGEST_BYTES * len(receipt.calls)
            case GroupFinalized(rows=rows):
                total += DIGEST_BYTES * len(rows)
    return total


def measure_bytes(setup: Setup) -> Iterator[Comparison]:
    """Measure runs whose rollouts have few or many model calls."""
    num_events = 3000 if setup.smoke else 300_000
    for calls in (1, TARGET_CALLS, 8):
        directory = setup.directory / f"log-{calls}"
        commits = commits_of(history(num_events, RunShape(calls=calls)))
        plain = b"".join(json_lines(commits))
        write_log(directory, commits)
        live = {
            "kinlog": size_of(directory, "segment-*.arrows"),
            "jsonl + zstd, flushed": flushed_zstd(json_lines(commits)),
            "jsonl": len(plain),
        }
        compact(directory)
        closed = {
            "kinlog": size_of(directory, "compacted-*.arrows"),
            "jsonl + zstd": len(zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compress(plain)),
        }
        floor = random_bytes([event for _, events in commits for event in events]) / num_events
        note = f"{floor:.1f} B an event are random: digests of rows, seeds of attempts"
        aimed_at = calls == TARGET_CALLS
        for name, sizes, at_most in (("live", live, LIVE_AT_MOST), ("closed", closed, CLOSED_AT_MOST)):
            yield compare(
                f"{name}, {calls} model calls a sibling",
                "B",
                {contender: [size / num_events] for contender, size in sizes.items()},
                at_most=at_most if aimed_at else None,
                note=note,
            )


if __name__ == "__main__":
    run_bench("bytes_per_event", "Bytes an event, beside JSON Lines with zstd", measure_bytes)
