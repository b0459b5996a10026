"""What the parts of a running controller share."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from kinlog.controller.barrier import Barrier
from kinlog.controller.changes import Changes
from kinlog.controller.protocols import DataPlane, Finalizer, Prompts, RolloutPool, Trainer
from kinlog.controller.samplers import Sampler
from kinlog.controller.stop_request import StopRequest
from kinlog.controller.waits import Waits
from kinlog.controller.worker_budget import WorkerBudget
from kinlog.lineage.ledger import Cut, Ledger
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.state import GroupPhase, GroupState, Projection
from kinlog.replay.recovery.inventory import canonical_rows, staged_rows
from kinlog.schemas.config import RunConfig
from kinlog.schemas.errors import DataPlaneError
from kinlog.schemas.events import Event, RowsCleared
from kinlog.schemas.reasons import Partition, Reason
from kinlog.schemas.receipts import canonical_key

__all__ = ["Runtime", "clear_rows", "clear_group_rows", "rows_cleared_events"]

_logger = logging.getLogger(__name__)

#: Groups named by one ``rows_cleared`` event: an event stays small.
_GROUPS_PER_EVENT = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """The parts of a running controller. They are made once, at start, and never exchanged."""

    config: RunConfig
    directory: RunDirectory
    ledger: Ledger
    barrier: Barrier
    changes: Changes
    budget: WorkerBudget
    prompts: Prompts
    sampler: Sampler
    data_plane: DataPlane
    pool: RolloutPool
    finalizer: Finalizer
    trainer: Trainer
    clock_us: Callable[[], int]
    sleep: Callable[[float], Awaitable[None]] = field(default=asyncio.sleep)
    waits: Waits = field(default_factory=Waits)
    stop: StopRequest = field(default_factory=StopRequest)
    uncleared: dict[Partition, set[str]] = field(default_factory=dict)
    """Rows whose clearing has failed so far, by partition."""

    @property
    def projection(self) -> Projection:
        return self.ledger.projection

    @property
    def exhausted(self) -> bool:
        """Whether every prompt of the dataset is drawn. More epochs may be configured for a later life."""
        return not self.prompts.has(self.projection.draw_cursor)


async def clear_rows(runtime: Runtime, cut: Cut, partition: Partition, keys: Iterable[str]) -> None:
    """Remove rows from the data plane. When that fails they wait for the next time: a row that nobody refers to harms
    nobody, and the health probe is there to judge the data plane."""
    # Taken out while they are attempted: cuts run side by side, and no key may be cleared by two of them at once.
    again = runtime.uncleared.pop(partition, set())
    if partition is Partition.TRAINING and again:
        # A sibling whose finalize was driven again has published under the same key since: the row is wanted.
        again -= _canonical_keys_in_use(runtime.projection)
    attempted = sorted(again.union(keys))
    if not attempted:
        return
    cleared = False
    try:
        await runtime.data_plane.clear(partition, attempted, cut)
        cleared = True
    except DataPlaneError as error:
        _logger.warning("%d rows of %s are not cleared yet: %s", len(attempted), partition, error)
    finally:
        if not cleared:
            runtime.uncleared.setdefault(partition, set()).update(attempted)


def _canonical_keys_in_use(p: Projection) -> set[str]:
    return {
        canonical_key(group.group_id, sibling.generation, sibling.attempt)
        for group in p.live_groups()
        for sibling in group.siblings.values()
    }


async def clear_group_rows(runtime: Runtime, cut: Cut, groups: list[GroupState], reason: Reason) -> None:
    """Record, then remove, all rows of groups that no longer need them."""
    keys: dict[Partition, list[str]] = {Partition.STAGING: [], Partition.TRAINING: []}
    for group in groups:
        keys[Partition.TRAINING] += canonical_rows(group)
        for sibling in group.siblings.values():
            keys[Partition.STAGING] += staged_rows(group, sibling)
    if reason is Reason.FINALIZED:
        keys[Partition.TRAINING] = []
    elif all(
        group.phase in (GroupPhase.FINALIZED, GroupPhase.CLAIMED, GroupPhase.APPLIED) for group in groups
    ):
        keys[Partition.STAGING] = []  # were cleared when the group was finalized
    group_ids = [group.group_id for group in groups]
    for partition, partition_keys in keys.items():
        if partition_keys:
            events = rows_cleared_events(partition, reason, len(partition_keys), group_ids)
            await runtime.ledger.commit(cut, *events).durable()
            await clear_rows(runtime, cut, partition, partition_keys)


def rows_cleared_events(
    partition: Partition, reason: Reason, num_rows: int, group_ids: list[int]
) -> tuple[Event, ...]:
    """Return the events for clearing rows of many groups; the count is the first one's."""
    chunks = [group_ids[i : i + _GROUPS_PER_EVENT] for i in range(0, len(group_ids), _GROUPS_PER_EVENT)] or [
        []
    ]
    return tuple(
        RowsCleared(
            partition=partition, reason=reason, num_rows=num_rows if place == 0 else 0, group_ids=tuple(chunk)
        )
        for place, chunk in enumerate(chunks)
    )
