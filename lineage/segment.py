"""Segments: Arrow IPC streams of frames, built and scanned.

A segment is ``prefix, opening frame, frame, frame, ...``: the prefix is the Arrow schema and its dictionaries; the
opening frame has no events, and its checksum covers the prefix. A live segment ends in preallocated zeros, a closed one
in Arrow's end-of-stream mark; an Arrow reader takes both as the end.
"""

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple
from zlib import crc32

import msgspec
import pyarrow as pa

from kinlog.lineage.frame import METADATA_KEY, PLACEHOLDER, FrameHeader, find_header, seal_frame, verify_frame
from kinlog.schemas.codec import EncodedEvent, decode_event, payload_fields
from kinlog.schemas.columns import KIND_NAMES, REASON_NAMES, log_schema
from kinlog.schemas.errors import LogUnsupportedError
from kinlog.schemas.events import EVENT_TYPES, PassedOver, RecordedEvent

__all__ = [
    "END_OF_STREAM",
    "FORMAT_VERSION",
    "SegmentInfo",
    "SegmentEnd",
    "SegmentScan",
    "FrameEncoder",
    "scan_segment",
    "segment_name",
    "parse_segment_name",
    "read_batches",
    "read_events",
]

FORMAT_VERSION = 1
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"

#: Features that a reader must know to read a segment. None yet beyond the format version.
_KNOWN_FEATURES: frozenset[str] = frozenset()

_KIND_CODE = {name: code for code, name in enumerate(KIND_NAMES)}
_REASON_CODE: dict[str | None, int | None] = {name: code for code, name in enumerate(REASON_NAMES)} | {
    None: None
}
_KIND_DICTIONARY = pa.array(KIND_NAMES, pa.utf8())
_REASON_DICTIONARY = pa.array(REASON_NAMES, pa.utf8())


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


class FrameEncoder:
    """Builds the bytes of one segment: its prefix and opening frame first, then a frame for each batch of events."""

    def __init__(self, info: SegmentInfo, capacity_bytes: int) -> None:
        metadata = {
            "kinlog.segment": msgspec.json.encode(info).decode(),
            "kinlog.payload_fields": msgspec.json.encode(payload_fields()).decode(),
            "kinlog.ignorable_kinds": msgspec.json.encode(
                [kind for kind, event_type in EVENT_TYPES.items() if event_type.IGNORABLE]
            ).decode(),
        }
        self._schema = log_schema(metadata)
        # Arrow's writer must live as long as the segment, or it would repeat the dictionaries; a fixed buffer of the
        # segment's size lets each frame be sealed and written out where Arrow built it.
        buffer = pa.allocate_buffer(capacity_bytes)
        self._data = memoryview(buffer).cast("B")
        self._sink = pa.FixedSizeBufferWriter(buffer)
        self._writer = pa.ipc.new_stream(self._sink, self._schema)
        self._epoch = info.epoch
        self._info = info
        self._offset = 0
        self._last = info.previous

    @property
    def offset(self) -> int:
        """Bytes built so far: where the next frame goes."""
        return self._offset

    @property
    def last_checksum(self) -> int:
        """Checksum of the last frame built."""
        return self._last

    @property
    def remaining_bytes(self) -> int:
        """Room left in the segment's buffer."""
        return len(self._data) - self._offset

    def opening(self, durable_seq: int) -> memoryview:
        """Return the prefix and the opening frame: the first bytes of the segment."""
        whole = self._build((), ())
        prefix = whole[: len(whole) - _last_message_bytes(whole)]
        self._offset = len(prefix)
        self._seal(whole[len(prefix) :], self._info.first_seq, 0, durable_seq, seed=crc32(prefix))
        return whole

    def frame(
        self, events: Sequence[EncodedEvent], times_us: Sequence[int], first_seq: int, durable_seq: int
    ) -> tuple[memoryview, FrameHeader]:
        """Return the bytes of a frame of ``events``, and its header."""
        frame = self._build(events, times_us, first_seq)
        header = self._seal(frame, first_seq, len(events), durable_seq, seed=0)
        return frame, header

    def _seal(
        self, frame: memoryview, first_seq: int, count: int, durable_seq: int, *, seed: int
    ) -> FrameHeader:
        header = FrameHeader(self._offset, 0, first_seq, count, self._epoch, durable_seq, self._last, 0)
        header = seal_frame(frame, header, seed)
        self._offset = header.end
        self._last = header.checksum
        return header

    def _build(
        self, events: Sequence[EncodedEvent], times_us: Sequence[int], first_seq: int = 0
    ) -> memoryview:
        count = len(events)
        columns = list(zip(*events, strict=True)) if events else [()] * 9
        kinds, versions, groups, generations, attempts, steps, weights, reasons, payloads = columns
        arrays = [
            pa.array(range(first_seq, first_seq + count), pa.uint64()),
            pa.array([self._epoch] * count, pa.uint32()),
            pa.array(times_us, pa.timestamp("us", tz="UTC")),
            pa.DictionaryArray.from_arrays(
                pa.array([_KIND_CODE[kind] for kind in kinds], pa.int8()), _KIND_DICTIONARY
            ),
            pa.array(versions, pa.uint8()),
            pa.array(groups, pa.int64()),
            pa.array(generations, pa.int32()),
            pa.array(attempts, pa.int32()),
            pa.array(steps, pa.int64()),
            pa.array(weights, pa.int64()),
            pa.DictionaryArray.from_arrays(
                pa.array([_REASON_CODE[reason] for reason in reasons], pa.int8()), _REASON_DICTIONARY
            ),
            pa.array(payloads, pa.binary()),
        ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._writer.write_batch(batch, custom_metadata={METADATA_KEY: PLACEHOLDER})
        return self._data[self._offset : self._sink.tell()]


def _last_message_bytes(stream: memoryview) -> int:
    """Return the size of the last of the stream's encapsulated messages."""
    reader = pa.ipc.MessageReader.open_stream(pa.py_buffer(stream))
    last = 0
    while True:
        try:
            message = reader.read_next_message()
        except StopIteration:
            return last
        # 8 bytes of continuation mark and length stand before the metadata, which is padded to 8 bytes.
        last = 8 + -(-message.metadata.size // 8) * 8 + (message.body.size if message.body is not None else 0)


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
    opening = _scan_opening(data)
    if opening is None:
        damaged = _durable_after(data, 0, 0)
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


def _scan_opening(data: memoryview) -> tuple[SegmentInfo, FrameHeader] | None:
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


def read_batches(
    data: memoryview, scan: SegmentScan, through_seq: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the verified record batches of a segment with events in them, up to the frame that ends at ``through_seq``."""
    frames = [f for f in scan.frames if through_seq is None or f.num_events == 0 or f.last_seq <= through_seq]
    if not frames:
        return
    stream = pa.BufferReader(pa.py_buffer(data[: frames[-1].end]))
    with pa.ipc.open_stream(stream) as reader:
        for batch in reader:
            if batch.num_rows:
                yield batch


def read_events(batch: pa.RecordBatch, ignorable: frozenset[str] = frozenset()) -> Iterator[RecordedEvent]:
    """Decode the events of a record batch. Unknown kinds in ``ignorable`` keep their place, as ``PassedOver``.

    Raises
    ------
    LogUnsupportedError
        An event's kind is unknown and not ignorable, or its version is newer than this kinlog's.
    """
    values = batch.to_pydict()
    times = batch.column("time").cast(pa.int64()).to_pylist()
    rows = zip(
        values["seq"],
        values["epoch"],
        times,
        values["kind"],
        values["version"],
        values["group_id"],
        values["generation"],
        values["attempt"],
        values["train_step"],
        values["weight_version"],
        values["reason"],
        values["payload"],
        strict=True,
    )
    for seq, epoch, time_us, kind, *rest in rows:
        if kind in ignorable and kind not in EVENT_TYPES:
            yield RecordedEvent(seq, epoch, time_us, PassedOver(original_kind=kind))
            continue
        yield RecordedEvent(seq, epoch, time_us, decode_event(EncodedEvent(kind, *rest)))
