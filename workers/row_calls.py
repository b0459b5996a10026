"""Putting, getting and clearing rows, as coroutines over TransferQueue's client.

A put is four requests: make the keys, store the columns, ask whether they are really stored, write the tags. TransferQueue's
own put saves the third, and then reports success when the notice that the columns are stored was lost: it only logs that.
"""

import asyncio
from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDict

from kinlog.schemas.errors import DataPlaneError, RowsMissingError
from kinlog.schemas.reasons import Partition
from kinlog.schemas.rows import RowTag
from kinlog.workers.row_tags import read_tag
from kinlog.workers.rows import ROW_DTYPES
from kinlog.workers.tq_native import RowsMeta, TqClient
from kinlog.workers.tq_session import TqCall

__all__ = ["put_rows", "get_rows", "clear_rows"]

_CLEANUP_TIMEOUT_S = 2.0
_SHOWN_KEYS = 4


async def put_rows(
    client: TqClient,
    call: TqCall,
    partition: Partition,
    keys: list[str],
    columns: Mapping[str, torch.Tensor],
    tags: Sequence[Mapping[str, object]],
) -> None:
    """Put rows and make them visible; rows that are visible already are left alone.

    Raises
    ------
    DataPlaneError
        When another row is visible under one of the keys, or the columns did not arrive.
    """
    tagging = False
    try:
        meta = await client.async_kv_retrieve_meta(keys=keys, partition_id=partition.value, create=True)
        fresh = _positions_to_put(call, keys, meta, tags)
        if not fresh:
            return
        if len(fresh) < len(keys):
            keys = [keys[position] for position in fresh]
            tags = [tags[position] for position in fresh]
            meta = meta.select_samples(fresh)
            columns = {name: _select(column, fresh) for name, column in columns.items()}
        payload = TensorDict(dict(columns), batch_size=[len(keys)])
        # The client's own `async_put` resets torch's thread count in the calling thread, for good, and the count is
        # what bit-identical training depends on; its storage manager's does not.
        await client.storage_manager.put_data(payload, meta)
        meta = await client.async_kv_retrieve_meta(keys=keys, partition_id=partition.value, create=False)
        missing = set(columns) - set(meta.field_names)
        if meta.size != len(keys) or missing:
            raise DataPlaneError(
                f"{call}: expected {len(keys)} rows with columns {sorted(columns)}, found {meta.size} rows without "
                f"{sorted(missing)}: the storage units' confirmation was lost, or somebody cleared the keys"
            )
        meta.update_custom_meta([dict(tag) for tag in tags])
        tagging = True
        await client.async_set_custom_meta(meta)
    except BaseException as error:
        # Once the tags are under way the rows may be visible, and visible rows are cleared inside a cut only, since a
        # save may be under way as well. What remains then is listed, belongs to nobody, and the inventory clears it.
        if not tagging:
            await _clear_leavings(client, partition, keys, error)
        raise


async def get_rows(
    client: TqClient, call: TqCall, partition: Partition, keys: list[str]
) -> list[tuple[RowTag, dict[str, torch.Tensor]]]:
    """Return the tag and the column values of every key, in the order of ``keys``.

    Raises
    ------
    RowsMissingError
        When a key is absent, or not visible yet.
    DataPlaneError
        When a column is missing.
    """
    meta = await client.async_kv_retrieve_meta(keys=keys, partition_id=partition.value, create=False)
    if meta.size != len(keys):
        # Absent keys are left out without a word, and the rest moves up into their places.
        listing = await client.async_kv_list(partition.value)
        present = listing.get(partition.value, {})
        raise _rows_missing(call, partition, keys, [key for key in keys if key not in present], "are absent")
    tags = [read_tag(key, stored) for key, stored in zip(keys, meta.custom_meta, strict=True)]
    undone = [key for key, tag in zip(keys, tags, strict=True) if not tag.done]
    if undone:
        raise _rows_missing(call, partition, keys, undone, "have not been put completely")
    names = list(ROW_DTYPES[partition])
    missing = sorted(set(names) - set(meta.field_names))
    if missing:
        raise DataPlaneError(f"{call}: expected columns {names}, but at least one row has no {missing}")
    data = await client.storage_manager.get_data(meta.select_fields(names))
    values = {name: _unbind(call, name, data[name], len(keys)) for name in names}
    return [(tag, {name: values[name][position] for name in names}) for position, tag in enumerate(tags)]


async def clear_rows(client: TqClient, partition: Partition, keys: list[str]) -> int:
    """Remove the rows of ``keys`` that are there, and return how many."""
    meta = await client.async_kv_retrieve_meta(keys=keys, partition_id=partition.value, create=False)
    if meta.size:
        await client.async_clear_samples(meta)
    return meta.size


def _positions_to_put(
    call: TqCall, keys: Sequence[str], meta: RowsMeta, tags: Sequence[Mapping[str, object]]
) -> list[int]:
    if meta.size != len(keys):
        raise DataPlaneError(f"{call}: asked for {len(keys)} keys to be made, found {meta.size}")
    fresh: list[int] = []
    for position, (key, stored, tag) in enumerate(zip(keys, meta.custom_meta, tags, strict=True)):
        there = read_tag(key, stored)
        if not there.done:
            fresh.append(position)
        elif there.digest != tag["digest"]:
            raise DataPlaneError(
                f"{call}: key {key} already holds another row: expected digest {read_tag(key, tag).digest.hex()}, found "
                f"{there.digest.hex()}. A key belongs to one attempt, and is never rewritten: find who else puts it."
            )
    return fresh


async def _clear_leavings(
    client: TqClient, partition: Partition, keys: list[str], cause: BaseException
) -> None:
    """Clear what a failed put left of ``keys``. Safe outside a cut: nobody has seen them, nor will a save vouch for them."""
    try:
        async with asyncio.timeout(_CLEANUP_TIMEOUT_S):
            meta = await client.async_kv_retrieve_meta(keys=keys, partition_id=partition.value, create=False)
            left = [position for position, stored in enumerate(meta.custom_meta) if not stored]
            if left:
                await client.async_clear_samples(meta.select_samples(left))
    except Exception as error:  # noqa: BLE001 - the put's own failure is what the caller must see
        cause.add_note(f"and its keys could not be cleared: {type(error).__name__}: {error}")


def _rows_missing(
    call: TqCall, partition: Partition, keys: Sequence[str], missing: Sequence[str], state: str
) -> RowsMissingError:
    return RowsMissingError(
        f"{call}: {len(missing)} of {len(keys)} rows {state} in partition {partition.value!r}, the first of them "
        f"{list(missing[:_SHOWN_KEYS])}"
    )


def _select(column: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    values = column.unbind()
    return torch.nested.as_nested_tensor([values[position] for position in positions], layout=torch.jagged)


def _unbind(call: TqCall, name: str, column: object, rows: int) -> Sequence[torch.Tensor]:
    values = column.unbind() if isinstance(column, torch.Tensor) else ()
    if len(values) != rows:
        raise DataPlaneError(
            f"{call}: column {name}: expected a tensor of {rows} rows, found {type(column).__name__} of {len(values)}"
        )
    return values
