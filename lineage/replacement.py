"""Replacing files of a log by one that stands for them, so that a crash at any moment leaves the same history.

One rename makes the new file count, and from then on what it stands for is passed over by whoever reads the log. Only
then it is removed, by way of the trash, the oldest file first: a writer that was taken over long ago finds either the
segment of the epoch that fenced it, or its own one gone.
"""

from pathlib import Path

import pyarrow as pa

from kinlog.lineage.names import (
    QUARANTINE_NAME,
    TEMPORARY_PREFIX,
    TRASH_NAME,
    LogFile,
    current_files,
    log_files,
    numbered_name,
)
from kinlog.lineage.reading import read_batches
from kinlog.lineage.scan import LogScan
from kinlog.lineage.segment import SegmentEnd, scan_segment
from kinlog.lineage.store import Store
from kinlog.schemas.errors import WriterFencedError

__all__ = ["clear_leavings", "clear_replaced", "replace_files", "same_events"]


def replace_files(scan: LogScan, temporary: Path, name: str, replaced: set[str], epoch: int) -> None:
    """Let a file count that was built under another name, then remove what it stands for.

    Parameters
    ----------
    temporary:
        The file: durable, and proven to hold what it is to stand for.
    name:
        Its name from now on.
    replaced:
        The names of the files that it was proven against.
    epoch:
        The epoch that this process writes.

    Raises
    ------
    WriterFencedError
        A newer writer has taken over.
    """
    _check_owner(scan.store, scan.directory, epoch)
    scan.store.rename(temporary, scan.directory / name)
    scan.store.sync_directory(scan.directory)
    (standing,) = log_files([name])
    _remove(scan, standing, replaced, epoch)


def clear_leavings(store: Store, directory: Path, epoch: int) -> None:
    """Remove what earlier compactions left half-built or half-removed.

    Raises
    ------
    WriterFencedError
        A newer writer than that of ``epoch`` has taken over: it may be building something itself.
    """
    _check_owner(store, directory, epoch)
    trash = directory / TRASH_NAME
    for name in store.names(directory):
        if name.startswith(TEMPORARY_PREFIX):
            store.make_directory(trash)
            store.rename(directory / name, trash / name)
    if store.names(trash):
        store.sync_directory(directory)
        store.remove_tree(trash)


def clear_replaced(scan: LogScan, epoch: int) -> None:
    """Remove what a compaction that was killed has replaced, and not removed any more.

    What is not in the log after all is kept aside: only a writer that was taken over long ago can have written it.
    """
    if not scan.replaced:
        return
    held = {path.name for path in scan.replaced if _is_held(scan, path)}
    current, _ = current_files(log_files(scan.store.names(scan.directory)))
    for standing in current:
        if standing.kind != "segment":
            _remove(scan, standing, held, epoch)


def same_events(one: pa.Table, other: pa.Table) -> bool:
    """Whether two tables have the same events in the same order, to the last byte."""
    return one.column_names == other.column_names and all(
        _plain(one.column(name)).equals(_plain(other.column(name))) for name in one.column_names
    )


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    # Dictionaries may list the same names in another order.
    return column.cast(pa.utf8()) if pa.types.is_dictionary(column.type) else column


def _check_owner(store: Store, directory: Path, epoch: int) -> None:
    """A writer that was stopped, and taken over meanwhile, must not replace what the newer one has replaced already."""
    newest = log_files(store.names(directory))[-1]
    if newest.last[0] > epoch:
        raise WriterFencedError(
            f"epoch {epoch} of the log in {directory} was taken over: {newest.name} exists. Another process writes "
            "this run now; this one must stop."
        )


def _remove(scan: LogScan, standing: LogFile, replaced: set[str], epoch: int) -> None:
    """Remove the files that ``standing`` stands for: ``replaced`` for good, others are kept aside.

    The directory is listed before each step: a writer that was taken over may still be adding a segment, which must not
    outlive the one that fences it.
    """
    store, directory = scan.store, scan.directory
    trash, quarantine = directory / TRASH_NAME, directory / QUARANTINE_NAME
    store.make_directory(trash)
    while files := [f for f in log_files(store.names(directory)) if standing.stands_for(f)]:
        _check_owner(store, directory, epoch)
        oldest = directory / files[0].name
        if oldest.name in replaced or not bytes(store.read(oldest)).strip(b"\0"):
            store.rename(oldest, trash / oldest.name)
        else:
            store.make_directory(quarantine)
            store.rename(oldest, quarantine / numbered_name(oldest.name, store.names(quarantine)))
            store.sync_directory(quarantine)
    store.sync_directory(directory)
    store.remove_tree(trash)


def _is_held(scan: LogScan, path: Path) -> bool:
    """Whether everything in a replaced file is in the log, or was dropped from it."""
    data = scan.store.read(path)
    found = scan_segment(data)
    dropped_seq = scan.first_seq - 1
    if found.info is None or found.end not in (SegmentEnd.CLOSED, SegmentEnd.LIVE):
        # A base verifies as no segment. An older one is in the newer one.
        return path.name.startswith("base-")
    if found.frames[-1].last_seq <= dropped_seq:
        return True
    expected = pa.Table.from_batches(read_batches(data, found), schema=pa.ipc.read_schema(pa.py_buffer(data)))
    batches = scan.batches(found.info.first_seq - 1, through_seq=found.frames[-1].last_seq)
    held = pa.Table.from_batches(batches, schema=expected.schema)
    return same_events(held, expected)
