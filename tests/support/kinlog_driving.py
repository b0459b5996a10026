"""What tests look at while a group is driven."""

import asyncio
from collections import Counter
from collections.abc import Callable

from kinlog_bench import Bench
from kinlog_interleavings import ticks

from kinlog.lineage.state import GroupPhase
from kinlog.schemas.reasons import Granularity, Partition

COHORT = Granularity.PROMPT_GROUP


def phase_of(bench: Bench, group_id: int) -> GroupPhase | None:
    group = bench.p.groups.get(group_id)
    return group.phase if group is not None else None


def staged(bench: Bench) -> set[str]:
    return set(bench.data_plane.rows[Partition.STAGING])


def canonical(bench: Bench) -> set[str]:
    return set(bench.data_plane.rows[Partition.TRAINING])


def orders(bench: Bench, group_id: int) -> Counter[tuple[int, int]]:
    """How often each (generation, attempt) of a group was sent to a worker."""
    return Counter((o.generation, o.attempt) for o in bench.pool.calls if o.group_id == group_id)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(600):
        while not condition():
            await ticks(1)
