"""Verifying a log: its files are scanned, chained to one history, and compared with what was promised."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import pyarrow as pa

from kinlog.lineage.base import Base, read_base
from kinlog.lineage.chain import ScannedFile, ScannedSegment, StrayBytes, chain_segments, damage_in
from kinlog.lineage.compacted import glance_at_compacted
from kinlog.lineage.names import LogFile, current_files, log_files
from kinlog.lineage.reading import Choice, ignorable_kinds, read_batches, read_events, read_range
from kinlog.lineage.segment import SegmentEnd, SegmentScan, scan_segment, segment_name
from kinlog.lineage.state import Projection
from kinlog.lineage.store import LocalStore, Store
from kinlog.schemas.errors import LogDamagedError, RunNotFoundError
from kinlog.schemas.events import Position, RecordedEvent

__all__ = [
    "LogScan",
    "ScannedSegment",
    "StrayBytes",
    "check_marks",
    "holds_mark",
    "never_begun",
    "scan_log",
]

#: A run that is being written replaces files by compacted ones: how often that may happen while one log is read.
_MAX_ATTEMPTS = 10

#: A segment's opening frame is smaller than this, and its space, written with zeros beforehand, is much larger.
_UNBEGUN_ZEROS_BYTES = 32 * 1024


class LogScan(NamedTuple):
    """A log whose frames were verified. Reading it verifies again: one segment is in memory at a time."""

    directory: Path
    store: Store
    segments: list[ScannedSegment]
    end: Position
    """The last event; seq 0 when there is none."""
    log_id: str
    run_id: str
    torn: list[StrayBytes]
    fenced: list[StrayBytes]
    base: Base | None = None
    """What stands for the events that were dropped; ``None`` when the log has all of them."""
    replaced: tuple[Path, ...] = ()
    """Files that a compacted segment or a base stands for, left behind by a crash."""

    @property
    def first_seq(self) -> int:
        """The first event that the log still has, or will have."""
        return self.base.position.seq + 1 if self.base is not None else 1

    def beginning(self) -> Projection:
        """Return the projection that its events begin at: an empty one, or what stands for dropped history."""
        return self.base.decode() if self.base is not None else Projection()

    def batches(
        self,
        after_seq: int = 0,
        *,
        through_seq: int | None = None,
        newest_first: bool = False,
        choice: Choice | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the verified events past ``after_seq``, and up to ``through_seq`` if given, as record batches.

        Inside of a batch the oldest event is the first, also where the newest batch is.

        Parameters
        ----------
        choice:
            Which of these events are wanted: of all others only the columns that it looks at are decoded. Every byte is
            verified all the same.

        Raises
        ------
        LogDamagedError
            A compacted segment is not what was written, or a segment changed.
        RunNotFoundError
            The events were dropped while they were read.
        """
        scan, after = self, after_seq
        through = self.end.seq if through_seq is None else min(through_seq, self.end.seq)
        for _ in range(_MAX_ATTEMPTS):
            try:
                for segment in reversed(scan.segments) if newest_first else scan.segments:
                    if segment.end.seq <= after or segment.info.first_seq > through or through <= after:
                        continue
                    data, verified = scan._verified(segment)
                    last = min(through, segment.end.seq)
                    yield from read_range(
                        data, verified, after, last, newest_first=newest_first, choice=choice
                    )
                    if newest_first:
                        through = segment.info.first_seq - 1
                    else:
                        after = last
            except FileNotFoundError:
                # The run goes on, and has compacted what was to be read. The events are the same.
                scan = scan_log(self.directory, store=self.store)
                if scan.first_seq > max(after + 1, self.first_seq):
                    break
            else:
                return
        raise RunNotFoundError(
            f"{self.directory}: events after seq {after} were dropped or moved while they were read. Read it again."
        )

    def read_segment(self, segment: ScannedSegment) -> Iterator[pa.RecordBatch]:
        """Verify a segment, and return the record batches of its events.

        Raises
        ------
        LogDamagedError
            It is compacted and not what was written, or it changed.
        """
        data, scan = self._verified(segment)
        return read_batches(data, scan, segment.end.seq)

    def _verified(self, segment: ScannedSegment) -> tuple[memoryview, SegmentScan]:
        data = self.store.read(segment.path)
        scan = segment.scan
        if segment.compacted:
            scan = scan_segment(data)
            last_seq = scan.frames[-1].last_seq if scan.frames else segment.info.first_seq - 1
            whole = scan.end is SegmentEnd.CLOSED and scan.info == segment.info
            if not whole or last_seq != segment.end.seq:
                raise LogDamagedError(
                    "damaged compacted segment",
                    segment=segment.path.name,
                    offset_bytes=scan.end_offset,
                    seq=last_seq,
                    expected=scan.expected or f"events up to seq {segment.end.seq}, and nothing after them",
                    found=scan.found or f"events up to seq {last_seq}, {scan.end.value}",
                )
        elif crc32(data[: segment.frames[-1].end]) != segment.checksum:
            raise damage_in("segment changed while it was read", segment.path, scan_segment(data), self.end)
        return data, scan

    def events(self, after_seq: int = 0, *, through_seq: int | None = None) -> Iterator[RecordedEvent]:
        """Yield the events past ``after_seq``, in order, as far as the log still has them.

        Raises
        ------
        LogUnsupportedError
            An event was written by a newer kinlog.
        """
        for batch in self.batches(after_seq, through_seq=through_seq):
            yield from read_events(batch, ignorable_kinds(batch.schema))


def scan_log(
    directory: Path,
    *,
    store: Store | None = None,
    marks: Sequence[Position] = (),
    known: LogScan | None = None,
) -> LogScan:
    """Verify a log, changing nothing.

    Of compacted segments, only the beginning and the end: the rest is verified when it is read.

    Parameters
    ----------
    directory:
        The log's directory.
    marks:
        Places that are known to have been durable, such as a checkpoint's: the log may not be shorter, nor differ there.
    known:
        An earlier scan by this process: what was closed or compacted then is not read again.

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
    for _ in range(_MAX_ATTEMPTS):
        files = log_files(store.names(directory))
        if not files:
            raise RunNotFoundError(f"{directory} holds no log: expected files named {segment_name(1, 0)}")
        current, replaced = current_files(files)
        try:
            base = next((read_base(store, directory / f.name) for f in current if f.kind == "base"), None)
            scanned = _scan_files(directory, store, current, known)
        except FileNotFoundError:
            continue  # compacted by a run that goes on
        break
    else:
        raise RunNotFoundError(f"{directory}: its files change faster than they can be read. Try again.")
    if (
        base is None
        and all(s.scan.info is None for s in scanned)
        and never_begun(store, [s.path for s in scanned])
    ):
        raise RunNotFoundError(
            f"{directory} holds no log: its creation was interrupted before anything was written. Start the run again."
        )
    chain = chain_segments(store, scanned, base)
    result = LogScan(directory, store, *chain, base, tuple(directory / file.name for file in replaced))
    check_marks(result, marks)
    return result


def never_begun(store: Store, paths: Sequence[Path]) -> bool:
    """Whether every segment is as a creation leaves it that ended before its first frame was durable."""
    return all(_unbegun(store.read(path)) for path in paths)


def _unbegun(data: memoryview) -> bool:
    """Whether a segment is empty, or zeros, or a torn opening frame in the zeros that had been made durable before it."""
    written = len(bytes(data).rstrip(b"\0"))
    if written == 0:
        return True
    torn = len(data) - written >= _UNBEGUN_ZEROS_BYTES >= written
    scan = scan_segment(data)
    return torn and scan.info is None and scan.end is SegmentEnd.TORN


def _scan_files(
    directory: Path, store: Store, files: Sequence[LogFile], known: LogScan | None
) -> list[ScannedFile]:
    closed = {
        s.path: s for s in (known.segments if known is not None else ()) if s.scan.end is SegmentEnd.CLOSED
    }
    scanned = []
    for file in files:
        path = directory / file.name
        before = closed.get(path)
        if file.kind == "base":
            continue
        if before is not None and before.end.seq == before.scan.frames[-1].last_seq:
            scanned.append(ScannedFile(path, file, 0, before.scan, before.checksum))
        elif file.kind == "compacted":
            scanned.append(ScannedFile(path, file, 0, glance_at_compacted(store, path), 0))
        else:
            data = store.read(path)
            scan = scan_segment(data)
            checksum = crc32(data[: scan.end_offset])
            scanned.append(ScannedFile(path, file, len(data), scan, checksum))
    return scanned


def check_marks(scan: LogScan, marks: Iterable[Position]) -> None:
    """Compare a log with places that are known to have been durable.

    A place inside of compacted or dropped history cannot be compared: only its ends are still known.

    Raises
    ------
    LogDamagedError
        The log is shorter than one of them, or differs there.
    """
    for mark in marks:
        if holds_mark(scan, mark) is False:
            last = scan.segments[-1]
            raise LogDamagedError(
                "the log does not hold what a checkpoint or a clean close promised",
                segment=last.path.name,
                offset_bytes=last.scan.end_offset,
                seq=scan.end.seq,
                expected=f"a frame that ends at seq {mark.seq} with checksum {mark.checksum:08x}",
                found=f"a log that ends at seq {scan.end.seq} with checksum {scan.end.checksum:08x}",
            )


def holds_mark(scan: LogScan, mark: Position) -> bool | None:
    """Whether the log has a frame that ends at the mark, with its checksum; ``None`` when that is not known any more."""
    if mark.seq == 0:
        return True
    if scan.base is not None and mark.seq <= scan.base.position.seq:
        return True if mark == scan.base.position else None
    for segment in scan.segments:
        if any((frame.last_seq, frame.checksum) == (mark.seq, mark.checksum) for frame in segment.frames):
            return True
        # Segments without events may have been compacted into it, and each of them ended at the same seq.
        if segment.compacted and segment.info.first_seq <= mark.seq <= segment.end.seq:
            return True if mark == segment.end else None
    return False
