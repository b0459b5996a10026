"""The train pump: selects finalized groups, claims them, steps the optimizer, publishes weights, takes checkpoints."""

from collections.abc import Callable

from kinlog.controller.checkpoint import Checkpointer
from kinlog.controller.hopeless import refuse_nothing_trained
from kinlog.controller.preemption import rest
from kinlog.controller.runtime import Runtime, clear_group_rows
from kinlog.controller.samplers import may_start
from kinlog.lineage.state import GroupPhase, GroupState
from kinlog.replay.recovery.inventory import canonical_rows
from kinlog.schemas.errors import CheckpointError
from kinlog.schemas.events import (
    Event,
    GroupClaimed,
    GroupDropped,
    StepApplied,
    StepShrunk,
    WeightsPublished,
)
from kinlog.schemas.orders import TrainMetrics, TrainOrder
from kinlog.schemas.reasons import CheckpointKind, Reason

__all__ = ["TrainPump"]


class TrainPump:
    """Trains step after step until the configured number, or until nothing is left to train on."""

    def __init__(
        self, runtime: Runtime, checkpointer: Checkpointer, on_step: Callable[[TrainMetrics], None]
    ) -> None:
        self._runtime = runtime
        self._checkpointer = checkpointer
        self._on_step = on_step

    async def run(self) -> None:
        runtime = self._runtime
        settings = runtime.config.checkpointing
        while runtime.projection.train_step < runtime.config.trainer.max_steps:
            group_ids = await self._select()
            if not group_ids:
                refuse_nothing_trained(runtime)
                break
            await self._step(group_ids)
            if settings.enabled and runtime.projection.train_step % settings.every_steps == 0:
                await self._checkpointer.save()
        if settings.enabled and not self._checkpointed():
            saved = await self._checkpointer.save()
            if saved.problem:
                # A failed save costs a checkpoint and not the run, but there is no later one to make up for the last.
                raise CheckpointError(
                    f"training is done, and its last checkpoint {saved.name} failed: {saved.problem}. Resume the run: "
                    "it goes on from the checkpoint before."
                )

    def _checkpointed(self) -> bool:
        p = self._runtime.projection
        return any(c.kind is CheckpointKind.TRAINER and c.train_step == p.train_step for c in p.checkpoints)

    async def _select(self) -> tuple[int, ...]:
        """Claim the next step's groups, and return them in order; none when there will be no more."""
        runtime = self._runtime
        while True:
            await runtime.changes.wait_for(
                lambda: True if runtime.stop.asked or self._stale() or self._selection() is not None else None
            )
            if runtime.stop.asked:
                await rest(runtime)
            async with runtime.barrier.cut("claim") as cut:
                if runtime.stop.asked:
                    continue
                stale = self._stale()
                if stale:
                    for group in stale:
                        detail = f"weight version {runtime.projection.weight_version}, oldest {group.min_weight_version}"
                        event = GroupDropped(group_id=group.group_id, reason=Reason.STALE, detail=detail)
                        runtime.ledger.commit(cut, event)
                    await clear_group_rows(runtime, cut, stale, Reason.STALE)
                    continue
                selected = self._selection()
                if selected is None:
                    continue
                if not selected:
                    return ()
                step = runtime.projection.train_step + 1
                events: list[Event] = []
                wanted = runtime.config.trainer.groups_per_step
                if len(selected) < wanted:
                    shrunk = StepShrunk(
                        train_step=step,
                        reason=Reason.SHORTFALL,
                        expected_groups=wanted,
                        found_groups=len(selected),
                    )
                    events.append(shrunk)
                events += [GroupClaimed(group_id=group_id, train_step=step) for group_id in selected]
                ticket = runtime.ledger.commit(cut, *events)
            await ticket.durable()
            return selected

    def _stale(self) -> list[GroupState]:
        p = self._runtime.projection
        return [
            group
            for group in p.live_groups()
            if group.phase is GroupPhase.FINALIZED and self._runtime.sampler.is_stale(p, group)
        ]

    def _selection(self) -> tuple[int, ...] | None:
        p = self._runtime.projection
        selected = self._runtime.sampler.select(p) or None
        if selected is not None or not self._runtime.exhausted:
            return selected
        ready: list[GroupState] = []
        others: list[GroupState] = []
        for group in p.live_groups():
            (ready if group.phase is GroupPhase.FINALIZED else others).append(group)
        if any(may_start(self._runtime.sampler, p, group) for group in others):
            return None
        # No prompt is left, and nothing is under way, but what waits for newer weights: the last steps take what there is,
        # those that were drawn for an earlier step first.
        ready.sort(key=lambda group: (group.train_step or 0, group.group_id))
        limit = self._runtime.config.trainer.groups_per_step
        return tuple(group.group_id for group in ready[:limit])

    async def _step(self, group_ids: tuple[int, ...]) -> None:
        runtime = self._runtime
        p = runtime.projection
        step = p.train_step + 1
        keys = tuple(key for group_id in group_ids for key in canonical_rows(p.groups[group_id]))
        with runtime.waits.on(f"the trainer to train step {step} on groups {list(group_ids[:8])}"):
            metrics = await runtime.trainer.step(
                TrainOrder(train_step=step, group_ids=group_ids, row_keys=keys)
            )
        with runtime.waits.on(f"the weights of version {metrics.weight_version} to be published"):
            await runtime.trainer.publish(metrics.weight_version)
        async with runtime.barrier.cut("apply") as cut:
            # In one frame: between the two, a group would be drawn as if a version older than it is trained with.
            ticket = runtime.ledger.commit(
                cut,
                StepApplied(train_step=step, group_ids=group_ids),
                WeightsPublished(weight_version=metrics.weight_version, train_step=step),
            )
        await ticket.durable()
        self._on_step(metrics)
