"""The columns of a frame as Arrow buffers.

The buffers are those of ``kinlog.schemas.columns.log_schema``, built with what Python has in C: ``struct``, ``bytes`` and
``join``. A test holds them equal to what pyarrow builds from the same values.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from kinlog.schemas.codec import EncodedEvent
from kinlog.schemas.columns import KIND_NAMES, REASON_NAMES

__all__ = ["column_buffers"]

_KIND_CODE = {name: code for code, name in enumerate(KIND_NAMES)}
_REASON_CODE: dict[str | None, int | None] = {name: code for code, name in enumerate(REASON_NAMES)} | {
    None: None
}

_NO_NULLS = b""


def column_buffers(
    events: Sequence[EncodedEvent], times_us: Sequence[int], first_seq: int, epoch: int
) -> tuple[list[int], list[bytes]]:
    """Return the null count of each column, and the buffers of all columns in Arrow's order.

    The events passed ``check_columns``; there is at least one.
    """
    count = len(events)
    kinds, versions, groups, generations, attempts, steps, weights, reasons, payloads = zip(
        *events, strict=True
    )
    null_counts = [0] * 5
    buffers: list[bytes] = [
        _NO_NULLS,
        _packed("Q", range(first_seq, first_seq + count)),
        _NO_NULLS,
        _packed("I", (epoch,)) * count,
        _NO_NULLS,
        _packed("q", times_us),
        _NO_NULLS,
        bytes([_KIND_CODE[kind] for kind in kinds]),
        _NO_NULLS,
        bytes(versions),
    ]
    for code, values in (
        ("q", groups),
        ("i", generations),
        ("i", attempts),
        ("q", steps),
        ("q", weights),
        ("b", [_REASON_CODE[reason] for reason in reasons]),
    ):
        nulls, validity, data = _nullable(code, values)
        null_counts.append(nulls)
        buffers += (validity, data)
    null_counts.append(0)
    buffers += (
        _NO_NULLS,
        _packed("i", tuple(accumulate(map(len, payloads), initial=0))),
        b"".join(payloads),
    )
    return null_counts, buffers


def _nullable(code: str, values: Sequence[int | None]) -> tuple[int, bytes, bytes]:
    """Return the null count, the validity bitmap (empty without nulls) and the data of a column."""
    count = len(values)
    nulls = values.count(None)
    if not nulls:
        return 0, _NO_NULLS, _packed(code, values)
    size = -(-count // 8)
    if nulls == count:
        return count, bytes(size), bytes(struct.calcsize("=" + code) * count)
    # The bit of the first value is the lowest: written as a binary number, the last comes first.
    bits = "".join(["0" if value is None else "1" for value in reversed(values)])
    data = _packed(code, [0 if value is None else value for value in values])
    return nulls, int(bits, 2).to_bytes(size, "little"), data


def _packed(code: str, values: Sequence[int | None]) -> bytes:
    return _column(code, len(values)).pack(*values)


@lru_cache(maxsize=1024)
def _column(code: str, count: int) -> struct.Struct:
    return struct.Struct(f"={count}{code}")
