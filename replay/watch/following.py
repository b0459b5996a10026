"""What is selected of a log, as it is recorded."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from kinlog.lineage.scan import LogScan, holds_mark
from kinlog.replay.plain_text import format_count
from kinlog.replay.selection import EventFilter, Selector
from kinlog.replay.watch.followed_log import FollowedLog
from kinlog.schemas.errors import RunNotFoundError
from kinlog.schemas.events import Position, RecordedEvent

__all__ = ["follow_events"]


def follow_events(
    directory: Path,
    selection: EventFilter,
    *,
    pause: Callable[[], None],
    tell: Callable[[str], None],
) -> Iterator[RecordedEvent]:
    """Yield the events that fit, those that there are and then those that are recorded, until ``selection.last_seq``.

    Segments may be ended, compacted and dropped meanwhile, and new lives begin. A frame that is half written is not there
    yet.

    Parameters
    ----------
    pause:
        Called when there is nothing more for now. What it raises ends the following.
    tell:
        Called with a sentence about events that cannot be shown, or that should not have been.

    Raises
    ------
    RunNotFoundError, LogDamagedError, LogUnsupportedError
        As :func:`kinlog.lineage.scan.scan_log`.
    """
    log = FollowedLog(directory)
    selector = Selector(selection, log.scan.beginning())
    after_seq, read_to = 0, Position(0, 0, 0)
    batches: Iterator[pa.RecordBatch] | None = None
    while True:
        if batches is None:
            after_seq = _goes_on_after(log.scan, read_to, after_seq, tell)
            records = selector.events(log.scan, after_seq)
        else:
            records = (record for batch in batches for record in selector.events_of(batch))
        whole = False
        try:
            for record in records:
                after_seq = record.seq
                yield record
            after_seq, read_to, whole = max(after_seq, log.tail.last.seq), log.tail.last, True
        except RunNotFoundError:
            pass  # dropped while they were read: the next look tells which
        if selection.last_seq is not None and after_seq >= selection.last_seq:
            return
        pause()
        batches = log.batches() if whole else None
        if batches is None:
            log = FollowedLog(directory)


def _goes_on_after(scan: LogScan, read_to: Position, after_seq: int, tell: Callable[[str], None]) -> int:
    """Return the seq that a log is to be shown from, if it was shown up to ``after_seq``, and tell of what is between."""
    fork_seq = _fork(scan, read_to)
    if fork_seq is not None:
        tell(f"what was shown after seq {fork_seq} is no history: a newer controller had taken the log over")
        after_seq = min(after_seq, fork_seq)
    if scan.first_seq > after_seq + 1:
        dropped = format_count(scan.first_seq - 1 - after_seq, "event")
        tell(f"{dropped} up to seq {scan.first_seq - 1} were dropped")
        after_seq = scan.first_seq - 1
    return after_seq


def _fork(scan: LogScan, read_to: Position) -> int | None:
    """Return the last seq that a log has in common with an earlier look at it, unless it goes on from there."""
    if holds_mark(scan, read_to) is not False:
        return None
    newer = (segment.info for segment in scan.segments if segment.info.epoch > read_to.epoch)
    return next((info.first_seq - 1 for info in newer), scan.end.seq)
