"""The data plane: rows put, read back, listed, cleared, saved and loaded, by typed identity and checked by digest.

What callers may rely on, whatever TransferQueue does:

- A row is visible once its tag says so, and the tag is written last, by the put itself, after TransferQueue has
  confirmed every column. A put that fails or is cancelled clears its keys.
- A visible row never changes: putting the same row again does nothing, another row under the same key is an error.
- A read returns every row that was asked for, in full, with the digest that it was put with, or raises. Missing keys
  and columns, which TransferQueue leaves out without a word, and another key's data under a reused index are errors.
- Every call ends: within ``call_timeout_s``, and a few seconds for cleaning up. The error names the call and its keys.

The rules between processes are the caller's to keep: a key belongs to one attempt and has one writer, and rows are
cleared inside a cut, by one owner, when nobody reads or writes them any more.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

import torch

from kinlog.lineage.store import LocalStore
from kinlog.schemas.errors import RowCorruptError
from kinlog.schemas.orders import PutBack
from kinlog.schemas.reasons import Partition
from kinlog.schemas.rows import RowTag
from kinlog.schemas.settings import DataPlaneSettings
from kinlog.workers.put_back import put_rows_back
from kinlog.workers.row_calls import clear_rows, get_rows, put_rows
from kinlog.workers.row_columns import canonical_from_columns, rows_to_columns, staged_from_columns
from kinlog.workers.row_tags import read_tag, write_tag
from kinlog.workers.rows import CanonicalRow, Row, StagedRow, row_digest
from kinlog.workers.tq_native import TQ_ENVIRONMENT, TqClient
from kinlog.workers.tq_session import TqCall, TqSession, required_cpus

__all__ = ["DataPlane", "TQ_ENVIRONMENT", "required_cpus"]

#: Rows cleared by one request. Each request costs a pass over the whole partition (15 ms at 100,000 rows) on the
#: controller's only thread; one request for everything would keep that thread from everybody else.
_CLEAR_BATCH_ROWS = 1024

R = TypeVar("R", StagedRow, CanonicalRow)


class DataPlane:
    """This process's access to the cluster's rows. Make one with :meth:`start` or :meth:`attach`.

    Methods may be awaited from any event loop, also concurrently; payloads are encoded and decoded on a thread of the
    data plane's own. All raise :class:`DataPlaneError` when TransferQueue fails or does not answer in time.
    """

    def __init__(self, session: TqSession) -> None:
        self._session = session
        # A clear looks up indexes, and frees them two requests later. Of two clears of one key the second would free an
        # index that a put has taken meanwhile, and that put's row would vanish. Used on the session's event loop only.
        self._clearing = asyncio.Lock()

    @classmethod
    async def start(cls, settings: DataPlaneSettings) -> Self:
        """Start the cluster's data plane, owned by this process: it ends when this process does.

        Raises
        ------
        DataPlaneError
            When Ray is not running, has too few free logical CPUs (:func:`required_cpus`), or already has a data plane.
        """
        return cls(await TqSession.start(settings))

    @classmethod
    async def attach(cls, settings: DataPlaneSettings) -> Self:
        """Attach this process to the data plane that another process of the Ray cluster started.

        Raises
        ------
        DataPlaneError
            When there is none, or it does not answer in time.
        """
        return cls(await TqSession.attach(settings))

    @property
    def num_storage_units(self) -> int:
        """Storage units of this data plane; a checkpoint loads only into as many as it was saved from."""
        return self._session.num_storage_units

    async def put_staged(self, rows: Sequence[StagedRow]) -> None:
        """Put the rows of model calls, and return once all are visible.

        Raises
        ------
        ValueError
            When two rows have the same key: TransferQueue would find out after writing, and leak them.
        DataPlaneError
            When another row is already there under one of the keys, or the put failed: its keys are cleared then.
        """
        await self._put("put_staged", Partition.STAGING, rows)

    async def put_canonical(self, rows: Sequence[CanonicalRow]) -> None:
        """Put the training examples of siblings, and return once all are visible. Raises as :meth:`put_staged`."""
        await self._put("put_canonical", Partition.TRAINING, rows)

    async def get_staged(self, keys: Sequence[str]) -> dict[str, StagedRow]:
        """Return the staged rows of ``keys``, in their order.

        Raises
        ------
        ValueError
            When a key is given twice.
        RowsMissingError
            When a key is absent, or its put has not completed; the message names the first few.
        RowCorruptError
            When a row's content is not what was put under its key.
        DataPlaneError
            When a column is missing.
        """

        def build(tag: RowTag, values: Mapping[str, torch.Tensor]) -> StagedRow:
            return staged_from_columns((tag.group_id, tag.generation, tag.attempt, tag.call), values)

        return await self._get("get_staged", Partition.STAGING, keys, build)

    async def get_canonical(self, keys: Sequence[str]) -> dict[str, CanonicalRow]:
        """Return the training examples of ``keys``, in their order. Raises as :meth:`get_staged`."""

        def build(tag: RowTag, values: Mapping[str, torch.Tensor]) -> CanonicalRow:
            return canonical_from_columns((tag.group_id, tag.generation, tag.attempt), values)

        return await self._get("get_canonical", Partition.TRAINING, keys, build)

    async def list_rows(self, partition: Partition) -> dict[str, RowTag]:
        """Return the tag of every key in ``partition``, also of those whose put has not completed.

        It takes the controller's only thread (about 25 ms for 10,000 keys): for checkpoints and restarts, not to poll.
        """

        async def body(client: TqClient) -> dict[str, RowTag]:
            listing = await client.async_kv_list(partition.value)
            return {key: read_tag(key, stored) for key, stored in listing.get(partition.value, {}).items()}

        return await self._session.run(TqCall("list_rows", partition.value), body)

    async def clear(self, partition: Partition, keys: Iterable[str], cut: object) -> int:
        """Remove rows, and return how many were there; absent keys are skipped.

        Parameters
        ----------
        partition, keys:
            What to remove, in requests of bounded size.
        cut:
            The capability to change lineage and data plane together. A freed index is reused at once: a reader, a
            writer or a save that is still busy with one of the keys would meet another key's data.
        """
        del cut  # holding one is what counts
        unique = list(dict.fromkeys(keys))
        cleared = 0
        for start in range(0, len(unique), _CLEAR_BATCH_ROWS):
            cleared += await self._clear_batch(partition, unique[start : start + _CLEAR_BATCH_ROWS])
        return cleared

    async def save(self, directory: Path, metadata: Mapping[str, str | int], *, timeout_s: float) -> None:
        """Write the whole data plane to ``directory``, which must be absolute and not exist yet.

        Hold everything that clears, rewrites or tags meanwhile, in every process. The files are not fsynced. A save
        that was given up may still write to the directory later: never use that directory again. Until such a save
        ends, further ones are refused; all other calls go on.

        Raises
        ------
        DataPlaneError
            When it failed or took longer than ``timeout_s``, or an earlier save is still running.
        """
        await self._session.save(directory, metadata, timeout_s=timeout_s)

    async def load(self, directory: Path, *, timeout_s: float) -> None:
        """Fill this fresh data plane from a saved directory, whose files a manifest has vouched for.

        Raises
        ------
        DataPlaneError
            With nothing changed, unless this process is the owner, the data plane holds no key, and it has as many
            storage units as the saved one. When loading itself fails the state is undefined: everything but
            :meth:`close` is refused from then on.
        """
        await self._session.load(directory, timeout_s=timeout_s)

    async def put_back(self, journal: Path, wanted: Mapping[str, RowTag]) -> PutBack:
        """Put staged rows that were lost back from the row journal. Before any consumer exists.

        Raises
        ------
        DataPlaneError
            A put failed.
        """
        return await put_rows_back(self, LocalStore(), journal, wanted)

    async def ping(self) -> None:
        """Raise :class:`DataPlaneError` unless the controller and every storage unit answer in time."""
        await self._session.ping()

    async def close(self) -> None:
        """End the data plane for every process. Only its owner may, and before ``ray.shutdown()``. Idempotent."""
        await self._session.close()

    async def detach(self) -> None:
        """Let go of the data plane in this process only, which attached to it. Idempotent."""
        await self._session.detach()

    async def _put(self, name: str, partition: Partition, rows: Sequence[Row]) -> None:
        if not rows:
            return
        keys = [row.key for row in rows]
        _check_unique(name, keys)
        call = TqCall(name, partition.value, keys)

        async def body(client: TqClient) -> None:
            columns = rows_to_columns(partition, rows)
            await put_rows(client, call, partition, keys, columns, [write_tag(row) for row in rows])

        await self._session.run(call, body)

    async def _get(
        self,
        name: str,
        partition: Partition,
        keys: Sequence[str],
        build: Callable[[RowTag, Mapping[str, torch.Tensor]], R],
    ) -> dict[str, R]:
        if not keys:
            return {}
        _check_unique(name, keys)
        call = TqCall(name, partition.value, keys)

        async def body(client: TqClient) -> dict[str, R]:
            found = await get_rows(client, call, partition, list(keys))
            return {
                key: _rebuild(call, key, tag, values, build)
                for key, (tag, values) in zip(keys, found, strict=True)
            }

        return await self._session.run(call, body)

    async def _clear_batch(self, partition: Partition, keys: list[str]) -> int:
        async def body(client: TqClient) -> int:
            async with self._clearing:
                return await clear_rows(client, partition, keys)

        return await self._session.run(TqCall("clear", partition.value, keys), body)


def _rebuild(
    call: TqCall,
    key: str,
    tag: RowTag,
    values: Mapping[str, torch.Tensor],
    build: Callable[[RowTag, Mapping[str, torch.Tensor]], R],
) -> R:
    try:
        row = build(tag, values)
    except ValueError as error:
        raise RowCorruptError(f"{call}: what is stored under {key} is no such row: {error}") from error
    found = row_digest(row)
    if row.key != key or found != tag.digest:
        raise RowCorruptError(
            f"{call}: {key} does not hold what was put there: expected digest {tag.digest.hex()}, found {found.hex()} of "
            f"row {row.key}. It was cleared or rewritten while in use: treat it as lost."
        )
    return row


def _check_unique(name: str, keys: Sequence[str]) -> None:
    if len(set(keys)) < len(keys):
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"{name}: every key may be given once, found {twice[:4]} more often")
