"""Following a log that is being written: only what is new is read, and verified before it is believed.

Of the newest segment the bytes past the last frame are read again and again. Whenever the files have changed (a segment
was ended, compacted or dropped, or another life began), and when these bytes are still no frame at the next look, the log is
scanned as every reader scans it: a scan tells damage from a frame that is half written.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import pyarrow as pa

from kinlog.lineage.frame import FrameHeader, verify_frame
from kinlog.lineage.names import log_files
from kinlog.lineage.reading import ignorable_kinds, read_events
from kinlog.lineage.scan import LogScan, holds_mark, scan_log
from kinlog.lineage.segment import END_OF_STREAM, SegmentEnd
from kinlog.lineage.store import LocalStore, Store
from kinlog.schemas.errors import LogDamagedError
from kinlog.schemas.events import Position, RecordedEvent

__all__ = ["FollowedLog", "Tail"]

#: Read at once; what a refresh finds is mostly less.
_PART_BYTES = 1024 * 1024


class Tail(NamedTuple):
    """How the log ends, as far as it can be known from outside."""

    last: Position
    """The last event that was read."""
    durable_seq: int
    """The highest seq that the log itself says was durable: frames carry such marks. What is past it was appended, and
    may be lost to a power failure; it is not lost to a kill."""
    closed: bool
    """The newest segment was ended in order: everything in it is durable."""

    @property
    def unproven_events(self) -> int:
        """Events that were appended and that no mark says are durable."""
        return max(0, self.last.seq - self.durable_seq)


class _NoFrame(NamedTuple):
    """Bytes past the last frame that are not all of one."""

    offset_bytes: int
    checksum: int


class FollowedLog:
    """A log, read up to a place. ``scan`` is of the time when its files last changed.

    Raises
    ------
    RunNotFoundError, LogDamagedError, LogUnsupportedError
        As :func:`kinlog.lineage.scan.scan_log`.
    """

    def __init__(self, directory: Path, store: Store | None = None) -> None:
        self._directory = directory
        self._store = store or LocalStore()
        self._files: list[str] = []
        self._path: Path | None = None
        self._no_frame: _NoFrame | None = None
        """At the last look, if it was so."""
        self._scanned_with: _NoFrame | None = None
        """What a scan was made for: one for each is enough."""
        self.scan = self._scan(None)

    def events(self) -> Iterator[RecordedEvent] | None:
        """Return what was recorded since the last call, in order; at first, since the log was opened.

        ``None``: what was read before is no part of the log's history any more, since an older controller wrote it past
        a take-over, or that cannot be told. Begin again, with another object.
        """
        batches = self.batches()
        if batches is None:
            return None
        return (record for batch in batches for record in read_events(batch, ignorable_kinds(batch.schema)))

    def batches(self) -> Iterator[pa.RecordBatch] | None:
        """Return the same as record batches."""
        if self._path is not None and self._names() == self._files:
            before_look = self._no_frame
            batches = self._appended()
            if batches or not self._stays(before_look):
                return iter(batches)
            self._scanned_with = self._no_frame
        before = self.tail.last
        self.scan = self._scan(self.scan)
        if holds_mark(self.scan, before) is not True:
            return None
        return self.scan.batches(before.seq)

    def _stays(self, before: _NoFrame | None) -> bool:
        """Whether there was no frame at the last look either, and no scan has looked at just this."""
        now = self._no_frame
        if now is None or before is None or now == self._scanned_with:
            return False
        return now.offset_bytes == before.offset_bytes

    def _names(self) -> list[str]:
        return [file.name for file in log_files(self._store.names(self._directory))]

    def _scan(self, known: LogScan | None) -> LogScan:
        while True:
            files = self._names()
            scan = self._scanned(known)
            try:
                self._follow(scan, files)
            except FileNotFoundError:
                known = scan  # compacted this very moment
                continue
            self._files = files
            return scan

    def _scanned(self, known: LogScan | None) -> LogScan:
        try:
            return scan_log(self._directory, store=self._store, known=known)
        except LogDamagedError:
            # A newer life cuts off a torn tail while it is read. Damage is there to stay.
            return scan_log(self._directory, store=self._store, known=known)

    def _follow(self, scan: LogScan, files: list[str]) -> None:
        """Follow the newest segment from where the scan ended, if it is the newest file: another one is about to begin."""
        newest = scan.segments[-1] if scan.segments else None
        self._path, closed, durable_seq = None, True, scan.end.seq
        if newest is not None and not newest.compacted:
            closed = newest.scan.end is SegmentEnd.CLOSED
            self._frame = newest.frames[-1]
            durable_seq = scan.end.seq if closed else self._frame.durable_seq
            # The schema and the dictionaries, which every frame is decoded by.
            self._opening = bytes(self._store.read_part(newest.path, 0, newest.frames[0].end))
            if files and newest.path.name == files[-1]:
                self._path = newest.path
        self.tail = Tail(scan.end, durable_seq, closed)

    def _appended(self) -> list[pa.RecordBatch]:
        """Read the frames that were appended to the newest segment. One that is half written is not there yet."""
        batches: list[pa.RecordBatch] = []
        while (frames := self._next_frames()) is not None:
            headers, content = frames
            self._frame = headers[-1]
            last = Position(self._frame.epoch, self._frame.last_seq, self._frame.checksum)
            self.tail = Tail(last, self._frame.durable_seq, closed=False)
            batches += self._decoded(content)
        return batches

    def _next_frames(self) -> tuple[list[FrameHeader], bytes] | None:
        assert self._path is not None
        origin, size_bytes = self._frame.end, _PART_BYTES
        self._no_frame = None
        while True:
            try:
                data = self._store.read_part(self._path, origin, size_bytes)
            except FileNotFoundError:
                return None  # compacted this very moment: the next call sees that
            headers = self._verified(data, origin)
            if headers:
                return headers, bytes(data[: headers[-1].end - origin])
            if bytes(data[: len(END_OF_STREAM)]) == END_OF_STREAM:
                self.tail = Tail(self.tail.last, self.tail.last.seq, closed=True)
                return None
            if not any(data[:64]):
                return None
            if len(data) < size_bytes:
                self._no_frame = _NoFrame(origin, crc32(data))
                return None
            size_bytes *= 2  # a frame may be larger than a part

    def _verified(self, data: memoryview, origin: int) -> list[FrameHeader]:
        headers: list[FrameHeader] = []
        before, at = self._frame, 0
        while (header := verify_frame(data, at, origin=origin)) is not None:
            if (header.first_seq, header.previous, header.epoch) != (
                before.last_seq + 1,
                before.checksum,
                before.epoch,
            ):
                break
            headers.append(header)
            before, at = header, header.end - origin
        return headers

    def _decoded(self, content: bytes) -> list[pa.RecordBatch]:
        with pa.ipc.open_stream(pa.BufferReader(b"".join((self._opening, content)))) as reader:
            batches: list[pa.RecordBatch] = reader.read_all().combine_chunks().to_batches()
        return batches
