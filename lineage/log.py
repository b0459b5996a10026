"""A log is a directory of segments: scanned and verified as a whole, created, and opened for writing.

Opening for writing takes an advisory lock and the next epoch. The epoch is claimed by creating its first segment
exclusively, before the end of the log is read: a writer that was taken over sees that file after each commit, before it
acknowledges anything, so what it acknowledged the new writer has read.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kinlog.lineage.scan import LogScan, never_begun, scan_log
from kinlog.lineage.segment import (
    parse_segment_name,
    segment_name,
)
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
QUARANTINE_NAME = "quarantine"


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
            paths = [directory / name for name in store.names(directory) if parse_segment_name(name)]
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
    store: Store | None = None,
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

    Raises
    ------
    RunNotFoundError, LogDamagedError, LogUnsupportedError
        As for :func:`scan_log`; nothing was changed.
    RunLockedError
        Another process is writing the log.
    LogWriteError
        The disk is full or fails.
    """
    store = store or LocalStore()
    try:
        with _disk_errors_explained(directory):
            scan = scan_log(directory, store=store, marks=marks)  # refuse before anything is changed
            lock = lock or _take_lock(store, directory, take_over=take_over)
            epoch = _claim_epoch(store, directory)
            # Read again, now that older writers are fenced: what they acknowledged meanwhile counts.
            scan = scan_log(directory, store=store, marks=marks)
            repaired = _repair(store, scan)
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
    name = f"{LOCK_NAME}.{socket.gethostname()}.{os.getpid()}" if take_over else LOCK_NAME
    try:
        return store.lock(directory / name)
    except BlockingIOError as error:
        raise RunLockedError(
            f"another process is writing the log in {directory} (it holds {LOCK_NAME}). Stop it first."
        ) from error


def _claim_epoch(store: Store, directory: Path) -> int:
    epochs = [parsed[0] for name in store.names(directory) if (parsed := parse_segment_name(name))]
    epoch = max(epochs, default=0) + 1
    try:
        store.create(directory / segment_name(epoch, 0)).close()
    except FileExistsError as error:
        raise RunLockedError(
            f"another process has just taken epoch {epoch} of the log in {directory}. Stop it first."
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
            kept = quarantine / f"{stray.path.name}.{stray.offset_bytes}.{len(store.names(quarantine))}"
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
