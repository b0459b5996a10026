"""Building the bytes of a segment: its prefix, its opening frame, and a frame for each batch of events."""

from collections.abc import Sequence
from functools import cache
from zlib import crc32

import msgspec
import pyarrow as pa

from kinlog.lineage.batch_message import BatchMessage
from kinlog.lineage.column_buffers import column_buffers
from kinlog.lineage.frame import METADATA_KEY, PLACEHOLDER, FrameHeader, seal_frame
from kinlog.lineage.segment import SegmentInfo
from kinlog.schemas.codec import EncodedEvent, payload_fields
from kinlog.schemas.columns import KIND_NAMES, REASON_NAMES, log_schema
from kinlog.schemas.events import EVENT_TYPES

__all__ = ["FrameEncoder", "last_message_bytes"]

_CUSTOM_METADATA = {METADATA_KEY: PLACEHOLDER}


class FrameEncoder:
    """Builds the bytes of one segment: its prefix and opening frame first, then a frame for each batch of events."""

    def __init__(self, info: SegmentInfo) -> None:
        self._info = info
        self._message = _batch_message()
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

    def opening(self, durable_seq: int) -> memoryview:
        """Return the prefix and the opening frame: the first bytes of the segment."""
        metadata = {
            "kinlog.segment": msgspec.json.encode(self._info).decode(),
            "kinlog.payload_fields": msgspec.json.encode(payload_fields()).decode(),
            "kinlog.ignorable_kinds": msgspec.json.encode(
                [kind for kind, event_type in EVENT_TYPES.items() if event_type.IGNORABLE]
            ).decode(),
        }
        schema = log_schema(metadata)
        sink = pa.BufferOutputStream()
        # The dictionaries are in the prefix, once: frames refer to them.
        pa.ipc.new_stream(sink, schema).write_batch(_rows_batch(schema, 0), custom_metadata=_CUSTOM_METADATA)
        whole = memoryview(bytearray(sink.getvalue()))
        prefix = whole[: len(whole) - last_message_bytes(whole)]
        self._offset = len(prefix)
        self._seal(whole[len(prefix) :], self._info.first_seq, 0, durable_seq, seed=crc32(prefix))
        return whole

    def frame(
        self, events: Sequence[EncodedEvent], times_us: Sequence[int], first_seq: int, durable_seq: int
    ) -> tuple[memoryview, FrameHeader]:
        """Return the bytes of a frame of ``events``, one or more, and its header.

        The events passed ``check_columns``.
        """
        null_counts, buffers = column_buffers(events, times_us, first_seq, self._info.epoch)
        frame = memoryview(self._message.build(len(events), null_counts, buffers))
        header = self._seal(frame, first_seq, len(events), durable_seq, seed=0)
        return frame, header

    def _seal(
        self, frame: memoryview, first_seq: int, count: int, durable_seq: int, *, seed: int
    ) -> FrameHeader:
        epoch = self._info.epoch
        header = FrameHeader(self._offset, 0, first_seq, count, epoch, durable_seq, self._last, 0)
        header = seal_frame(frame, header, seed)
        self._offset = header.end
        self._last = header.checksum
        return header


@cache
def _batch_message() -> BatchMessage:
    return BatchMessage(_rows_batch(log_schema(), 1), _CUSTOM_METADATA)


def _rows_batch(schema: pa.Schema, count: int) -> pa.RecordBatch:
    """Return a batch of rows that say nothing, with this version's dictionaries."""
    names = {"kind": KIND_NAMES, "reason": REASON_NAMES}
    columns = [
        pa.DictionaryArray.from_arrays(
            pa.array([0] * count, pa.int8()), pa.array(names[field.name], pa.utf8())
        )
        if field.name in names
        else pa.array([b"-" if pa.types.is_binary(field.type) else 0] * count, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def last_message_bytes(stream: memoryview) -> int:
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
