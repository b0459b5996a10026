"""Copying a log up to a place: what makes a checkpoint directory self-contained."""

from pathlib import Path

from kinlog.lineage.segment import SegmentEnd, parse_segment_name, scan_segment
from kinlog.lineage.store import Store, write_durably
from kinlog.schemas.events import Position

__all__ = ["copy_log"]


def copy_log(store: Store, source: Path, target: Path, through: Position) -> None:
    """Make ``target`` a log that ends at ``through``.

    Segments that are closed and end at or before it are hard-linked, the one that holds it is copied up to there. Bytes
    are taken as they are: whoever reads the copy verifies it.

    Raises
    ------
    FileExistsError
        ``target`` already holds segments.
    """
    store.make_directory(target)
    for name in store.names(source):
        if parse_segment_name(name) is None:
            continue
        scan = scan_segment(store.read(source / name))
        if scan.info is None or scan.info.epoch > through.epoch or scan.info.first_seq > through.seq + 1:
            continue
        frames = [frame for frame in scan.frames if frame.last_seq <= through.seq]
        if len(frames) == len(scan.frames) and scan.end is SegmentEnd.CLOSED:
            store.link(source / name, target / name)
        else:
            write_durably(store, target / name, bytes(store.read(source / name)[: frames[-1].end]))
    store.sync_directory(target)
