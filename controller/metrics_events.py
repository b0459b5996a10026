"""What committed events say in metrics. It is shown each commit of the ledger, and is the one place where events are counted."""

from collections.abc import Sequence

import msgspec

from kinlog.controller import metrics as m
from kinlog.controller.metrics_values import MetricValues
from kinlog.lineage.state import Projection
from kinlog.schemas import events as e
from kinlog.schemas.events import EVENT_TYPES, RecordedEvent

__all__ = ["EventMetrics"]


#: Once per event of a run: looked up here, it costs a tenth.
_KINDS = {event_type: kind for kind, event_type in EVENT_TYPES.items()}


class _Times(msgspec.Struct):
    """When things happened to a live group, in microseconds: what waits are counted from."""

    admitted_us: int | None = None
    sealed_us: int | None = None
    """The last seal."""
    finalized_us: int | None = None
    waiting_us: dict[int, int] = {}
    """Generation -> when its last attempt was given up."""
    sent_us: dict[int, int] = {}
    """Generation -> when its attempt was dispatched."""


class EventMetrics:
    """Counts events. Of groups that an earlier life began, waits are not known, and not counted."""

    def __init__(self, values: MetricValues) -> None:
        self._values = values
        self._groups: dict[int, _Times] = {}

    def restore(self, p: Projection) -> None:
        """Begin the counters of the whole run with what its log amounts to so far."""
        values = self._values
        values.set(m.GROUPS_DRAWN, p.drawn_total)
        values.set(m.SIBLINGS_SEALED, p.sealed_total)
        values.set(m.SEALED_TOKENS, p.sealed_tokens_total)
        values.set(m.RESUMED_TOKENS, p.resumed_tokens_total)
        values.set(m.RESTARTS, p.restarts)
        for reason, count in p.dropped.items():
            values.set(m.GROUPS_DROPPED, count, reason.value)
        for reason, count in p.superseded.items():
            values.set(m.SUPERSEDED, count, reason.value)

    def observe(self, records: Sequence[RecordedEvent], p: Projection) -> None:
        """Count what a commit recorded. ``p`` is the projection after it."""
        for record in records:
            self._values.add(m.EVENTS, 1, _KINDS[type(record.event)])
            match record.event:
                case e.GroupReserved() | e.GroupAdmitted() | e.SiblingDispatched() | e.SiblingSealed():
                    self._count_generation(record.event, record.time_us)
                case e.AttemptSuperseded() | e.LateResultRejected():
                    self._count_given_up(record.event, record.time_us, p)
                case e.CheckpointCommitted() | e.CheckpointFailed():
                    self._count_checkpoint(record.event)
                case e.RecoveryPlanned() | e.RunRestored():
                    self._count_restart(record.event)
                case _:
                    self._count_training(record.event, record.time_us, p)

    def _count_generation(
        self,
        event: e.GroupReserved | e.GroupAdmitted | e.SiblingDispatched | e.SiblingSealed,
        time_us: int,
    ) -> None:
        values = self._values
        if isinstance(event, e.GroupReserved):
            values.add(m.GROUPS_DRAWN)
            return
        times = self._groups.setdefault(event.group_id, _Times())
        match event:
            case e.GroupAdmitted():
                times.admitted_us = time_us
            case e.SiblingDispatched():
                values.add(m.SIBLINGS_DISPATCHED)
                since_us = times.waiting_us.pop(event.generation, times.admitted_us)
                self._count_wait("dispatch", since_us, time_us)
                times.sent_us[event.generation] = time_us
            case e.SiblingSealed():
                values.add(m.SIBLINGS_SEALED)
                values.add(m.SEALED_TOKENS, event.completion_tokens)
                values.add(m.RESUMED_TOKENS, event.resumed_tokens)
                values.add(m.OUTCOMES, 1, event.validity.value, event.finish_reason.value)
                values.observe(m.COMPLETION_TOKENS, event.completion_tokens)
                sent_us = times.sent_us.pop(event.generation, None)
                if sent_us is not None:
                    values.observe(m.ROLLOUT_SECONDS, _seconds(sent_us, time_us))
                times.sealed_us = time_us

    def _count_given_up(
        self, event: e.AttemptSuperseded | e.LateResultRejected, time_us: int, p: Projection
    ) -> None:
        if isinstance(event, e.LateResultRejected):
            self._values.add(m.LATE_RESULTS, 1, event.reason.value)
            return
        self._values.add(m.SUPERSEDED, 1, event.reason.value)
        group = p.groups.get(event.group_id)
        if group is None or not group.live:
            return  # it left in the same commit
        times = self._groups.setdefault(event.group_id, _Times())
        times.sent_us.pop(event.generation, None)
        times.waiting_us[event.generation] = time_us

    def _count_training(self, event: e.Event, time_us: int, p: Projection) -> None:
        values = self._values
        match event:
            case e.FinalizeStarted():
                times = self._groups.get(event.group_id, _Times())
                self._count_wait("finalize", times.sealed_us, time_us)
                times.sealed_us = None  # driven again, it waits for something else
            case e.GroupFinalized():
                values.add(m.GROUPS_FINALIZED)
                self._groups.setdefault(event.group_id, _Times()).finalized_us = time_us
            case e.FinalizeFailed():
                values.add(m.FINALIZE_FAILURES, 1, event.reason.value)
            case e.GroupClaimed():
                self._count_wait("train", self._groups.get(event.group_id, _Times()).finalized_us, time_us)
                behind = p.weight_version - p.groups[event.group_id].min_weight_version
                values.observe(m.TRAINED_STALENESS, behind)
            case e.StepShrunk():
                values.add(m.STEPS_SHRUNK, 1, event.reason.value)
            case e.StepApplied():
                values.add(m.STEPS_APPLIED)
                values.add(m.GROUPS_APPLIED, len(event.group_ids))
                for group_id in event.group_ids:
                    self._groups.pop(group_id, None)
            case e.GroupDropped():
                values.add(m.GROUPS_DROPPED, 1, event.reason.value)
                self._groups.pop(event.group_id, None)
            case e.GroupParked():
                values.add(m.GROUPS_PARKED, 1, event.reason.value)
                self._groups.pop(event.group_id, None)
            case e.RowsCleared():
                values.add(m.ROWS_CLEARED, event.num_rows, event.partition.value, event.reason.value)

    def _count_checkpoint(self, event: e.CheckpointCommitted | e.CheckpointFailed) -> None:
        values = self._values
        if isinstance(event, e.CheckpointFailed):
            values.add(m.CHECKPOINT_FAILURES, 1, event.reason.value)
            return
        if event.duration_us is None or event.held_us is None:
            return  # an earlier life took it, and was killed before it could say so
        kind = event.checkpoint_kind.value
        values.add(m.CHECKPOINTS, 1, kind)
        values.observe(m.CHECKPOINT_SECONDS, event.duration_us / 1e6, kind)
        values.observe(m.CHECKPOINT_HOLD_SECONDS, event.held_us / 1e6, kind)

    def _count_restart(self, event: e.RecoveryPlanned | e.RunRestored) -> None:
        values = self._values
        if isinstance(event, e.RunRestored):
            values.add(m.RESTARTS)
            return
        values.set(m.RECOVERY_SIBLINGS, event.siblings_reused, "reused")
        values.set(m.RECOVERY_SIBLINGS, event.siblings_redispatched, "redispatched")
        values.set(m.RECOVERY_GROUPS, event.groups_reused, "reused")
        values.set(m.RECOVERY_GROUPS, event.groups_rolled_back, "rolled_back")
        values.set(m.RECOVERY_GROUPS, event.groups_dropped, "dropped")
        values.set(m.RECOVERY_TOKENS, event.tokens_saved, "saved")
        values.set(m.RECOVERY_TOKENS, event.tokens_redone, "redone")

    def _count_wait(self, queue: str, since_us: int | None, time_us: int) -> None:
        if since_us is not None:
            self._values.observe(m.QUEUE_WAIT, _seconds(since_us, time_us), queue)


def _seconds(since_us: int, time_us: int) -> float:
    return max(0, time_us - since_us) / 1e6  # clocks go back
