"""Verifying a log: its segments are scanned, chained to one history, and compared with what was promised."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from kinlog.lineage.reading import ignorable_kinds, read_batches, read_events
from kinlog.lineage.segment import (
    SegmentEnd,
    SegmentInfo,
    SegmentScan,
    parse_segment_name,
    scan_segment,
    segment_name,
)
from kinlog.lineage.store import LocalStore, Store
from kinlog.schemas.errors import LogDamagedError, RunNotFoundError
from kinlog.schemas.events import Position, RecordedEvent

__all__ = ["LogScan", "ScannedSegment", "StrayBytes", "check_marks", "never_begun", "scan_log"]


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
    if all(s.scan.info is None for s in scanned) and never_begun(store, paths):
        raise RunNotFoundError(
            f"{directory} holds no log: its creation was interrupted before anything was written. Start the run again."
        )
    result = _link(directory, store, scanned)
    check_marks(result, marks)
    return result


def never_begun(store: Store, paths: Sequence[Path]) -> bool:
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
