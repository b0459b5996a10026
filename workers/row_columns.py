"""Rows as the jagged columns that the data plane stores, and back.

Every column is jagged, also where all rows have one length and for scalars. The storage units keep a dense batch as
views of one buffer, and checkpoint the whole buffer once for each row: 256 dense rows of 4.2 MB became 1,074 MB on
disk, against 1.03 times their size as jagged columns.
"""

from collections.abc import Mapping, Sequence

import torch

from kinlog.schemas.reasons import Partition
from kinlog.workers.rows import ROW_DTYPES, CanonicalRow, Row, StagedRow

__all__ = ["rows_to_columns", "staged_from_columns", "canonical_from_columns"]


def rows_to_columns(partition: Partition, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Return one jagged tensor for each column of the partition, in the order of ``rows``.

    Parameters
    ----------
    partition:
        The partition that all ``rows`` belong to.
    rows:
        At least one row.

    Raises
    ------
    ValueError
        When a row belongs to another partition, or a value's dtype is not the column's.
    """
    for row in rows:
        if row.partition is not partition:
            raise ValueError(
                f"row {row.key} is a {type(row).__name__}: it cannot be put into {partition.value!r}"
            )
    return {
        name: _jagged(name, dtype, [_value(row, name, dtype) for row in rows])
        for name, dtype in ROW_DTYPES[partition].items()
    }


def staged_from_columns(identity: tuple[int, int, int, int], values: Mapping[str, torch.Tensor]) -> StagedRow:
    """Return the staged row of ``identity`` (group, generation, attempt, call) from one value of each column."""
    group_id, generation, attempt, call = identity
    return StagedRow(
        group_id=group_id,
        generation=generation,
        attempt=attempt,
        call=call,
        token_ids=values["token_ids"],
        prompt_tokens=int(values["prompt_tokens"].item()),
        logprobs=values["logprobs"],
        weight_versions=values["weight_versions"],
    )


def canonical_from_columns(
    identity: tuple[int, int, int], values: Mapping[str, torch.Tensor]
) -> CanonicalRow:
    """Return the canonical row of ``identity`` (group, generation, attempt) from one value of each column."""
    group_id, generation, attempt = identity
    return CanonicalRow(
        group_id=group_id,
        generation=generation,
        attempt=attempt,
        draw_index=int(values["draw_index"].item()),
        token_ids=values["token_ids"],
        loss_mask=values["loss_mask"],
        logprobs=values["logprobs"],
        weight_versions=values["weight_versions"],
        valid=bool(values["valid"].item()),
        raw_reward=float(values["raw_reward"].item()),
        shaped_reward=float(values["shaped_reward"].item()),
    )


def _value(row: Row, name: str, dtype: torch.dtype) -> torch.Tensor:
    value: torch.Tensor | int | float = getattr(row, name)
    return value.detach() if isinstance(value, torch.Tensor) else torch.tensor([value], dtype=dtype)


def _jagged(name: str, dtype: torch.dtype, values: list[torch.Tensor]) -> torch.Tensor:
    foreign = {value.dtype for value in values} - {dtype}
    if foreign:
        # Rows check this when they are made; a batch checks it again, because here a mixture is cast in silence.
        raise ValueError(
            f"column {name} must have dtype {dtype} in every row, found {sorted(map(str, foreign))}"
        )
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)
