"""A log is a directory of segments: scanned and verified as a whole, created, and opened for writing.

Opening for writing takes an advisory lock and the next epoch. The epoch is claimed by creating its first segment
exclusively, before the end of the log is read: a writer that was taken over sees that file after each commit, before it
acknowledges anything, so what it acknowledged the new writer has read.
"""

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa

from kinlog.lineage.segment import (
    SegmentEnd,
    SegmentInfo,
    SegmentScan,
    parse_segment_name,
    read_batches,
    read_events,
    scan_segment,
    segment_name,
)
from kinlog.lineage.store import FileLock, LocalStore, Store, write_durably
from kinlog.lineage.writer import LogWriter, WriterStart
from kinlog.schemas.errors import (
    KinlogError,
    LogDamagedError,
    LogWriteError,
    RunExistsError,
    RunLockedError,
    RunNotFoundError,
)
from kinlog.schemas.events import Position, RecordedEvent, TailTruncated
from kinlog.schemas.settings import LogSettings

__all__ = [
    "LOCK_NAME",
    "QUARANTINE_NAME",
    "LogScan",
    "OpenedLog",
    "ScannedSegment",
    "StrayBytes",
    "check_marks",
    "create_log",
    "ignorable_kinds",
    "lock_log",
    "open_log",
    "scan_log",
]

LOCK_NAME = "writer.lock"
QUARANTINE_NAME = "quarantine"


class ScannedSegment(NamedTuple):
    """A segment that belongs to the log's surviving history."""

    path: Path
    scan: SegmentScan
    through_seq: int
    """The last seq of it that counts: a newer epoch may have begun before its end."""


class StrayBytes(NamedTuple):
    """Bytes that are no part of history: a torn tail, or what an older writer wrote past a take-over."""

    path: Path
    offset_bytes: int
    size_bytes: int


class LogScan(NamedTuple):
    """A log whose every frame was verified. Reading it verifies again: one segment is in memory at a time."""

    directory: Path
    store: Store
    segments: list[ScannedSegment]
    end: Position
    """The last event; seq 0 when there is none."""
    log_id: str
    run_id: str
    torn: list[StrayBytes]
    fenced: list[StrayBytes]

    def batches(self, after_seq: int = 0) -> Iterator[pa.RecordBatch]:
        """Yield the verified record batches that hold events past ``after_seq``, cut to them."""
        for segment in self.segments:
            if segment.through_seq <= after_seq:
                continue
            data = self.store.read(segment.path)
            scan = scan_segment(data)
            if scan.info != segment.scan.info or scan.frames[-1].last_seq < segment.through_seq:
                raise _damaged("segment changed while it was read", segment.path, scan, self.end)
            for batch in read_batches(data, scan, segment.through_seq):
                first, last = batch.column("seq")[0].as_py(), batch.column("seq")[-1].as_py()
                if last > after_seq:
                    yield batch.slice(max(0, after_seq + 1 - first))

    def events(self, after_seq: int = 0) -> Iterator[RecordedEvent]:
        """Yield the events past ``after_seq``, in order.

        Raises
        ------
        LogUnsupportedError
            An event was written by a newer kinlog.
        """
        for batch in self.batches(after_seq):
            yield from read_events(batch, ignorable_kinds(batch.schema))


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


def scan_log(directory: Path, *, store: Store | None = None, marks: Sequence[Position] = ()) -> LogScan:
    """Verify a log, changing nothing.

    Parameters
    ----------
    directory:
        The log's directory.
    marks:
        Places that are known to have been durable, such as a checkpoint's: the log may not be shorter, nor differ there.

    Raises
    ------
    RunNotFoundError
        There is no log.
    LogDamagedError
        Something is wrong that no crash explains. A torn tail is not: it is reported in the result.
    LogUnsupportedError
        A segment was written by a newer format.
    """
    store = store or LocalStore()
    paths = [directory / name for name in store.names(directory) if parse_segment_name(name)]
    if not paths:
        raise RunNotFoundError(f"{directory} holds no log: expected files named {segment_name(1, 0)}")
    scanned = []
    for path in paths:
        data = store.read(path)
        scanned.append(_Scanned(path, len(data), scan_segment(data)))
    if all(s.scan.info is None for s in scanned) and _never_begun(store, paths):
        raise RunNotFoundError(
            f"{directory} holds no log: its creation was interrupted before anything was written. Start the run again."
        )
    result = _link(directory, store, scanned)
    check_marks(result, marks)
    return result


def _never_begun(store: Store, paths: Sequence[Path]) -> bool:
    """Whether every segment is as a creation leaves it that was killed before its first write: empty, or zeros."""
    return all(not bytes(store.read(path)).strip(b"\0") for path in paths)


class _Scanned(NamedTuple):
    path: Path
    size_bytes: int
    scan: SegmentScan


def _link(directory: Path, store: Store, scanned: list[_Scanned]) -> LogScan:
    """Chain the segments to one history."""
    segments: list[ScannedSegment] = []
    torn: list[StrayBytes] = []
    fenced: list[StrayBytes] = []
    end = Position(0, 0, 0)
    first_info: SegmentInfo | None = None
    for place, (path, size_bytes, scan) in enumerate(scanned):
        info, later = scan.info, scanned[place + 1 :]
        if info is None:
            # An epoch that was claimed and never begun, or a segment that a crash left without a beginning. If it had
            # held events, the next segment would not fit the chain.
            if scan.end is SegmentEnd.DAMAGED:
                raise _damaged("damaged segment", path, scan, end)
            if size_bytes:
                torn.append(StrayBytes(path, 0, size_bytes))
            continue
        first_info = first_info or info
        _check_identity(path, info, first_info, end)
        newer = _next_begun_epoch(info.epoch, later)
        cut = newer.first_seq if newer is not None else None
        if newer is not None and (info.first_seq > newer.first_seq or _follows(newer, end)):
            fenced.append(StrayBytes(path, 0, size_bytes))
            continue
        if not _follows(info, end):
            raise LogDamagedError(
                "the chain of segments is broken",
                segment=path.name,
                offset_bytes=0,
                seq=end.seq,
                expected=f"first seq {end.seq + 1} after checksum {end.checksum:08x}",
                found=f"first seq {info.first_seq} after checksum {info.previous:08x}",
            )
        last = [frame for frame in scan.frames if cut is None or frame.last_seq < cut][-1]
        end = Position(info.epoch, last.last_seq, last.checksum)
        segments.append(ScannedSegment(path, scan, last.last_seq))
        whole = last.end == scan.end_offset
        if cut is not None and end.seq == cut - 1:
            if not whole or scan.end in (SegmentEnd.TORN, SegmentEnd.DAMAGED):
                fenced.append(StrayBytes(path, last.end, size_bytes - last.end))
        elif scan.end is SegmentEnd.DAMAGED or (scan.end is SegmentEnd.TORN and not _all_torn(later)):
            raise _damaged("damaged frame", path, scan, end)
        elif scan.end is SegmentEnd.TORN:
            torn.append(StrayBytes(path, scan.end_offset, size_bytes - scan.end_offset))
    if first_info is None:
        raise _damaged("no segment can be read", scanned[0].path, scanned[0].scan, end)
    return LogScan(directory, store, segments, end, first_info.log_id, first_info.run_id, torn, fenced)


def _next_begun_epoch(epoch: int, later: list[_Scanned]) -> SegmentInfo | None:
    """Return what the next epoch that began says of its first segment, ``None`` when there is none."""
    return next((s.scan.info for s in later if s.scan.info is not None and s.scan.info.epoch > epoch), None)


def _follows(info: SegmentInfo, end: Position) -> bool:
    return (info.first_seq, info.previous) == (end.seq + 1, end.checksum)


def _all_torn(scanned: list[_Scanned]) -> bool:
    return all(s.scan.info is None and s.scan.end is SegmentEnd.TORN for s in scanned)


def _check_identity(path: Path, info: SegmentInfo, first: SegmentInfo, end: Position) -> None:
    expected = f"log {first.log_id}, {path.name}"
    found = f"log {info.log_id}, {segment_name(info.epoch, info.index)}"
    if expected != found:
        raise LogDamagedError(
            "foreign or renamed segment",
            segment=path.name,
            offset_bytes=0,
            seq=end.seq,
            expected=expected,
            found=found,
        )


def check_marks(scan: LogScan, marks: Iterable[Position]) -> None:
    """Compare a log with places that are known to have been durable.

    Raises
    ------
    LogDamagedError
        The log is shorter than one of them, or differs there.
    """
    for mark in marks:
        if mark.seq == 0:
            continue
        frame = next(
            (
                (segment, frame)
                for segment in scan.segments
                for frame in segment.scan.frames
                if frame.last_seq == mark.seq
                and frame.checksum == mark.checksum
                and frame.last_seq <= segment.through_seq
            ),
            None,
        )
        if frame is None:
            last = scan.segments[-1]
            raise LogDamagedError(
                "the log does not hold what a checkpoint or a clean close promised",
                segment=last.path.name,
                offset_bytes=last.scan.end_offset,
                seq=scan.end.seq,
                expected=f"a frame that ends at seq {mark.seq} with checksum {mark.checksum:08x}",
                found=f"a log that ends at seq {scan.end.seq} with checksum {scan.end.checksum:08x}",
            )


def _damaged(what: str, path: Path, scan: SegmentScan, end: Position) -> LogDamagedError:
    return LogDamagedError(
        what,
        segment=path.name,
        offset_bytes=scan.end_offset,
        seq=end.seq,
        expected=scan.expected,
        found=scan.found,
    )


def ignorable_kinds(schema: pa.Schema) -> frozenset[str]:
    """Return the event kinds that a segment's writer lets older readers pass over."""
    return frozenset(msgspec.json.decode(schema.metadata[b"kinlog.ignorable_kinds"], type=list[str]))


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
            if not _never_begun(store, paths):
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
