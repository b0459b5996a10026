"""In-memory parts whose workers keep a real row journal on disk: what they stage survives the data plane."""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
from kinlog_fake_parts import FakeDataPlane, FakeParts, FakePool

from kinlog.controller.protocols import Workers
from kinlog.lineage.journal import Journal
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.store import LocalStore, Store
from kinlog.replay.recovery.journal import rows_in_journal
from kinlog.schemas.events import SiblingSealed
from kinlog.schemas.journal_columns import journal_schema
from kinlog.schemas.orders import PutBack, RolloutOrder
from kinlog.schemas.reasons import Partition, Validity
from kinlog.schemas.rows import RowTag


def journal_in(
    run: RunDirectory, *, segment_bytes: int = 8_192, store: Store | None = None, clock_us: int = 1
) -> Journal:
    return Journal(
        store or LocalStore(),
        run.journal,
        writer_version="0",
        segment_bytes=segment_bytes,
        clock_us=lambda: clock_us,
    )


def journal_rows(sealed: SiblingSealed) -> pa.RecordBatch:
    """The rows behind a seal, as far as anything but their identity is of interest."""
    assert sealed.receipt is not None
    rows = [
        {
            "group_id": sealed.group_id,
            "generation": sealed.generation,
            "attempt": sealed.attempt,
            "call": call.call,
            "row_digest": call.row_digest,
            "prompt_tokens": 1,
            "token_ids": [1, 2],
            "logprobs": [-0.5],
            "weight_versions": [0],
        }
        for call in sealed.receipt.calls
    ]
    return pa.RecordBatch.from_pylist(rows, schema=journal_schema())


class JournalledPool(FakePool):
    def __init__(self, data_plane: FakeDataPlane, journal: Journal) -> None:
        super().__init__(data_plane)
        self.journal = journal

    def seal(self, order: RolloutOrder, *, validity: Validity = Validity.VALID) -> SiblingSealed:
        sealed = super().seal(order, validity=validity)
        self.journal.append(journal_rows(sealed))
        return sealed


class JournalledParts(FakeParts):
    """One life's parts, of the run in this directory."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._run = RunDirectory(path)

    async def start_data_plane(self) -> FakeDataPlane:
        data_plane = await super().start_data_plane()

        async def put_back(journal: Path, wanted: Mapping[str, RowTag]) -> PutBack:
            found = rows_in_journal(LocalStore(), journal, wanted)
            data_plane.rows[Partition.STAGING].update(found)
            return PutBack(num_rows=len(found), missing=tuple(sorted(wanted.keys() - found.keys())))

        data_plane.put_back = put_back  # type: ignore[method-assign]
        return data_plane

    async def start_workers(self) -> Workers:
        prepare, self.prepare = self.prepare, lambda parts: None
        workers = await super().start_workers()
        self.pool = JournalledPool(self.data_plane, journal_in(self._run))
        self.trainer._pool = self.pool
        prepare(self)
        return Workers(self.pool, workers.finalizer, workers.trainer)
