"""Finding rows of one table for those of another, by typed keys: a join that keeps its left side's rows and their order."""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["Matches", "match_rows"]


class Matches:
    """For each row of a left table, one row of a right one, or none."""

    def __init__(self, right: pa.Table, places: pa.Array) -> None:
        self._right = right
        self._places = places

    @property
    def found(self) -> pa.Array:
        """Whether there is one."""
        return self._places.is_valid()

    def column(self, name: str) -> pa.Array:
        """Return a column of the right table for the rows of the left one, null where there is none."""
        return one_array(self._right.column(name)).take(self._places)


def match_rows(left: pa.Table, right: pa.Table, keys: Sequence[str], *, last: bool = False) -> Matches:
    """Find the first row of ``right``, or the last, that has the same keys as each row of ``left``."""
    rows = right.num_rows
    if last:
        right = right.take(pa.array(range(rows - 1, -1, -1), pa.int64()))
    left_codes, right_codes = (
        pa.repeat(pa.scalar(0, pa.int64()), left.num_rows),
        pa.repeat(pa.scalar(0, pa.int64()), rows),
    )
    for key in keys:
        values = pc.unique(left.column(key))
        width = len(values)
        left_codes = _joined(left_codes, width, pc.index_in(one_array(left.column(key)), value_set=values))
        # Null where the left side has no such key at all: it matches nothing.
        right_codes = _joined(right_codes, width, pc.index_in(one_array(right.column(key)), value_set=values))
    return Matches(right, pc.index_in(left_codes, value_set=right_codes))


def _joined(codes: pa.Array, width: int, next_codes: pa.Array) -> pa.Array:
    """Return one code for two. Checked: keys are counted, never joined as text."""
    return pc.add_checked(pc.multiply_checked(codes, width), next_codes.cast(pa.int64()))


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array."""
    combined = column.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        return combined.chunk(0) if combined.num_chunks else pa.array([], combined.type)
    return combined
