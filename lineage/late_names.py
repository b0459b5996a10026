"""File systems that show names late: a directory's listing is not proof that nothing else is in it.

On a network file system another machine's new segment may be missing from the listing for a while. Creating a file
exclusively is what every such system decides in one place, so that is asked, and never the listing alone: first for the
epoch, then for the segment that would follow the last one.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from kinlog.lineage.names import log_files
from kinlog.lineage.scan import LogScan, scan_log
from kinlog.lineage.segment import SegmentEnd, segment_name
from kinlog.lineage.store import Store
from kinlog.schemas.errors import LogWriteError
from kinlog.schemas.events import Position

__all__ = ["scan_whole_log"]

#: How long a listing is given to show what is known to be there, seconds.
_PAUSES_S = (0.1, 0.3, 1.0, 3.0)


def scan_whole_log(
    directory: Path,
    *,
    store: Store,
    marks: Sequence[Position],
    known: LogScan,
    sleep: Callable[[float], None],
) -> LogScan:
    """Verify a log whose older writers are fenced, when certain that no segment of it is out of sight.

    Raises
    ------
    LogWriteError
        A segment exists, and the listing still does not show it. Going on would fork the history.
    """
    for pause_s in (0.0, *_PAUSES_S):
        if pause_s:
            sleep(pause_s)
        listed = store.names(directory)  # before the scan: what is listed only after it was not scanned
        scan = scan_log(directory, store=store, marks=marks, known=known)
        hidden = _hidden_segment(store, scan, listed)
        if hidden is None:
            return scan
    raise LogWriteError(
        f"{hidden} exists in {directory}, and the directory's listing does not show it: the file system shows new names "
        "late. Nothing recorded is lost. Wait until it is listed, then try again."
    )


def _hidden_segment(store: Store, scan: LogScan, listed: Sequence[str]) -> str | None:
    """Return the name of the segment after the last one if it exists and was not listed."""
    if not scan.segments or scan.segments[-1].scan.end is not SegmentEnd.CLOSED:
        return None  # a writer ends a segment before it creates the next
    (last,) = log_files([scan.segments[-1].path.name])
    epoch, index = last.last
    name = segment_name(epoch, index + 1)
    if name in listed:
        return None  # scanned, and no part of the history
    try:
        store.create(scan.directory / name).close()
    except FileExistsError:
        return name
    store.remove(scan.directory / name)
    return None
