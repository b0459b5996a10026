"""The moments of a timeline that are about no single attempt: checkpoints, new weights, and what is worth a mark."""

from array import array
from enum import StrEnum

import msgspec

from kinlog.schemas import events as e
from kinlog.schemas.reasons import CheckpointKind, Reason

__all__ = ["CheckpointSpan", "Mark", "MarkKind", "MomentsTally", "WeightsMark"]


class MarkKind(StrEnum):
    """What a moment of the run is marked for."""

    GROUP_DROPPED = "group_dropped"
    GROUP_PARKED = "group_parked"
    FINALIZE_FAILED = "finalize_failed"
    STEP_SHRUNK = "step_shrunk"
    TAIL_TRUNCATED = "tail_truncated"
    RUN_RESTORED = "run_restored"
    DATASET_EXHAUSTED = "dataset_exhausted"


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A moment that is worth a look."""

    kind: MarkKind
    time_us: int
    seq: int
    text: str


class WeightsMark(msgspec.Struct, frozen=True, kw_only=True):
    """New weights were given to the generation engines."""

    weight_version: int
    time_us: int
    seq: int


class CheckpointSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint: from the last event that is in it to its commit, or the moment at which it was given up."""

    name: str
    kind: CheckpointKind | None
    """``None``: it failed before the log said."""
    train_step: int | None
    begin_us: int
    end_us: int
    seq: int
    position_seq: int | None
    failed: Reason | None
    detail: str


#: Everything else is about an attempt, or about a group that goes on.
_MOMENTS = (
    e.WeightsPublished,
    e.CheckpointCommitted,
    e.CheckpointFailed,
    e.GroupDropped,
    e.GroupParked,
    e.FinalizeFailed,
    e.RunRestored,
    e.StepShrunk,
    e.TailTruncated,
    e.DatasetExhausted,
)


class MomentsTally:
    """Collects moments from a log's events, in order.

    Parameters
    ----------
    first_seq:
        Of the first event.
    """

    def __init__(self, first_seq: int) -> None:
        self.weights: list[WeightsMark] = []
        self.checkpoints: list[CheckpointSpan] = []
        self.marks: list[Mark] = []
        self._times, self._times_from_seq = array("q"), first_seq
        """Times of the events since the newest checkpoint's position: where the next one may begin."""

    def add(self, record: e.RecordedEvent) -> None:
        """Take the next event."""
        self._times.append(record.time_us)
        if not isinstance(record.event, _MOMENTS):
            return
        match event := record.event:
            case e.WeightsPublished():
                self.weights.append(
                    WeightsMark(weight_version=event.weight_version, time_us=record.time_us, seq=record.seq)
                )
            case e.CheckpointCommitted():
                self._committed(record, event)
            case e.CheckpointFailed():
                self._failed(record, event)
            case e.GroupDropped():
                self._left(record, MarkKind.GROUP_DROPPED, event)
            case e.GroupParked():
                self._left(record, MarkKind.GROUP_PARKED, event)
            case e.FinalizeFailed():
                self._left(record, MarkKind.FINALIZE_FAILED, event)
            case e.RunRestored():
                text = f"restored from {event.checkpoint or 'the start'}, step {event.train_step}"
                self._mark(record, MarkKind.RUN_RESTORED, text)
            case e.StepShrunk():
                found = f"{event.found_groups} groups instead of {event.expected_groups}"
                self._mark(
                    record, MarkKind.STEP_SHRUNK, f"step {event.train_step} has {found}: {event.reason.value}"
                )
            case e.TailTruncated():
                text = f"torn tail cut off {event.segment}: {event.quarantined_bytes:,} bytes kept aside"
                self._mark(record, MarkKind.TAIL_TRUNCATED, text)
            case e.DatasetExhausted():
                text = f"the dataset is exhausted after {event.draw_cursor:,} draws"
                self._mark(record, MarkKind.DATASET_EXHAUSTED, text)

    def _committed(self, record: e.RecordedEvent, event: e.CheckpointCommitted) -> None:
        offset = event.position.seq - self._times_from_seq
        self.checkpoints.append(
            CheckpointSpan(
                name=event.name,
                kind=event.checkpoint_kind,
                train_step=event.train_step,
                begin_us=self._times[offset] if 0 <= offset < len(self._times) else record.time_us,
                end_us=record.time_us,
                seq=record.seq,
                position_seq=event.position.seq,
                failed=None,
                detail="",
            )
        )
        if offset > 0:
            self._times, self._times_from_seq = self._times[offset:], event.position.seq

    def _failed(self, record: e.RecordedEvent, event: e.CheckpointFailed) -> None:
        self.checkpoints.append(
            CheckpointSpan(
                name=event.name,
                kind=None,
                train_step=None,
                begin_us=record.time_us,
                end_us=record.time_us,
                seq=record.seq,
                position_seq=None,
                failed=event.reason,
                detail=event.detail,
            )
        )

    def _left(
        self,
        record: e.RecordedEvent,
        kind: MarkKind,
        event: e.GroupDropped | e.GroupParked | e.FinalizeFailed,
    ) -> None:
        what = {
            MarkKind.GROUP_DROPPED: "dropped",
            MarkKind.GROUP_PARKED: "parked",
            MarkKind.FINALIZE_FAILED: "finalize failed",
        }[kind]
        detail = f", {event.detail}" if event.detail else ""
        self._mark(record, kind, f"group {event.group_id} {what}: {event.reason.value}{detail}")

    def _mark(self, record: e.RecordedEvent, kind: MarkKind, text: str) -> None:
        self.marks.append(Mark(kind=kind, time_us=record.time_us, seq=record.seq, text=text))
