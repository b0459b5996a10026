"""The segment that a writer appends to: its file, and the space ahead of its last frame."""

from collections.abc import Sequence
from pathlib import Path

from kinlog.lineage.encoder import FrameEncoder
from kinlog.lineage.frame import FrameHeader
from kinlog.lineage.segment import END_OF_STREAM, SegmentInfo
from kinlog.lineage.store import StoredFile
from kinlog.schemas.codec import EncodedEvent

__all__ = ["LiveSegment"]

#: A short log takes little space; a long one stops for preallocation rarely.
_MIN_PREALLOCATE_BYTES = 64 * 1024
_MAX_PREALLOCATE_BYTES = 1024 * 1024


class LiveSegment:
    """A segment that grows by frames. After an error of any of its methods it may not be used any more."""

    def __init__(self, file: StoredFile, path: Path, info: SegmentInfo, durable_seq: int) -> None:
        """Write and sync the opening frame into an empty file. The directory is left to the caller."""
        self.path = path
        self._file = file
        self._encoder = FrameEncoder(info)
        self._allocated = 0
        opening = self._encoder.opening(durable_seq)
        self._preallocate(len(opening))
        self._file.write_at(0, opening)
        self._file.sync()

    @property
    def size_bytes(self) -> int:
        """Bytes of its frames."""
        return self._encoder.offset

    @property
    def last_checksum(self) -> int:
        """Checksum of its last frame."""
        return self._encoder.last_checksum

    def write(
        self, events: Sequence[EncodedEvent], times_us: Sequence[int], first_seq: int, durable_seq: int
    ) -> FrameHeader:
        """Write a frame, not yet synced, and return its header."""
        offset = self._encoder.offset
        data, header = self._encoder.frame(events, times_us, first_seq, durable_seq)
        self._preallocate(header.end)
        self._file.write_at(offset, data)
        return header

    def sync(self) -> None:
        self._file.sync()

    def end(self) -> None:
        """Write the end of the stream after everything before it is durable, give back the space, and sync."""
        end = self._encoder.offset
        self._file.write_at(end, END_OF_STREAM)
        self._file.truncate(end + len(END_OF_STREAM))
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _preallocate(self, end: int) -> None:
        if end > self._allocated:
            # Written zeros, so that the sync of an append changes no file size and allocates no block.
            usual = min(max(self._allocated, _MIN_PREALLOCATE_BYTES), _MAX_PREALLOCATE_BYTES)
            size = -(-(end - self._allocated) // usual) * usual
            self._file.write_at(self._allocated, bytes(size))
            self._file.sync()
            self._allocated += size
