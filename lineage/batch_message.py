"""The IPC message of a record batch, made by filling in one that Arrow made.

Building twelve arrays and a batch of them costs Arrow's Python layer about 100 µs, whatever is in them: more than the
rest of a small commit's work. But in the messages of one schema only the counts, the places of the buffers and the body
differ. So Arrow builds one message for each process, and each frame is a copy of it with its own numbers, at the places
where the Arrow specification's ``Message.fbs`` has them.
"""

import struct
from collections.abc import Sequence
from itertools import accumulate

import pyarrow as pa

__all__ = ["BatchMessage"]

_CONTINUATION = b"\xff\xff\xff\xff"
_ALIGNMENT_BYTES = 8
_INT64 = struct.Struct("<q")

# Positions of the fields in their flatbuffer tables, counted from 0 as in Message.fbs.
_MESSAGE_HEADER, _MESSAGE_BODY_LENGTH = 2, 3
_BATCH_LENGTH, _BATCH_NODES, _BATCH_BUFFERS = 0, 1, 2


class BatchMessage:
    """Builds the messages of one schema's record batches, each with the same custom metadata."""

    def __init__(self, sample: pa.RecordBatch, custom_metadata: dict[bytes, bytes]) -> None:
        """Take the layout from Arrow's own message for ``sample``.

        ``sample`` must have rows and a body: flatbuffers leave out what is zero. Columns may be primitive,
        dictionary-encoded or binary: their order of buffers is Arrow's (validity, then offsets, then data).
        """
        metadata = _message_metadata(sample, custom_metadata)
        table = _Table.root(metadata)
        batch = table.table(_MESSAGE_HEADER)
        self._template = metadata
        self._body_length_at = table.field(_MESSAGE_BODY_LENGTH)
        self._length_at = batch.field(_BATCH_LENGTH)
        self._nodes_at, self.num_columns = batch.vector(_BATCH_NODES)
        self._buffers_at, self.num_buffers = batch.vector(_BATCH_BUFFERS)
        self._nodes = struct.Struct(f"<{2 * self.num_columns}q")
        self._buffers = struct.Struct(f"<{2 * self.num_buffers}q")
        if _INT64.unpack_from(metadata, self._length_at)[0] != sample.num_rows:
            raise RuntimeError(f"pyarrow {pa.__version__} lays out record batches in a way unknown to kinlog")

    def build(self, num_rows: int, null_counts: Sequence[int], buffers: Sequence[bytes]) -> bytearray:
        """Return the whole message: prefix, metadata and body.

        Parameters
        ----------
        null_counts:
            One for each column.
        buffers:
            All buffers of all columns in Arrow's order, in native byte order; empty where a column has no nulls.
        """
        message = bytearray(self._template)
        nodes = [num_rows] * (2 * self.num_columns)
        nodes[1::2] = null_counts
        sizes = [len(buffer) for buffer in buffers]
        padded = [size + -size % _ALIGNMENT_BYTES for size in sizes]
        *offsets, body_length = accumulate(padded, initial=0)
        places = [0] * (2 * self.num_buffers)
        places[0::2] = offsets
        places[1::2] = sizes
        self._nodes.pack_into(message, self._nodes_at, *nodes)
        self._buffers.pack_into(message, self._buffers_at, *places)
        _INT64.pack_into(message, self._length_at, num_rows)
        _INT64.pack_into(message, self._body_length_at, body_length)
        message += b"".join(
            [buffer.ljust(size, b"\0") for buffer, size in zip(buffers, padded, strict=True) if size]
        )
        return message


def _message_metadata(sample: pa.RecordBatch, custom_metadata: dict[bytes, bytes]) -> bytes:
    """Return Arrow's message for ``sample`` without its body: continuation mark, length, flatbuffer, padding."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, sample.schema) as writer:
        writer.write_batch(sample)  # the schema and the dictionaries go before the first batch
        start = sink.tell()
        writer.write_batch(sample, custom_metadata=custom_metadata)
    message = bytes(sink.getvalue())[start:]
    (size,) = struct.unpack_from("<i", message, len(_CONTINUATION))
    return message[: len(_CONTINUATION) + 4 + size]


class _Table:
    """A flatbuffer table, read as far as places are concerned."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    @classmethod
    def root(cls, message: bytes) -> "_Table":
        start = len(_CONTINUATION) + 4
        return cls(message, start + struct.unpack_from("<I", message, start)[0])

    def field(self, number: int) -> int:
        """Return where a field's value is."""
        vtable = self._at - struct.unpack_from("<i", self._data, self._at)[0]
        (offset,) = struct.unpack_from("<H", self._data, vtable + 4 + 2 * number)
        if offset == 0:
            raise RuntimeError(
                f"pyarrow {pa.__version__} leaves out field {number} of a record batch's message"
            )
        return int(self._at + offset)

    def table(self, number: int) -> "_Table":
        """Return the table that a field refers to."""
        at = self.field(number)
        return _Table(self._data, at + struct.unpack_from("<I", self._data, at)[0])

    def vector(self, number: int) -> tuple[int, int]:
        """Return where the first element of a vector of structs is, and how many there are."""
        at = self.field(number)
        at += struct.unpack_from("<I", self._data, at)[0]
        return at + 4, struct.unpack_from("<I", self._data, at)[0]
