"""Segments: Arrow IPC streams of frames, built and scanned.

A segment is ``prefix, opening frame, frame, frame, ...``: the prefix is the Arrow schema and its dictionaries; the
opening frame has no events, and its checksum covers the prefix. A live segment ends in preallocated zeros, a closed one
in Arrow's end-of-stream mark; an Arrow reader takes both as the end.
"""

from enum import Enum
from typing import NamedTuple
from zlib import crc32

import msgspec
import pyarrow as pa

from kinlog.lineage.frame import PLACEHOLDER, FrameHeader, find_header, verify_frame
from kinlog.schemas.errors import LogUnsupportedError
from kinlog.schemas.events import Position

__all__ = [
    "COMPACTED_FEATURE",
    "JOURNAL_FEATURE",
    "END_OF_STREAM",
    "FORMAT_VERSION",
    "Replaced",
    "SegmentInfo",
    "SegmentEnd",
    "SegmentScan",
    "scan_opening",
    "scan_segment",
    "segment_name",
    "parse_segment_name",
]

FORMAT_VERSION = 1
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"

#: The segment stands for others, and its frames' bodies are compressed.
COMPACTED_FEATURE = "compacted"

#: The segment is one of the row journal: its rows are token rows, not events.
JOURNAL_FEATURE = "row_journal"

#: Features that a reader must know to read a segment, beyond the format version.
_KNOWN_FEATURES = frozenset({COMPACTED_FEATURE, JOURNAL_FEATURE})


class Replaced(msgspec.Struct, frozen=True, kw_only=True):
    """What a compacted segment stands for: all segments from its own epoch and index up to these."""

    last_epoch: int
    last_index: int
    end: Position
    """The last frame that was replaced: what follows chains to it, not to the compacted segment's own frames."""


class SegmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a segment says of itself, in its Arrow schema's metadata."""

    log_id: str
    run_id: str
    epoch: int
    index: int
    """Position among the segments of its epoch, from 0."""
    first_seq: int
    previous: int
    """Checksum of the last frame before this segment; 0 for the first."""
    writer_version: str
    format_version: int = FORMAT_VERSION
    required_features: tuple[str, ...] = ()
    replaces: Replaced | msgspec.UnsetType = msgspec.UNSET
    """Only in a compacted segment. Its epoch and index are then those of the first segment replaced."""


class SegmentEnd(Enum):
    """How a segment's valid frames end."""

    CLOSED = "closed"
    LIVE = "live"
    TORN = "torn"
    """Bytes that are no valid frame, and nothing after them that was durable: what a crash may leave."""
    DAMAGED = "damaged"
    """Something durable lies at or after the first byte that does not verify."""


class SegmentScan(NamedTuple):
    """The verified frames of a segment, and how they end."""

    info: SegmentInfo | None
    """``None`` when not even the opening frame verifies."""
    frames: list[FrameHeader]
    """All verified frames, the opening one first."""
    end_offset: int
    """Where the verified frames end."""
    end: SegmentEnd
    expected: str
    """At ``end_offset``, when torn or damaged."""
    found: str


def segment_name(epoch: int, index: int) -> str:
    """Return a segment's file name: sorting by it sorts by epoch and index."""
    return f"segment-{epoch:08d}-{index:08d}.arrows"


def parse_segment_name(name: str) -> tuple[int, int] | None:
    """Return (epoch, index) of a segment's file name, ``None`` for any other file."""
    parts = name.removesuffix(".arrows").split("-")
    if not name.endswith(".arrows") or len(parts) != 3 or parts[0] != "segment":
        return None
    if not all(part.isascii() and part.isdigit() and len(part) == 8 for part in parts[1:]):
        return None
    return int(parts[1]), int(parts[2])


def scan_segment(data: memoryview) -> SegmentScan:
    """Verify a segment from its first byte, and say where and how its valid frames end.

    Frames are compared with the chain inside the segment; what came before the segment is for the caller to compare.

    Raises
    ------
    LogUnsupportedError
        The segment is intact and was written by a newer format.
    """
    opening = scan_opening(data)
    if opening is None:
        damaged = _durable_after(data, 0, 0) or _was_closed(data)
        return SegmentScan(
            None,
            [],
            0,
            SegmentEnd.DAMAGED if damaged else SegmentEnd.TORN,
            "an opening frame whose checksum verifies",
            "none" if len(data) else "an empty file",
        )
    info, header = opening
    frames = [header]
    offset, next_seq, checksum = header.end, header.first_seq, header.checksum
    while True:
        end = _end_at(data, offset)
        if end is not None:
            return SegmentScan(info, frames, offset, end, "", "")
        candidate = verify_frame(data, offset)
        expected = f"a frame with first seq {next_seq} after checksum {checksum:08x}"
        if candidate is None:
            damaged = _durable_after(data, offset, next_seq) or _was_closed(data)
            found = "bytes that do not verify" + (", and proof that they had been durable" if damaged else "")
            end = SegmentEnd.DAMAGED if damaged else SegmentEnd.TORN
            return SegmentScan(info, frames, offset, end, expected, found)
        if (candidate.first_seq, candidate.previous, candidate.epoch) != (next_seq, checksum, info.epoch):
            found = f"an intact frame with first seq {candidate.first_seq} after {candidate.previous:08x}"
            return SegmentScan(info, frames, offset, SegmentEnd.DAMAGED, expected, found)
        frames.append(candidate)
        offset, next_seq, checksum = candidate.end, candidate.last_seq + 1, candidate.checksum


def scan_opening(data: memoryview) -> tuple[SegmentInfo, FrameHeader] | None:
    """Verify a segment's beginning: return what it says of itself and its opening frame, ``None`` if it has none.

    Raises
    ------
    LogUnsupportedError
        It is intact and was written by a newer format.
    """
    found = find_header(data, 0, 1 << 20)
    if found is None or found[1].offset > len(data):
        return None
    offset = found[1].offset
    header = verify_frame(data, offset, seed=crc32(data[:offset]))
    if header is None or header.num_events != 0:
        return None
    schema = pa.ipc.read_schema(pa.py_buffer(data[:offset]))
    info = msgspec.json.decode(schema.metadata[b"kinlog.segment"], type=SegmentInfo)
    unknown = set(info.required_features) - _KNOWN_FEATURES
    if info.format_version > FORMAT_VERSION or unknown:
        raise LogUnsupportedError(
            f"{segment_name(info.epoch, info.index)} has format version {info.format_version} and needs "
            f"{sorted(unknown) or 'no features'}; this kinlog reads up to version {FORMAT_VERSION}. It was written by "
            f"kinlog {info.writer_version}: upgrade to read it."
        )
    return info, header


def _end_at(data: memoryview, offset: int) -> SegmentEnd | None:
    rest = data[offset:]
    if bytes(rest[: len(END_OF_STREAM)]) == END_OF_STREAM and _is_zero(rest[len(END_OF_STREAM) :]):
        return SegmentEnd.CLOSED
    return SegmentEnd.LIVE if _is_zero(rest) else None


def _was_closed(data: memoryview) -> bool:
    """Whether the segment was ended in order: the mark is written once everything before it is durable."""
    return bytes(data[-len(END_OF_STREAM) :]) == END_OF_STREAM


def _is_zero(data: memoryview) -> bool:
    # Most ends that are no end show it in the first bytes: look there before counting everything.
    return not any(data[:64]) and bytes(data).count(0) == len(data)


def _durable_after(data: memoryview, offset: int, next_seq: int) -> bool:
    """Whether an intact frame after ``offset`` proves that the events from ``next_seq`` on had been durable.

    Without the proof, an intact frame after a broken one is what a power failure may leave of writes that had not been
    synced: none of them was acknowledged as durable.
    """
    at = offset
    while (found := find_header(data, at)) is not None:
        position, header = found
        intact = verify_frame(data, header.offset) if offset <= header.offset <= position else None
        if intact is not None and intact.durable_seq >= next_seq:
            return True
        at = position + len(PLACEHOLDER)
    return False
