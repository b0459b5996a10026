"""Clearing rows: what cannot be cleared waits, and what has become wanted meanwhile is left alone."""

import asyncio

from kinlog_bench import Bench
from kinlog_builders import FreeCut

from kinlog.controller.runtime import clear_rows
from kinlog.schemas.errors import DataPlaneError
from kinlog.schemas.reasons import Partition
from kinlog.schemas.receipts import canonical_key


def refuse(partition: Partition, keys: list[str]) -> None:
    raise DataPlaneError("scripted")


async def test_rows_that_could_not_be_cleared_go_with_the_next_ones():
    bench = Bench()
    bench.data_plane.on_clear = refuse
    await clear_rows(bench.runtime, FreeCut(), Partition.STAGING, ["a", "b"])
    cleared: list[str] = []
    bench.data_plane.on_clear = lambda partition, keys: cleared.extend(keys)
    await clear_rows(bench.runtime, FreeCut(), Partition.STAGING, ["c"])
    await clear_rows(bench.runtime, FreeCut(), Partition.STAGING, [])
    assert cleared == ["a", "b", "c"]


async def test_row_that_was_published_again_since_is_not_cleared_with_those_left_over():
    # A finalize whose answer was lost had published it; clearing it failed; then its group was finalized after all,
    # under the same key.
    bench = Bench()
    group_id = bench.admitted()
    key = canonical_key(group_id, 0, 1)
    bench.data_plane.on_clear = refuse
    await clear_rows(bench.runtime, FreeCut(), Partition.TRAINING, [key, "gone"])
    bench.data_plane.on_clear = lambda partition, keys: None
    await bench.driver.drive(group_id)
    assert key in bench.data_plane.rows[Partition.TRAINING]
    await clear_rows(bench.runtime, FreeCut(), Partition.TRAINING, ["other"])
    assert key in bench.data_plane.rows[Partition.TRAINING]
    assert not bench.runtime.uncleared.get(Partition.TRAINING)


async def test_no_row_is_cleared_by_two_cuts_at_once():
    bench = Bench()
    clear = bench.data_plane.clear
    under_way: set[str] = set()
    overlaps: list[str] = []

    async def slow_clear(partition: Partition, keys: list[str], cut: FreeCut) -> int:
        overlaps.extend(under_way & set(keys))
        under_way.update(keys)
        await asyncio.sleep(0)
        under_way.difference_update(keys)
        return await clear(partition, keys, cut)

    bench.data_plane.on_clear = refuse
    await clear_rows(bench.runtime, FreeCut(), Partition.STAGING, ["left over"])
    bench.data_plane.on_clear = lambda partition, keys: None
    bench.data_plane.clear = slow_clear
    await asyncio.gather(
        clear_rows(bench.runtime, FreeCut(), Partition.STAGING, ["a"]),
        clear_rows(bench.runtime, FreeCut(), Partition.STAGING, ["b"]),
    )
    assert overlaps == []
