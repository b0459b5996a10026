"""Single fields of many payloads, as Arrow columns: of all other fields, only the length is looked at."""

from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from kinlog.lineage.reading import read_events
from kinlog.schemas import events as e
from kinlog.schemas.codec import payload_fields
from kinlog.schemas.receipts import Receipt

__all__ = ["PAYLOAD_COLUMNS", "PayloadColumn", "payload_columns"]


class PayloadColumn(NamedTuple):
    """Where in an event's payload a column comes from."""

    type: pa.DataType
    path: str
    """Names of fields, joined by dots."""


class _CallCount(msgspec.Struct, array_like=True, gc=False):
    """A receipt of which only the number of calls matters."""

    calls: list[msgspec.Raw]


#: Event type -> column -> where it comes from.
PAYLOAD_COLUMNS: dict[type[e.Event], dict[str, PayloadColumn]] = {
    e.GroupReserved: {
        "task_name": PayloadColumn(pa.utf8(), "prompt.task_name"),
        "agent_name": PayloadColumn(pa.utf8(), "prompt.agent_name"),
        "sample_id": PayloadColumn(pa.utf8(), "prompt.sample_id"),
        "draw_index": PayloadColumn(pa.int64(), "prompt.draw_index"),
        "dataset_epoch": PayloadColumn(pa.int64(), "prompt.dataset_epoch"),
        "num_generations": PayloadColumn(pa.int32(), "num_generations"),
        "granularity": PayloadColumn(pa.utf8(), "granularity"),
    },
    e.SiblingDispatched: {
        "worker": PayloadColumn(pa.utf8(), "worker"),
        "seed": PayloadColumn(pa.decimal128(20, 0), "seed"),
        "resumes_attempt": PayloadColumn(pa.int32(), "resumes_attempt"),
    },
    e.SiblingSealed: {
        "validity": PayloadColumn(pa.utf8(), "validity"),
        "finish_reason": PayloadColumn(pa.utf8(), "finish_reason"),
        "prompt_tokens": PayloadColumn(pa.int64(), "prompt_tokens"),
        "completion_tokens": PayloadColumn(pa.int64(), "completion_tokens"),
        "model_calls": PayloadColumn(pa.int64(), "receipt"),
        "raw_reward": PayloadColumn(pa.float64(), "raw_reward"),
        "shaped_reward": PayloadColumn(pa.float64(), "shaped_reward"),
        "max_weight_version": PayloadColumn(pa.int64(), "max_weight_version"),
        "resumed_tokens": PayloadColumn(pa.int64(), "resumed_tokens"),
    },
    e.AttemptSuperseded: {"detail": PayloadColumn(pa.utf8(), "detail")},
    e.LateResultRejected: {"completion_tokens": PayloadColumn(pa.int64(), "completion_tokens")},
    e.GroupFinalized: {"valid_fraction": PayloadColumn(pa.float64(), "valid_fraction")},
    e.GroupDropped: {"detail": PayloadColumn(pa.utf8(), "detail")},
    e.GroupParked: {"detail": PayloadColumn(pa.utf8(), "detail")},
}


def payload_columns(
    event_type: type[e.Event], rows: pa.RecordBatch, names: Sequence[str]
) -> dict[str, pa.Array]:
    """Return columns of the payloads of events of one type, in the order of the rows.

    Raises
    ------
    msgspec.DecodeError
        A payload is not what its kind says. The frame's checksum makes this a writer's bug, not damage.
    """
    wanted = {name: PAYLOAD_COLUMNS[event_type][name] for name in names}
    if not wanted:
        return {}
    present = pc.all(pc.equal(rows.column("version"), event_type.VERSION)).as_py()
    if present is False:
        events: Sequence[Any] = [record.event for record in read_events(rows)]
    else:
        events = _decoder(event_type, tuple(wanted.values())).decode(_as_array(rows.column("payload")))
    return {
        name: pa.array(_values(events, column.path), column.type, from_pandas=False)
        for name, column in wanted.items()
    }


def _values(events: Sequence[Any], path: str) -> list[object]:
    of: Callable[[Any], Any] = attrgetter(path)
    values = list(map(of, events))
    if path == "receipt":
        return [None if receipt is None else len(receipt.calls) for receipt in values]
    return values


@cache
def _decoder(
    event_type: type[e.Event], columns: tuple[PayloadColumn, ...]
) -> msgspec.msgpack.Decoder[list[Any]]:
    """Return a decoder of an array of payloads, up to the last field that is wanted."""
    wanted = {column.path.partition(".")[0] for column in columns}
    fields = {field.name: field for field in msgspec.structs.fields(event_type)}
    names = payload_fields()[e.kind_of(event_type)]
    last = max(names.index(name) for name in wanted)
    defined: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for name in names[: last + 1]:
        field = fields[name]
        as_type = _as_read(field.type) if name in wanted else msgspec.Raw
        if field.required:
            defined.append((name, as_type))
        else:
            # An older writer of this version did not have it yet.
            defined.append((name, as_type, field.default if name in wanted else msgspec.Raw()))
    struct = msgspec.defstruct("Wanted", defined, array_like=True, gc=False)
    return msgspec.msgpack.Decoder(list[struct])  # type: ignore[valid-type]


def _as_read(annotation: Any) -> Any:
    """Return the type to decode to: an enum's value is all that is shown of it, and a receipt's number of calls."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return str
    return _CallCount | None if annotation == Receipt | None else annotation


def _as_array(payloads: pa.BinaryArray) -> bytes:
    """Return the msgpack array of payloads. They lie one after the other in memory as they are."""
    _, offsets, values = payloads.buffers()
    places = memoryview(offsets).cast("i")
    start, end = places[payloads.offset], places[payloads.offset + len(payloads)]
    content = memoryview(values)[start:end] if values is not None else b""
    return b"".join((b"\xdd", len(payloads).to_bytes(4, "big"), content))
