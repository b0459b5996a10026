"""Full replay: from a log on disk to the projection, beside one decode and one fold for each event in plain Python.

The naive contender has one msgpack record for each event, a tagged union, already in memory; it decodes each with msgspec
and folds it with the same fold. It checks nothing. Ours reads a log of 16 events a frame, and compares every byte's
checksum.

The first figure is what a restart does to get its projection, once the log is open. Opening verifies every frame: the
second figure has both. Compacted segments are verified as they are replayed.
"""

import gc
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Union

import msgspec
from measure import Comparison, Setup, compare, run_bench, take_turns
from simulated_run import history

from kinlog.lineage.compaction import compact_log
from kinlog.lineage.fold import fold
from kinlog.lineage.log import create_log
from kinlog.lineage.scan import LogScan, scan_log
from kinlog.lineage.state import Projection, decode_projection, encode_projection
from kinlog.lineage.store import LocalStore
from kinlog.replay.projection import project, replay
from kinlog.schemas.codec import encode_event
from kinlog.schemas.events import EVENT_TYPES, Event, RecordedEvent
from kinlog.schemas.settings import LogSettings

EVENTS_PER_FRAME = 16
AT_LEAST = 3.0


def write_log(directory: Path, events: Sequence[Event]) -> None:
    # Not synced: this is the reader's bench, and nothing of it need outlive a power failure.
    settings = LogSettings(durability="os")
    log = create_log(directory, log_id="l", run_id="r", writer_version="bench", settings=settings)
    remaining = iter(events)
    try:
        while frame := [encode_event(event) for event in islice(remaining, EVENTS_PER_FRAME)]:
            log.writer.append(frame, 1_700_000_000_000_000).wait()
    finally:
        log.close()


def naive_replay(records: Sequence[bytes]) -> Projection:
    decoder = msgspec.msgpack.Decoder(Union[tuple(EVENT_TYPES.values())])  # noqa: UP007 - a union made at run time
    projection = Projection()
    for seq, record in enumerate(records, 1):
        fold(projection, RecordedEvent(seq, 1, 0, decoder.decode(record)))
    return projection


def projecting_the_tail(scan: LogScan) -> Callable[[], Projection]:
    """Return the replay of the log's last hundredth, from a snapshot."""
    snapshot = encode_projection(project(scan, through_seq=scan.end.seq * 99 // 100))
    return lambda: project(scan, decode_projection(snapshot))


def timed(work: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        gc.collect()
        began = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - began
        del result
        return seconds

    return run


def measure_replay(setup: Setup) -> Sequence[Comparison]:
    num_events, rounds = (3000, 2) if setup.smoke else (1_000_000, 5)
    events = list(history(num_events))
    directory = setup.directory / "log"
    write_log(directory, events)
    records = [msgspec.msgpack.encode(event) for event in events]
    del events
    scan = scan_log(directory)
    assert encode_projection(project(scan)) == encode_projection(naive_replay(records))
    naive = timed(lambda: naive_replay(records))
    costs = take_turns(
        {
            "project": timed(lambda: project(scan)),
            "naive": naive,
            "opened": timed(lambda: project(scan_log(directory))),
            "one by one": timed(lambda: replay(scan.events())),
            "tail": timed(projecting_the_tail(scan)),
        },
        rounds=rounds,
    )
    compact_log(LocalStore(), directory, epoch=1, checkpoints=())
    compacted = take_turns(
        {"kinlog": timed(lambda: project(scan_log(directory))), "naive": naive}, rounds=rounds
    )

    def beside_naive(case: str, name: str, *, at_least: float | None = None) -> Comparison:
        return compare(
            f"{num_events:,} events, {case}",
            "s",
            {"kinlog": costs[name], "naive": costs["naive"]},
            at_least={} if at_least is None else {"naive": at_least},
        )

    return [
        beside_naive("replayed to the projection", "project", at_least=AT_LEAST),
        beside_naive("every frame verified, then replayed to the projection", "opened"),
        compare(
            f"{num_events:,} events, closed segments compacted; opened, then replayed to the projection",
            "s",
            compacted,
        ),
        beside_naive("every event folded, as by kinlog log verify", "one by one"),
        beside_naive("the last hundredth replayed from a snapshot of the rest", "tail"),
    ]


if __name__ == "__main__":
    run_bench("replay", "Full replay to the projection", measure_replay)
