"""Reading a verified segment: its record batches, and the events in them."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import pyarrow as pa

from kinlog.lineage.frame import FrameHeader
from kinlog.lineage.segment import SegmentScan
from kinlog.schemas.codec import decode_events
from kinlog.schemas.columns import ENVELOPE_FIELDS
from kinlog.schemas.events import EVENT_TYPES, Event, PassedOver, RecordedEvent

__all__ = ["Choice", "ignorable_kinds", "read_batches", "read_events", "read_range"]

#: Frames are small, and each batch costs its readers time whatever its size.
_JOINED_ROWS = 65_536
#: What is looked at together where few events are wanted: all of it is decoded for one of them. A compacted frame.
_CHOSEN_ROWS = 8192
_DECODED_ROWS = 4096


def ignorable_kinds(schema: pa.Schema) -> frozenset[str]:
    """Return the event kinds that a segment's writer lets older readers pass over."""
    return frozenset(msgspec.json.decode(schema.metadata[b"kinlog.ignorable_kinds"], type=list[str]))


class Choice(NamedTuple):
    """Which events are wanted, as far as some columns can say: the others are decoded for these events only."""

    columns: tuple[str, ...]
    """What is looked at."""
    rows: Callable[[pa.RecordBatch], pa.Array]
    """Given a batch of these columns, returns for each row whether it is wanted; no row is looked at twice."""


def read_batches(
    data: memoryview, scan: SegmentScan, through_seq: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the verified events of a segment, many frames to a batch, up to the frame that ends at ``through_seq``."""
    frames = [f for f in scan.frames if f.num_events and (through_seq is None or f.last_seq <= through_seq)]
    if not frames:
        return
    reader = _Frames(data, scan)
    for piece in _pieces(frames, _JOINED_ROWS):
        yield reader.read(piece)


def read_range(
    data: memoryview,
    scan: SegmentScan,
    after_seq: int,
    through_seq: int,
    *,
    newest_first: bool = False,
    choice: Choice | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the verified events of a segment past ``after_seq`` and up to ``through_seq``, of which those that are chosen.

    Inside of a batch the oldest event is the first, also where the newest batch is.
    """
    frames = [
        f for f in scan.frames if f.num_events and f.last_seq > after_seq and f.first_seq <= through_seq
    ]
    if not frames:
        return
    reader = _Frames(data, scan)
    pieces = list(_pieces(frames, _JOINED_ROWS if choice is None else _CHOSEN_ROWS))
    for piece in reversed(pieces) if newest_first else pieces:
        first_seq = piece[0].first_seq
        start = max(0, after_seq + 1 - first_seq)
        num_rows = min(piece[-1].last_seq, through_seq) + 1 - first_seq - start
        if choice is None:
            yield reader.read(piece).slice(start, num_rows)
            continue
        wanted = choice.rows(reader.read(piece, choice.columns).slice(start, num_rows))
        if wanted.true_count:
            yield reader.read(piece).slice(start, num_rows).filter(wanted)


def _pieces(frames: Sequence[FrameHeader], num_rows: int) -> Iterator[list[FrameHeader]]:
    """Split neighbouring frames into runs of at least so many events, but for the last one."""
    piece: list[FrameHeader] = []
    rows = 0
    for frame in frames:
        piece.append(frame)
        rows += frame.num_events
        if rows >= num_rows:
            yield piece
            piece, rows = [], 0
    if piece:
        yield piece


class _Frames:
    """Reads neighbouring frames of a verified segment as one batch.

    A stream's dictionaries come before its first frame, and reading them takes longer than reading a frame. So they are
    read once, and frames as a stream whose names are the numbers that they are stored as.
    """

    def __init__(self, data: memoryview, scan: SegmentScan) -> None:
        self._data = data
        opening = pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(data[: scan.frames[0].end])))
        self._schema = opening.schema
        self._names = {
            column: opening_column.dictionary
            for column, opening_column in zip(self._schema.names, opening.read_next_batch(), strict=True)
            if pa.types.is_dictionary(opening_column.type)
        }
        fields = [
            pa.field(f.name, f.type.index_type, f.nullable) if f.name in self._names else f
            for f in self._schema
        ]
        self._prefix = pa.schema(fields).serialize()

    def read(self, frames: Sequence[FrameHeader], columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Return the events of frames; of all columns, or of some, in the segment's order."""
        content = b"".join((self._prefix, self._data[frames[0].offset : frames[-1].end]))
        # One thread: handing columns of a few kilobytes to others takes longer than decompressing them.
        options = pa.ipc.IpcReadOptions(use_threads=False)
        schema = self._schema
        if columns is not None:
            wanted = [place for place, name in enumerate(schema.names) if name in columns]
            options.included_fields = wanted
            schema = pa.schema([schema.field(place) for place in wanted], schema.metadata)
        with pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(content)), options=options) as reader:
            (batch,) = reader.read_all().combine_chunks().to_batches() if len(frames) > 1 else reader
        arrays = [
            pa.DictionaryArray.from_arrays(array, self._names[name]) if name in self._names else array
            for name, array in zip(schema.names, batch.columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


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
