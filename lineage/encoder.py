"""Building the bytes of a segment: its prefix, its opening frame, and a frame for each batch of events."""

from collections.abc import Sequence
from zlib import crc32

import msgspec
import pyarrow as pa

from kinlog.lineage.frame import METADATA_KEY, PLACEHOLDER, FrameHeader, seal_frame
from kinlog.lineage.segment import SegmentInfo
from kinlog.schemas.codec import EncodedEvent, payload_fields
from kinlog.schemas.columns import KIND_NAMES, REASON_NAMES, log_schema
from kinlog.schemas.events import EVENT_TYPES

__all__ = ["FrameEncoder"]

_KIND_CODE = {name: code for code, name in enumerate(KIND_NAMES)}
_REASON_CODE: dict[str | None, int | None] = {name: code for code, name in enumerate(REASON_NAMES)} | {
    None: None
}
_KIND_DICTIONARY = pa.array(KIND_NAMES, pa.utf8())
_REASON_DICTIONARY = pa.array(REASON_NAMES, pa.utf8())


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
