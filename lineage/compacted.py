"""Compacted segments: many segments' events in one file, in large compressed frames.

The schema is a segment's own, and so is every byte's protection: an opening frame that covers the prefix, frames with
their checksums, chained. Only the bodies are compressed, by Arrow itself, so that any Arrow reader reads them.

It is read whole or not at all, and every byte of it was durable before it had its name: whatever does not verify in it is
damage. Opening a log reads its first and last bytes only, so that opening does not take longer the longer a run lasts;
all of it is verified whenever its events are read.
"""

import io
from pathlib import Path
from zlib import crc32

import msgspec
import pyarrow as pa

from kinlog.lineage.encoder import last_message_bytes
from kinlog.lineage.frame import METADATA_KEY, PLACEHOLDER, FrameHeader, seal_frame
from kinlog.lineage.names import compacted_name
from kinlog.lineage.segment import END_OF_STREAM, SegmentEnd, SegmentInfo, SegmentScan, scan_opening
from kinlog.lineage.store import Store
from kinlog.schemas.errors import LogDamagedError

__all__ = ["encode_compacted", "glance_at_compacted"]

#: More events a frame compress no better, and a reader decodes a frame at a time.
_EVENTS_PER_FRAME = 8192
#: Half way between the default, which leaves 5 % on the table, and the highest, which takes 15 times as long for 5 % more.
_COMPRESSION_LEVEL = 9
#: A prefix is a few kilobytes: the schema, its metadata and two dictionaries.
_OPENING_BYTES = 64 * 1024


def encode_compacted(table: pa.Table, info: SegmentInfo) -> memoryview:
    """Return the bytes of a compacted segment that holds the events of ``table``, in its order.

    ``table`` has the schema of the segments that it comes from, with their metadata and one dictionary a column.
    """
    assert info.replaces is not msgspec.UNSET
    metadata = {**table.schema.metadata, b"kinlog.segment": msgspec.json.encode(info)}
    table = table.replace_schema_metadata(metadata)
    sink = io.BytesIO()
    ends = []
    options = pa.ipc.IpcWriteOptions(
        compression=pa.Codec("zstd", compression_level=_COMPRESSION_LEVEL), emit_dictionary_deltas=False
    )
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        batches = table.to_batches(max_chunksize=_EVENTS_PER_FRAME)
        # Taken from the table, so that the dictionaries, which go before the first frame, are those of all others.
        opening = batches[0].slice(0, 0) if batches else _empty_batch(table.schema)
        for batch in [opening, *(batch for batch in batches if batch.num_rows)]:
            writer.write_batch(batch, custom_metadata={METADATA_KEY: PLACEHOLDER})
            ends.append((sink.tell(), batch.num_rows))
    data = sink.getbuffer()
    assert bytes(data[ends[-1][0] :]) == END_OF_STREAM
    whole = data[: ends[0][0]]
    at = len(whole) - last_message_bytes(whole)
    seed, seq, previous = crc32(data[:at]), info.first_seq, info.previous
    for end, num_events in ends:
        header = FrameHeader(at, 0, seq, num_events, info.epoch, info.replaces.end.seq, previous, 0)
        header = seal_frame(data[at:end], header, seed)
        at, seed, seq, previous = header.end, 0, header.last_seq + 1, header.checksum
    return data


def _empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def glance_at_compacted(store: Store, path: Path) -> SegmentScan:
    """Verify a compacted segment's beginning and that it is complete, without reading all of it.

    Returns
    -------
    A scan with the opening frame only.

    Raises
    ------
    LogDamagedError
        It is not what was written.
    LogUnsupportedError
        It was written by a newer format.
    """
    found = scan_opening(store.read_part(path, 0, _OPENING_BYTES)) or scan_opening(store.read(path))
    if found is None:
        raise _damaged(path, 0, 0, "an opening frame whose checksum verifies", "none")
    info, header = found
    before = info.first_seq - 1
    if info.replaces is msgspec.UNSET:
        raise _damaged(path, 0, before, "a segment that says what it stands for", "one that does not")
    last = (info.replaces.last_epoch, info.replaces.last_index)
    if path.name != compacted_name((info.epoch, info.index), last):
        raise _damaged(path, 0, before, path.name, compacted_name((info.epoch, info.index), last))
    tail = store.read_part(path, -len(END_OF_STREAM), len(END_OF_STREAM))
    if bytes(tail) != END_OF_STREAM:
        raise _damaged(path, header.end, before, "Arrow's end-of-stream mark at the end", bytes(tail).hex())
    return SegmentScan(info, [header], header.end, SegmentEnd.CLOSED, "", "")


def _damaged(path: Path, offset_bytes: int, seq: int, expected: str, found: str) -> LogDamagedError:
    return LogDamagedError(
        "damaged compacted segment",
        segment=path.name,
        offset_bytes=offset_bytes,
        seq=seq,
        expected=expected,
        found=found,
    )
