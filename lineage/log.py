"""A log is a directory of segments: scanned and verified as a whole, created, and opened for writing.

Opening for writing takes an advisory lock and the next epoch. The epoch is claimed by creating its first segment
exclusively, before the end of the log is read: a writer that was taken over sees that file after each commit, before it
acknowledges anything, so what it acknowledged the new writer has read.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kinlog.lineage.late_names import scan_whole_log
from kinlog.lineage.names import QUARANTINE_NAME, log_files, numbered_name
from kinlog.lineage.replacement import clear_replaced
from kinlog.lineage.scan import LogScan, never_begun, scan_log
from kinlog.lineage.segment import SegmentEnd, segment_name
from kinlog.lineage.store import FileLock, LocalStore, Store, write_durably
from kinlog.lineage.writer import LogWriter, WriterStart
from kinlog.schemas.errors import (
    KinlogError,
    LogWriteError,
    RunExistsError,
    RunLockedError,
)
from kinlog.schemas.events import Position, TailTruncated
from kinlog.schemas.settings import LogSettings

__all__ = ["LOCK_NAME", "QUARANTINE_NAME", "OpenedLog", "create_log", "lock_log", "open_log"]

LOCK_NAME = "writer.lock"


class OpenedLog(NamedTuple):
    """A log that this process may write: what it held, and the writer that goes on after it."""

    scan: LogScan
    writer: LogWriter
    lock: FileLock
    repaired: tuple[TailTruncated, ...]
    """For the caller to append: what was cut off, and where it was kept."""

    def close(self) -> Position:
        """Close the writer and release the lock."""
        try:
            return self.writer.close()
        finally:
            self.lock.release()


def create_log(
    directory: Path,
    *,
    log_id: str,
    run_id: str,
    writer_version: str,
    settings: LogSettings,
    store: Store | None = None,
) -> OpenedLog:
    """Create an empty log, and open it for writing.

    Raises
    ------
    RunExistsError
        The directory already holds a log.
    RunLockedError
        Another process is creating or writing it.
    LogWriteError
        The disk is full or fails.
    """
    store = store or LocalStore()
    store.make_directory(directory)
    lock = _take_lock(store, directory)
    try:
        with _disk_errors_explained(directory):
            paths = [directory / file.name for file in log_files(store.names(directory))]
            if not never_begun(store, paths):
                raise RunExistsError(
                    f"{directory} already holds a log: resume it, or choose another directory"
                )
            epoch = _claim_epoch(store, directory)
            store.sync_directory(directory.parent)
            start = WriterStart(directory, log_id, run_id, writer_version, Position(epoch, 0, 0))
            writer = LogWriter(store, start, settings)
    except BaseException:
        lock.release()
        raise
    return OpenedLog(
        LogScan(directory, store, [], Position(0, 0, 0), log_id, run_id, [], []), writer, lock, ()
    )


def open_log(
    directory: Path,
    *,
    writer_version: str,
    settings: LogSettings,
    marks: Sequence[Position] = (),
    lock: FileLock | None = None,
    take_over: bool = False,
    scan: LogScan | None = None,
    store: Store | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> OpenedLog:
    """Open an existing log for writing, in a new epoch, after repairing a torn tail.

    Parameters
    ----------
    marks:
        As for :func:`scan_log`.
    lock:
        What :func:`lock_log` returned, when the caller took the lock earlier; it is released if opening fails.
    take_over:
        Do not respect the lock: for a writer that is known to be dead or paused on another machine. It is fenced.
    scan:
        What :func:`scan_log` returned to this process: what was closed then is not read again.
    sleep:
        Waits for a file system that shows names late.

    Raises
    ------
    RunNotFoundError, LogDamagedError, LogUnsupportedError
        As for :func:`scan_log`; nothing was changed.
    RunLockedError
        Another process is writing the log.
    LogWriteError
        The disk is full or fails, or does not show what is on it.
    """
    store = store or LocalStore()
    try:
        with _disk_errors_explained(directory):
            if scan is None:
                scan = scan_log(directory, store=store, marks=marks)  # refuse before anything is changed
            lock = lock or _take_lock(store, directory, take_over=take_over)
            epoch = _claim_epoch(store, directory)
            # Read again, now that older writers are fenced: what they acknowledged meanwhile counts.
            scan = scan_whole_log(directory, store=store, marks=marks, known=scan, sleep=sleep)
            repaired = _repair(store, scan)
            _settle(store, scan)
            clear_replaced(scan, epoch)
            after = Position(epoch, scan.end.seq, scan.end.checksum)
            start = WriterStart(directory, scan.log_id, scan.run_id, writer_version, after)
            writer = LogWriter(store, start, settings)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return OpenedLog(scan, writer, lock, repaired)


def lock_log(directory: Path, *, store: Store | None = None) -> FileLock:
    """Take a log's writer lock without opening the log, to look before anything is changed.

    Raises
    ------
    RunLockedError
        Another process is writing the log.
    """
    return _take_lock(store or LocalStore(), directory)


def _take_lock(store: Store, directory: Path, *, take_over: bool = False) -> FileLock:
    path = directory / LOCK_NAME
    try:
        return store.seize_lock(path) if take_over else store.lock(path)
    except BlockingIOError as error:
        raise RunLockedError(
            f"another process is writing the log in {directory} (it holds {LOCK_NAME}). Stop it first."
        ) from error


def _claim_epoch(store: Store, directory: Path) -> int:
    epoch = max((file.last[0] for file in log_files(store.names(directory))), default=0) + 1
    try:
        store.create(directory / segment_name(epoch, 0)).close()
    except FileExistsError as error:
        raise RunLockedError(
            f"another process has taken epoch {epoch} of the log in {directory}, and the directory was listed without it: "
            "it has done so just now, or the file system shows names late. Stop it first, or try again."
        ) from error
    store.sync_directory(directory)
    return epoch


@contextmanager
def _disk_errors_explained(directory: Path) -> Iterator[None]:
    try:
        yield
    except KinlogError:
        raise
    except OSError as error:
        raise LogWriteError(
            f"the log in {directory} cannot be opened for writing: {error}. Nothing recorded is lost. "
            "Free or repair the disk, then try again."
        ) from error


def _repair(store: Store, scan: LogScan) -> tuple[TailTruncated, ...]:
    """Copy what is no part of the log aside, and cut it off."""
    repaired = []
    for stray in scan.torn + scan.fenced:
        content = bytes(store.read(stray.path)[stray.offset_bytes :]).rstrip(b"\0")
        if content:
            quarantine = scan.directory / QUARANTINE_NAME
            store.make_directory(quarantine)
            stem = f"{stray.path.name}.{stray.offset_bytes}"
            kept = quarantine / numbered_name(stem, store.names(quarantine))
            write_durably(store, kept, content)
            store.sync_directory(quarantine)
            store.sync_directory(scan.directory)
            repaired.append(
                TailTruncated(
                    segment=stray.path.name,
                    offset_bytes=stray.offset_bytes,
                    quarantined_bytes=len(content),
                    quarantined_to=f"{QUARANTINE_NAME}/{kept.name}",
                )
            )
        file = store.open(stray.path)
        try:
            file.truncate(stray.offset_bytes)
            file.sync()
        finally:
            file.close()
    return tuple(repaired)


def _settle(store: Store, scan: LogScan) -> None:
    """Make durable what the last writer wrote and never synced: what comes next builds on it.

    It may have been read from memory only. The frames are written again before they are synced: after a sync that failed
    their pages count as clean, and another sync would pass over them.
    """
    if not scan.segments or scan.segments[-1].scan.end is SegmentEnd.CLOSED:
        return
    path, frames = scan.segments[-1].path, scan.segments[-1].scan.frames
    if len(frames) == 1:
        start = 0  # not even the opening frame was certainly synced
    else:
        start = next(frame.offset for frame in frames if frame.last_seq > frames[-1].durable_seq)
    file = store.open(path)
    try:
        file.write_at(start, store.read(path)[start : frames[-1].end])
        file.sync()
    finally:
        file.close()
