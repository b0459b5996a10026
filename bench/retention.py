"""Retention: how large a log gets over a run of 100,000 groups, and how long opening it takes after a thousand restarts.

The run is simulated: its events are made up, in the order and size of a real run's, and appended to a log that is compacted
after each checkpoint, as a controller would. Sizes are taken after every compaction, so that the most at any time is the
most that a user would see. Each restart leaves one event, as a
crash loop does.
"""

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from measure import Comparison, Setup, compare, run_bench
from simulated_run import RunShape, history

from kinlog.lineage.compaction import compact_log
from kinlog.lineage.log import create_log, open_log
from kinlog.lineage.names import log_files
from kinlog.lineage.scan import scan_log
from kinlog.lineage.store import LocalStore
from kinlog.replay.projection import project
from kinlog.schemas.codec import encode_event
from kinlog.schemas.events import CheckpointCommitted, Event, GroupReserved, Position, WriterOpened
from kinlog.schemas.settings import LogSettings

GROUPS = 100_000
SHAPE = RunShape(siblings=8, calls=2, in_flight=64, groups_per_step=32, steps_per_checkpoint=8)
EVENTS_PER_FRAME = 16
SEGMENT_BYTES = 4 * 1024 * 1024
TIME_US = 1_700_000_000_000_000


class Sizes(NamedTuple):
    """What the files of a log take, in bytes."""

    live: int
    archive: int

    @property
    def total(self) -> int:
        return self.live + self.archive


def sizes_of(directory: Path) -> Sizes:
    live = archive = 0
    for file in log_files(path.name for path in directory.iterdir()):
        size_bytes = (directory / file.name).stat().st_size
        if file.kind == "segment":
            live += size_bytes
        else:
            archive += size_bytes
    return Sizes(live, archive)


def events_of_groups(num_groups: int) -> Iterator[Event]:
    """Yield the events of a run until it has reserved so many groups."""
    reserved = 0
    for event in history(sys.maxsize, SHAPE):
        reserved += isinstance(event, GroupReserved)
        if reserved > num_groups:
            return
        yield event


class SimulatedRun(NamedTuple):
    """How a run's log grew."""

    events: int
    archived_events: int
    sizes: list[Sizes]
    """After each checkpoint's compaction."""
    compaction_s: float


def simulate(directory: Path, num_groups: int, *, segment_bytes: int, drop: bool) -> SimulatedRun:
    """Write a run's log, compacting it after each checkpoint, of which the newest two are kept."""
    store = LocalStore()
    # Not synced: sizes are what is measured.
    settings = LogSettings(durability="os", segment_bytes=segment_bytes)
    log = create_log(directory, log_id="l", run_id="r", writer_version="bench", settings=settings)
    kept: deque[Position] = deque(maxlen=2)
    sizes: list[Sizes] = []
    compaction_s = 0.0
    events, count = events_of_groups(num_groups), 0
    while frame := list(islice(events, EVENTS_PER_FRAME)):
        ticket = log.writer.append([encode_event(event) for event in frame], TIME_US + 40 * count)
        count += len(frame)
        ticket.wait()  # a writer that is behind groups its commits, and sizes would depend on the machine
        if any(isinstance(event, CheckpointCommitted) for event in frame):
            kept.append(position_of(directory))
            began = time.perf_counter()
            compact_log(
                store,
                directory,
                epoch=log.writer.epoch,
                checkpoints=kept,
                drop_through_seq=kept[0].seq if drop and len(kept) == kept.maxlen else 0,
                project=lambda scan, through_seq: project(scan, through_seq=through_seq),
            )
            compaction_s += time.perf_counter() - began
            sizes.append(sizes_of(directory))
    log.close()
    return SimulatedRun(count, archived_events(directory), sizes, compaction_s)


def position_of(directory: Path) -> Position:
    return scan_log(directory).end


def archived_events(directory: Path) -> int:
    segments = scan_log(directory).segments
    return sum(s.end.seq + 1 - s.info.first_seq for s in segments if s.compacted)


def opening_ms(directory: Path, counts: Sequence[int]) -> dict[int, tuple[list[float], int]]:
    """Restart a run again and again, and return what the last openings took before each count, and the files then."""
    store, settings = LocalStore(), LogSettings(segment_bytes=SEGMENT_BYTES)
    create_log(directory, log_id="l", run_id="r", writer_version="bench", settings=settings).close()
    taken: deque[float] = deque(maxlen=20)
    found = {}
    for restart in range(1, max(counts) + 1):
        began = time.perf_counter()
        log = open_log(directory, writer_version="bench", settings=settings)
        taken.append((time.perf_counter() - began) * 1e3)
        log.writer.append([encode_event(WriterOpened(host="bench", pid=restart))], TIME_US).wait()
        compact_log(store, directory, epoch=log.writer.epoch, checkpoints=())
        log.close()
        if restart in counts:
            found[restart] = (list(taken), len(log_files(path.name for path in directory.iterdir())))
    return found


def measure_retention(setup: Setup) -> list[Comparison]:
    groups, counts = (800, (1, 10)) if setup.smoke else (GROUPS, (20, 100, 1000))
    segment_bytes, mb = (2**18 if setup.smoke else SEGMENT_BYTES), 1e6
    kept = simulate(setup.directory / "keep", groups, segment_bytes=segment_bytes, drop=False)
    dropped = simulate(setup.directory / "drop", groups, segment_bytes=segment_bytes, drop=True)
    comparisons = [
        compare(
            f"history kept, {groups:,} groups, {kept.events:,} events: archive",
            "bytes an event",
            {"kinlog": [kept.sizes[-1].archive / max(1, kept.archived_events)]},
            at_most=40,
            note=f"{kept.archived_events:,} of the events are in the archive, of {kept.sizes[-1].archive / mb:.1f} MB; "
            f"compaction took {kept.compaction_s:.1f} s in {len(kept.sizes)} steps",
        ),
        compare(
            "history kept: not compacted, the most after any checkpoint",
            "MB",
            {"kinlog": [max(sizes.live for sizes in kept.sizes) / mb]},
            at_most=4 * segment_bytes / mb,
            note=f"segments of {segment_bytes / mb:.1f} MB, two checkpoints kept",
        ),
        compare(
            "history dropped: everything, the most after any checkpoint",
            "MB",
            {"kinlog": [max(sizes.total for sizes in dropped.sizes) / mb]},
            at_most=5 * segment_bytes / mb,
            note=f"compaction took {dropped.compaction_s:.1f} s",
        ),
    ]
    for restarts, (taken, files) in opening_ms(setup.directory / "restarts", counts).items():
        comparisons.append(
            compare(
                f"opening after {restarts} restarts in a row", "ms", {"kinlog": taken}, note=f"{files} files"
            )
        )
    return comparisons


if __name__ == "__main__":
    run_bench("retention", "The size of a log, and opening it, over a long run", measure_retention)
