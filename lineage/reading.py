"""Reading a verified segment: its record batches, and the events in them."""

from collections.abc import Iterator

import msgspec
import pyarrow as pa

from kinlog.lineage.segment import SegmentScan
from kinlog.schemas.codec import EncodedEvent, decode_event
from kinlog.schemas.events import EVENT_TYPES, PassedOver, RecordedEvent

__all__ = ["ignorable_kinds", "read_batches", "read_events"]


def ignorable_kinds(schema: pa.Schema) -> frozenset[str]:
    """Return the event kinds that a segment's writer lets older readers pass over."""
    return frozenset(msgspec.json.decode(schema.metadata[b"kinlog.ignorable_kinds"], type=list[str]))


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
