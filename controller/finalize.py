"""Finalizing a group: its canonical rows published once, whatever becomes of calls and answers on the way."""

import asyncio
from collections.abc import Sequence

from kinlog.controller.eviction import commit_evictions
from kinlog.controller.failures import park, pause
from kinlog.controller.runtime import Runtime, clear_group_rows, clear_rows, rows_cleared_events
from kinlog.lineage import decide
from kinlog.lineage.ledger import Cut
from kinlog.lineage.state import GroupState
from kinlog.replay.recovery.inventory import staged_rows
from kinlog.schemas.errors import DataPlaneError, WorkerLostError
from kinlog.schemas.events import (
    CanonicalRowRef,
    Event,
    FinalizeFailed,
    FinalizeStarted,
    GroupDropped,
    GroupFinalized,
    SiblingSealed,
)
from kinlog.schemas.orders import FinalizeOrder, FinalizeRejected
from kinlog.schemas.reasons import Partition, Reason, Validity
from kinlog.schemas.receipts import canonical_key

__all__ = ["GroupFinalizer"]

#: A finalize is two calls to the data plane, each of which ends a little after its time-out at the latest.
_GRACE_S = 5.0


class GroupFinalizer:
    """Has the finalizer publish groups, and records what came of it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def _live(self, group_id: int) -> GroupState | None:
        group = self._runtime.projection.groups.get(group_id)
        return group if group is not None and group.live else None

    async def finalize(self, group_id: int) -> None:
        """Publish a group's canonical rows, once; what comes to nothing is recorded."""
        runtime = self._runtime
        with runtime.waits.on(f"the finalizer to be ready for group {group_id}"):
            await runtime.finalizer.available()
        async with runtime.barrier.cut("finalize") as cut:
            group = self._live(group_id)
            if group is None:
                return
            ticket = runtime.ledger.commit(cut, FinalizeStarted(group_id=group_id))
        await ticket.durable()
        sealed = tuple(s.sealed for _, s in sorted(group.siblings.items()) if s.sealed is not None)
        order = FinalizeOrder(group_id=group_id, prompt=group.prompt, siblings=sealed)
        # Outside of any cut: a checkpoint must not wait for a remote call.
        try:
            async with asyncio.timeout(2 * runtime.config.data_plane.call_timeout_s + _GRACE_S):
                with runtime.waits.on(f"the finalizer to finalize group {group_id}"):
                    answer = await runtime.finalizer.finalize(order)
        except (WorkerLostError, DataPlaneError, TimeoutError) as error:
            await self._finalize_unanswered(group_id, sealed, error)
            return
        async with runtime.barrier.cut("finalized") as cut:
            if isinstance(answer, FinalizeRejected):
                if self._live(group_id) is not None:
                    await self._reject_finalize(cut, group, answer)
                    await self._clear_unanswered(cut, group_id, sealed)
            elif self._live(group_id) is None:
                await self._clear_published(cut, group, answer)
            else:
                await self._record_finalized(cut, group, answer)

    async def _finalize_unanswered(
        self, group_id: int, sealed: Sequence[SiblingSealed], error: Exception
    ) -> None:
        """Record a finalize whose outcome is unknown, and wait before it is driven again, or park the group.

        Canonical keys follow from identity: driving it again publishes the same rows.
        """
        reason = Reason.WORKER_LOST if isinstance(error, WorkerLostError) else Reason.INFRASTRUCTURE_FAILURE
        if isinstance(error, TimeoutError):
            reason = Reason.TIMEOUT
        async with self._runtime.barrier.cut("finalize_failed") as cut:
            group = self._live(group_id)
            if group is None:
                return
            failed = FinalizeFailed(group_id=group_id, reason=reason, charged=True, detail=str(error)[:500])
            if decide.finalize_budget_spent(group):
                tries = group.finalize_failures + 1
                await park(
                    self._runtime, cut, group, f"finalized {tries} times without an answer: {error}", failed
                )
                await self._clear_unanswered(cut, group_id, sealed)
                return
            self._runtime.ledger.commit(cut, failed)
        await pause(self._runtime, group.finalize_failures, f"group {group_id} before its next finalize")

    async def _record_finalized(self, cut: Cut, group: GroupState, rows: tuple[CanonicalRowRef, ...]) -> None:
        runtime, group_id = self._runtime, group.group_id
        results = [sibling.sealed for sibling in group.siblings.values()]
        valid = sum(r is not None and r.validity is Validity.VALID for r in results) / len(results)
        events: tuple[Event, ...] = (GroupFinalized(group_id=group_id, rows=rows, valid_fraction=valid),)
        too_few = valid < runtime.config.rollout.min_valid_fraction_per_group
        if too_few:
            # In the same frame: a group that is finalized for a moment may be claimed in it.
            detail = f"{valid:.3f} of its siblings are valid"
            dropped = GroupDropped(group_id=group_id, reason=Reason.LOW_VALID_FRACTION, detail=detail)
            events = (*events, dropped)
        ticket = runtime.ledger.commit(cut, *events)
        evicted = commit_evictions(runtime, cut)  # at once: nobody may find the buffer above its bound
        await ticket.durable()
        # Durable first: the staged rows are the group's only ones until the log says that the canonical ones are.
        await clear_group_rows(runtime, cut, [group], Reason.FINALIZED)
        if too_few:
            await clear_group_rows(runtime, cut, [group], Reason.LOW_VALID_FRACTION)
        await clear_group_rows(runtime, cut, evicted, Reason.EVICTED)

    async def _clear_published(self, cut: Cut, group: GroupState, rows: tuple[CanonicalRowRef, ...]) -> None:
        """Clear the canonical rows of a group that left while the finalizer was at work: nobody else knows of them."""
        keys = [canonical_key(group.group_id, row.generation, row.attempt) for row in rows]
        await self._clear(cut, Partition.TRAINING, Reason.UNREFERENCED, group.group_id, keys)

    async def _clear_unanswered(self, cut: Cut, group_id: int, sealed: Sequence[SiblingSealed]) -> None:
        """Clear the canonical rows that a finalize whose answer was lost may have published, and the log knows nothing of.

        Those of siblings that stay are published again, under the same keys, should the group come to that.
        """
        keys = [canonical_key(group_id, result.generation, result.attempt) for result in sealed]
        await clear_rows(self._runtime, cut, Partition.TRAINING, keys)

    async def _reject_finalize(self, cut: Cut, group: GroupState, answer: FinalizeRejected) -> None:
        """Have what is no good generated again, or park the group when that has been tried often enough."""
        failed = FinalizeFailed(
            group_id=answer.group_id, reason=answer.reason, charged=True, detail=answer.detail[:500]
        )
        superseded = decide.supersede_attempt(
            self._runtime.projection, answer.group_id, answer.generation, answer.reason, answer.detail
        )
        keys = [key for event in superseded for key in staged_rows(group, group.siblings[event.generation])]
        if decide.finalize_budget_spent(group):
            detail = f"generation {answer.generation}: {answer.reason}: {answer.detail}"
            await park(self._runtime, cut, group, detail, failed, *superseded)
        else:
            self._runtime.ledger.commit(cut, failed, *superseded)
        await self._clear(cut, Partition.STAGING, answer.reason, group.group_id, keys)

    async def _clear(
        self, cut: Cut, partition: Partition, reason: Reason, group_id: int, keys: list[str]
    ) -> None:
        if keys:
            events = rows_cleared_events(partition, reason, len(keys), [group_id])
            await self._runtime.ledger.commit(cut, *events).durable()
            await clear_rows(self._runtime, cut, partition, keys)
