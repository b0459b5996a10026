"""Staged rows as the row journal's columns, and back."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
import torch

from kinlog.schemas.errors import RowCorruptError
from kinlog.schemas.journal_columns import journal_schema
from kinlog.workers.rows import StagedRow, row_digest

__all__ = ["rows_to_batch", "rows_from_batch"]

_TOKEN_LIMIT = 2**31


def rows_to_batch(rows: Sequence[StagedRow]) -> pa.RecordBatch:
    """Return the journal's batch of ``rows``, in their order.

    Raises
    ------
    ValueError
        A token id does not fit into 32 bits.
    """
    schema = journal_schema()
    token_ids = torch.cat([row.token_ids for row in rows])
    if token_ids.numel() and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < _TOKEN_LIMIT:
        raise ValueError(
            f"rows {rows[0].key} to {rows[-1].key}: token ids are 0 to {_TOKEN_LIMIT - 1}, found "
            f"{int(token_ids.min())} to {int(token_ids.max())}"
        )
    columns = [
        pa.array([row.group_id for row in rows], pa.int64()),
        pa.array([row.generation for row in rows], pa.int32()),
        pa.array([row.attempt for row in rows], pa.int32()),
        pa.array([row.call for row in rows], pa.int32()),
        pa.array([row_digest(row) for row in rows], schema.field("row_digest").type),
        pa.array([row.prompt_tokens for row in rows], pa.int32()),
        _lists(token_ids.to(torch.int32), [row.token_ids for row in rows], schema.field("token_ids")),
        _lists(torch.cat([r.logprobs for r in rows]), [r.logprobs for r in rows], schema.field("logprobs")),
        _lists(
            torch.cat([row.weight_versions for row in rows]),
            [row.weight_versions for row in rows],
            schema.field("weight_versions"),
        ),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def rows_from_batch(batch: pa.RecordBatch) -> Iterator[StagedRow]:
    """Yield the rows of a journal's batch, each compared with the digest that it was written with.

    Raises
    ------
    RowCorruptError
        A row is not what was written: the journal's checksums make this a bug, not damage.
    """
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names[:6]}
    values = {name: batch.column(name) for name in ("token_ids", "logprobs", "weight_versions")}
    for place in range(batch.num_rows):
        row = StagedRow(
            group_id=columns["group_id"][place],
            generation=columns["generation"][place],
            attempt=columns["attempt"][place],
            call=columns["call"][place],
            prompt_tokens=columns["prompt_tokens"][place],
            token_ids=_tensor(values["token_ids"], place).to(torch.int64),
            logprobs=_tensor(values["logprobs"], place),
            weight_versions=_tensor(values["weight_versions"], place),
        )
        if row_digest(row) != columns["row_digest"][place]:
            raise RowCorruptError(
                f"row {row.key} of the row journal does not have the digest that it was written with"
            )
        yield row


def _lists(values: torch.Tensor, parts: Sequence[torch.Tensor], field: pa.Field) -> pa.ListArray:
    offsets = torch.zeros(len(parts) + 1, dtype=torch.int32)
    offsets[1:] = torch.cumsum(torch.tensor([part.numel() for part in parts]), 0)
    flat = pa.array(values.numpy(), field.type.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets.numpy(), pa.int32()), flat, type=field.type)


def _tensor(column: pa.ListArray, place: int) -> torch.Tensor:
    # A copy: Arrow's memory is read-only, and the whole segment's.
    return torch.from_numpy(column[place].values.to_numpy(zero_copy_only=False).copy())
