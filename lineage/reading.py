"""Reading a verified segment: its record batches, and the events in them."""

from collections.abc import Iterator

import msgspec
import pyarrow as pa

from kinlog.lineage.segment import SegmentScan
from kinlog.schemas.codec import decode_events
from kinlog.schemas.columns import ENVELOPE_FIELDS
from kinlog.schemas.events import EVENT_TYPES, Event, PassedOver, RecordedEvent

__all__ = ["ignorable_kinds", "read_batches", "read_events"]

#: Frames are small, and each batch costs its readers time whatever its size.
_JOINED_ROWS = 65_536
_DECODED_ROWS = 4096


def ignorable_kinds(schema: pa.Schema) -> frozenset[str]:
    """Return the event kinds that a segment's writer lets older readers pass over."""
    return frozenset(msgspec.json.decode(schema.metadata[b"kinlog.ignorable_kinds"], type=list[str]))


def read_batches(
    data: memoryview, scan: SegmentScan, through_seq: int | None = None, *, after_seq: int = 0
) -> Iterator[pa.RecordBatch]:
    """Yield the verified events of a segment, many frames to a batch.

    Begins with the frame that holds the event after ``after_seq``, and ends with the one that ends at ``through_seq``.
    """
    frames = [f for f in scan.frames if through_seq is None or f.num_events == 0 or f.last_seq <= through_seq]
    wanted = [frame for frame in frames if frame.num_events and frame.last_seq > after_seq]
    if not wanted:
        return
    content: memoryview | bytes = data[: wanted[-1].end]
    if wanted[0].first_seq > frames[0].first_seq:
        # The schema and the dictionaries come before the opening frame.
        content = b"".join((data[: frames[0].end], data[wanted[0].offset : wanted[-1].end]))
    with pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(content))) as reader:
        gathered: list[pa.RecordBatch] = []
        num_rows = 0
        for batch in reader:
            gathered.append(batch)
            num_rows += batch.num_rows
            if num_rows >= _JOINED_ROWS:
                yield from _joined(gathered)
                gathered, num_rows = [], 0
        yield from _joined(gathered)


def _joined(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    # A table without rows has no batches.
    return pa.Table.from_batches(batches).combine_chunks().to_batches() if batches else []


def read_events(batch: pa.RecordBatch, ignorable: frozenset[str] = frozenset()) -> Iterator[RecordedEvent]:
    """Decode the events of a record batch. Unknown kinds in ``ignorable`` keep their place, as ``PassedOver``.

    Raises
    ------
    LogUnsupportedError
        An event's kind is unknown and not ignorable, or its version is newer than this kinlog's.
    """
    for start in range(0, batch.num_rows, _DECODED_ROWS):
        rows = batch.slice(start, _DECODED_ROWS)
        seqs, epochs = rows.column("seq").to_pylist(), rows.column("epoch").to_pylist()
        times_us = rows.column("time").cast(pa.int64()).to_pylist()
        yield from map(RecordedEvent, seqs, epochs, times_us, _decoded(rows, ignorable))


def _decoded(rows: pa.RecordBatch, ignorable: frozenset[str]) -> list[Event]:
    """Decode events type by type, and return them in their own order."""
    kinds = rows.column("kind")
    names = kinds.dictionary.to_pylist()
    places: dict[tuple[int, int], list[int]] = {}
    types = zip(kinds.indices.to_pylist(), rows.column("version").to_pylist(), strict=True)
    for place, event_type in enumerate(types):
        places.setdefault(event_type, []).append(place)
    events: list[Event] = [PassedOver(original_kind="")] * rows.num_rows
    for (code, version), chosen in places.items():
        kind = names[code]
        if kind in ignorable and kind not in EVENT_TYPES:
            decoded: list[Event] = [PassedOver(original_kind=kind)] * len(chosen)
        else:
            decoded = _decoded_type(kind, version, rows.take(pa.array(chosen, pa.int64())))
        for place, event in zip(chosen, decoded, strict=True):
            events[place] = event
    return events


def _decoded_type(kind: str, version: int, rows: pa.RecordBatch) -> list[Event]:
    columns = {name: rows.column(name).to_pylist() for name in ENVELOPE_FIELDS if name != "reason"}
    reasons = rows.column("reason")
    # Looked up here: Arrow takes fifty times as long to make Python strings of a dictionary's values.
    names = [*reasons.dictionary.to_pylist(), None]
    columns["reason"] = [names[code] for code in reasons.indices.fill_null(len(names) - 1).to_pylist()]
    return decode_events(kind, version, columns, rows.column("payload").to_pylist())
