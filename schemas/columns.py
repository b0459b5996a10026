"""The Arrow schema of the log: the envelope as typed columns, and the rest of each event as msgpack in ``payload``.

Nothing is stored twice: an event is its columns plus its payload.
"""

import pyarrow as pa

from kinlog.schemas.events import EVENT_TYPES
from kinlog.schemas.reasons import Reason

__all__ = ["ENVELOPE_FIELDS", "KIND_NAMES", "REASON_NAMES", "log_schema"]

#: Event fields that are columns of their own, null for events without them.
ENVELOPE_FIELDS: tuple[str, ...] = (
    "group_id",
    "generation",
    "attempt",
    "train_step",
    "weight_version",
    "reason",
)

#: The dictionaries of this version's writer. Each segment carries its own, so their order is free to change.
KIND_NAMES: tuple[str, ...] = tuple(EVENT_TYPES)
REASON_NAMES: tuple[str, ...] = tuple(reason.value for reason in Reason)

_NAMES = pa.dictionary(pa.int8(), pa.utf8())


def log_schema(metadata: dict[str, str] | None = None) -> pa.Schema:
    """Return the schema of a segment.

    Columns: ``seq`` and ``epoch`` order the event; ``time`` is the writer's wall clock; ``kind`` and ``version`` name
    its type; ``group_id`` to ``reason`` are the event's own fields where it has them; ``payload`` is the msgpack array
    of its other fields, in the order that the segment's ``kinlog.payload_fields`` metadata lists.
    """
    fields = [
        pa.field("seq", pa.uint64(), nullable=False),
        pa.field("epoch", pa.uint32(), nullable=False),
        pa.field("time", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("kind", _NAMES, nullable=False),
        pa.field("version", pa.uint8(), nullable=False),
        pa.field("group_id", pa.int64()),
        pa.field("generation", pa.int32()),
        pa.field("attempt", pa.int32()),
        pa.field("train_step", pa.int64()),
        pa.field("weight_version", pa.int64()),
        pa.field("reason", _NAMES),
        pa.field("payload", pa.binary(), nullable=False),
    ]
    return pa.schema(fields, metadata=dict(metadata) if metadata else None)
