"""Following a log: what is selected of it, as it is recorded."""

from collections.abc import Callable, Iterator
from pathlib import Path

from kinlog.lineage.scan import LogScan, holds_mark, scan_log
from kinlog.replay.plain_text import format_count
from kinlog.replay.selection import EventFilter, Selector
from kinlog.schemas.errors import LogDamagedError, RunNotFoundError
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
    scan = scan_log(directory)
    selector = Selector(selection, scan.beginning())
    after_seq, read_to, damage = 0, Position(0, 0, 0), False
    while True:
        fork_seq = _fork(scan, read_to)
        if fork_seq is not None:
            tell(
                f"what was shown after seq {fork_seq} is no history: a newer controller had taken the log over"
            )
            after_seq = min(after_seq, fork_seq)
        if scan.first_seq > after_seq + 1:
            tell(
                f"{format_count(scan.first_seq - 1 - after_seq, 'event')} up to seq {scan.first_seq - 1} were dropped"
            )
            after_seq = scan.first_seq - 1
        try:
            for record in selector.events(scan, after_seq):
                after_seq = record.seq
                yield record
            after_seq, read_to, damage = max(after_seq, scan.end.seq), scan.end, False
        except LogDamagedError:
            # A newer life cuts off a torn tail while it is read. Damage is there to stay.
            if damage:
                raise
            damage = True
        except RunNotFoundError:
            pass  # dropped while they were read: the next scan tells which
        if selection.last_seq is not None and after_seq >= selection.last_seq:
            return
        if not damage:
            pause()
        scan = _scanned_again(directory, scan)


def _fork(scan: LogScan, read_to: Position) -> int | None:
    """Return the last seq that a log has in common with an earlier look at it, unless it goes on from there."""
    if holds_mark(scan, read_to) is not False:
        return None
    newer = (segment.info for segment in scan.segments if segment.info.epoch > read_to.epoch)
    return next((info.first_seq - 1 for info in newer), scan.end.seq)


def _scanned_again(directory: Path, known: LogScan) -> LogScan:
    try:
        return scan_log(directory, known=known)
    except LogDamagedError:
        return scan_log(directory, known=known)
