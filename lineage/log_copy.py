"""Copying a log up to a place: what makes a checkpoint directory self-contained."""

from pathlib import Path

from kinlog.lineage.names import LogFile, current_files, log_files
from kinlog.lineage.segment import END_OF_STREAM, SegmentEnd, scan_segment
from kinlog.lineage.store import Store, write_durably
from kinlog.schemas.events import Position

__all__ = ["copy_log"]


def copy_log(store: Store, source: Path, target: Path, through: Position) -> None:
    """Make ``target`` a log that ends at ``through``, a place in the newest epoch.

    What no one writes any more is hard-linked without being read, the segment that holds the place is copied up to there.
    Bytes are taken as they are: whoever reads the copy verifies it.

    Raises
    ------
    FileExistsError
        ``target`` already holds segments.
    """
    store.make_directory(target)
    current, _ = current_files(log_files(store.names(source)))
    for file in current:
        if _is_immutable(store, source, file, through):
            store.link(source / file.name, target / file.name)
            continue
        data = store.read(source / file.name)
        scan = scan_segment(data)
        if scan.info is None or scan.info.epoch > through.epoch or scan.info.first_seq > through.seq + 1:
            continue
        frames = [frame for frame in scan.frames if frame.last_seq <= through.seq]
        if len(frames) == len(scan.frames) and scan.end is SegmentEnd.CLOSED:
            store.link(source / file.name, target / file.name)
        else:
            write_durably(store, target / file.name, bytes(data[: frames[-1].end]))
    store.sync_directory(target)


def _is_immutable(store: Store, source: Path, file: LogFile, through: Position) -> bool:
    """Whether a file is complete, and all of it lies before the place."""
    if file.kind != "segment":
        return True
    end = store.read_part(source / file.name, -len(END_OF_STREAM), len(END_OF_STREAM))
    return file.last[0] < through.epoch and bytes(end) == END_OF_STREAM
