"""The view of events: the log's own columns, and the rest of each event as JSON text."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from kinlog.lineage.reading import ignorable_kinds, read_events
from kinlog.lineage.scan import LogScan
from kinlog.replay.selection import EventFilter, select_events
from kinlog.replay.settled import check_readable
from kinlog.replay.views.catalogue import VIEWS
from kinlog.replay.views.payload_text import payload_text
from kinlog.schemas import events as e
from kinlog.schemas.columns import ENVELOPE_FIELDS, log_schema

__all__ = ["RAW_PAYLOAD", "PAYLOAD_INPUTS", "event_batches", "payload_texts"]

#: Kinds whose effect a restart undoes when it goes back behind their step.
_UNDONE_BY_RESTARTS: tuple[str, ...] = tuple(
    e.kind_of(event_type)
    for event_type in (
        e.GroupClaimed,
        e.StepShrunk,
        e.StepApplied,
        e.WeightsPublished,
        e.CheckpointCommitted,
    )
)

#: The payload as the log has it, for readers that make text of it themselves, of as many events as they need.
RAW_PAYLOAD = "raw_payload"

#: What :func:`payload_texts` is made from: columns of the view, and the payload as the log has it.
PAYLOAD_INPUTS: tuple[str, ...] = ("kind", "version", *ENVELOPE_FIELDS, RAW_PAYLOAD)


def event_batches(scan: LogScan, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield columns of the view, in the order of the log.

    Parameters
    ----------
    names:
        Columns of the view, or ``RAW_PAYLOAD``.

    Raises
    ------
    LogUnsupportedError
        An event was written by a newer kinlog.
    """
    restarts = _restarts(scan) if "surviving" in names else []
    for batch in scan.batches():
        check_readable(batch)
        columns = {name: _column(batch, name, restarts) for name in names}
        yield pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _column(batch: pa.RecordBatch, name: str, restarts: Sequence[tuple[int, int]]) -> pa.Array:
    if name == "surviving":
        return _surviving(batch, restarts)
    if name == "payload":
        records = read_events(batch, ignorable_kinds(batch.schema))
        return pa.array((payload_text(record.event) for record in records), pa.utf8())
    if name == RAW_PAYLOAD:
        return batch.column("payload")
    stored = batch.column({"recorded_at": "time"}.get(name, name))
    view = VIEWS["events"]
    return stored.cast(view.schema((name,)).field(0).type)


def _restarts(scan: LogScan) -> list[tuple[int, int]]:
    """Return (seq, restored step) of each restart."""
    restored = select_events(scan, EventFilter(kinds=frozenset({e.kind_of(e.RunRestored)})))
    return [(r.seq, r.event.train_step) for r in restored if isinstance(r.event, e.RunRestored)]


def _surviving(batch: pa.RecordBatch, restarts: Sequence[tuple[int, int]]) -> pa.Array:
    seqs, steps = batch.column("seq"), batch.column("train_step")
    last = seqs[-1].as_py()
    # Of restarts after the batch, the one that went back furthest counts.
    furthest = (
        [(last + 1, min(step for seq, step in restarts if seq > last))]
        if restarts and restarts[-1][0] > last
        else []
    )
    undone = pa.repeat(pa.scalar(False), batch.num_rows)
    for seq, step in [*furthest, *(r for r in restarts if seqs[0].as_py() <= r[0] <= last)]:
        behind = pc.and_(pc.less(seqs, seq), pc.greater(steps, step))
        undone = pc.or_(undone, pc.fill_null(behind, False))
    can_be = pc.is_in(
        batch.column("kind").cast(pa.utf8()), value_set=pa.array(_UNDONE_BY_RESTARTS, pa.utf8())
    )
    return pc.invert(pc.and_(undone, can_be))


def payload_texts(*inputs: pa.Array) -> pa.Array:
    """Return the payloads of chosen events as JSON text.

    Parameters
    ----------
    inputs:
        The ``PAYLOAD_INPUTS`` of these events, as :func:`event_batches` gives them, which has found that they can be read.
    """
    schema = log_schema()
    columns = dict(zip(PAYLOAD_INPUTS, inputs, strict=True))
    columns["payload"] = columns.pop(RAW_PAYLOAD)
    unknown = pa.repeat(pa.scalar(0, pa.int64()), len(columns["payload"]))
    arrays = [_stored(columns.get(field.name, unknown), field.type) for field in schema]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    ignorable = frozenset(pc.unique(columns["kind"]).to_pylist()) - set(e.EVENT_TYPES)
    return pa.array((payload_text(record.event) for record in read_events(batch, ignorable)), pa.utf8())


def _stored(values: pa.Array, as_type: pa.DataType) -> pa.Array:
    return (
        values.dictionary_encode().cast(as_type) if pa.types.is_dictionary(as_type) else values.cast(as_type)
    )
