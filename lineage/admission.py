"""What an append may be: decided before it has a place in the log.

Found later, in the writer's thread, a value that no column can hold would end the run.
"""

import struct
from collections.abc import Sequence

import pyarrow as pa

from kinlog.schemas.codec import EncodedEvent
from kinlog.schemas.columns import KIND_NAMES, REASON_NAMES, log_schema

__all__ = ["MAX_FRAME_EVENTS", "MAX_FRAME_PAYLOAD_BYTES", "check_append", "check_columns"]

MAX_FRAME_EVENTS = 4096
MAX_FRAME_PAYLOAD_BYTES = 1 << 20

_KINDS = frozenset(KIND_NAMES)
_REASONS = frozenset({None, *REASON_NAMES})
_STRUCT_CODES = {pa.uint8(): "B", pa.int32(): "i", pa.int64(): "q"}
#: The integer columns of an event and their types, as ``struct`` calls them.
_INTEGERS = {
    name: _STRUCT_CODES[log_schema().field(name).type]
    for name in ("version", "group_id", "generation", "attempt", "train_step", "weight_version")
}
_ROW = struct.Struct("=" + "".join(_INTEGERS.values()))


def check_append(events: Sequence[EncodedEvent]) -> int:
    """Return the bytes of payload, or refuse what the log cannot take.

    Raises
    ------
    ValueError
        There are no events, or more than one frame takes (an append is never split), or a value does not fit its
        column.
    """
    if not 0 < len(events) <= MAX_FRAME_EVENTS:
        raise ValueError(f"an append takes 1 to {MAX_FRAME_EVENTS} events, got {len(events)}")
    payload_bytes = sum([len(event.payload) for event in events])
    if payload_bytes > MAX_FRAME_PAYLOAD_BYTES:
        raise ValueError(f"an append takes {MAX_FRAME_PAYLOAD_BYTES} bytes of payload, got {payload_bytes}")
    check_columns(events)
    return payload_bytes


def check_columns(events: Sequence[EncodedEvent]) -> None:
    """Raise ``ValueError`` when a value does not fit its column."""
    pack = _ROW.pack
    for place, event in enumerate(events):
        kind, version, group_id, generation, attempt, train_step, weight_version, reason, _ = event
        try:
            # Packing is the quickest way to try all of them.
            pack(version, group_id or 0, generation or 0, attempt or 0, train_step or 0, weight_version or 0)
        except struct.error:
            raise ValueError(_misfit(place, event)) from None
        if kind not in _KINDS or reason not in _REASONS:
            raise ValueError(
                f"event {place} of the append: kind {kind!r} or reason {reason!r} is none that this kinlog writes. "
                "Nothing was appended."
            )


def _misfit(place: int, event: EncodedEvent) -> str:
    for name, code in _INTEGERS.items():
        value = getattr(event, name)
        bits = 8 * struct.calcsize("=" + code)
        low, high = (0, 2**bits - 1) if code.isupper() else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        if value is not None and not (isinstance(value, int) and low <= value <= high):
            return (
                f"{event.kind}, event {place} of the append: {name} is {value!r}, its column takes integers from "
                f"{low} to {high}. Nothing was appended."
            )
    raise AssertionError(f"{event!r} does not pack, and every field of it fits")
