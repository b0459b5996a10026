"""Putting rows that the data plane lost back from the row journal, at restart."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from kinlog.lineage.journal import ROWS, journal_batches, scan_journal
from kinlog.lineage.store import Store
from kinlog.schemas.errors import LogDamagedError
from kinlog.schemas.journal_columns import JOURNAL_IDENTITY
from kinlog.schemas.orders import PutBack
from kinlog.schemas.reasons import Partition
from kinlog.schemas.receipts import staging_key
from kinlog.schemas.rows import RowTag
from kinlog.workers.journal_rows import rows_from_batch
from kinlog.workers.rows import StagedRow

__all__ = ["put_rows_back"]


class _Staging(Protocol):
    async def clear(self, partition: Partition, keys: Iterable[str], cut: object) -> int: ...
    async def put_staged(self, rows: Sequence[StagedRow]) -> None: ...


async def put_rows_back(
    data_plane: _Staging, store: Store, directory: Path, wanted: Mapping[str, RowTag]
) -> PutBack:
    """Put the wanted rows that the journal has into the data plane, before anyone uses it.

    Parameters
    ----------
    directory:
        The run's journal directory. It may not exist.
    wanted:
        Staging key -> what lineage says of the row. Only a row with this very digest is put back.

    Raises
    ------
    DataPlaneError
        A put failed.
    LogUnsupportedError
        A segment was written by a newer kinlog.
    """
    missing = dict(wanted)
    tokens = 0
    damaged: list[str] = []
    for name in filter(ROWS.owns, store.names(directory)):
        if not missing:
            break
        try:
            journal = scan_journal(store, directory / name)
        except LogDamagedError as error:
            damaged.append(str(error))
            continue
        for batch in journal_batches(journal):
            rows = list(rows_from_batch(_wanted_rows(batch, missing)))
            if not rows:
                continue
            keys = [row.key for row in rows]
            # A put that was cut short leaves its key behind, and a second put of it would be refused.
            await data_plane.clear(Partition.STAGING, keys, cut=None)
            await data_plane.put_staged(rows)
            tokens += sum(row.completion_tokens for row in rows)
            for key in keys:
                del missing[key]
    return PutBack(
        num_rows=len(wanted) - len(missing),
        completion_tokens=tokens,
        missing=tuple(sorted(missing)),
        damaged=tuple(damaged),
    )


def _wanted_rows(batch: pa.RecordBatch, wanted: Mapping[str, RowTag]) -> pa.RecordBatch:
    """Return those rows of a batch that are wanted, with that content."""
    identities = zip(*(batch.column(name).to_pylist() for name in JOURNAL_IDENTITY), strict=True)
    keys = [staging_key(*identity) for identity in identities]
    digests = batch.column("row_digest").to_pylist()
    places = {
        key: place
        for place, (key, digest) in enumerate(zip(keys, digests, strict=True))
        if key in wanted and wanted[key].digest == digest
    }
    return batch.take(pa.array(places.values(), pa.int32()))
