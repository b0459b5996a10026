"""Statistics of a run: what its log holds and what that amounts to."""

from collections import Counter

import msgspec

from kinlog.lineage.fold import fold
from kinlog.lineage.scan import LogScan
from kinlog.lineage.state import GroupPhase, Projection
from kinlog.replay.inspection import list_segments
from kinlog.replay.lives import Life, LivesTally
from kinlog.schemas import events as e
from kinlog.schemas.reasons import CheckpointKind

__all__ = [
    "CheckpointRecord",
    "GroupStatistics",
    "RunStatistics",
    "SiblingStatistics",
    "StepStatistics",
    "TokenStatistics",
    "collect_statistics",
]


class GroupStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Where the groups are: drawn = applied + dropped + parked + alive."""

    drawn: int
    applied: int
    dropped: dict[str, int]
    """By reason."""
    parked: dict[str, int]
    """By reason: set aside now."""
    alive: dict[str, int]
    """By phase."""


class SiblingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Attempts of siblings, counted over all lives."""

    dispatched: int
    sealed: int
    superseded: dict[str, int]
    """Attempts given up, by reason."""
    superseded_sealed: dict[str, int]
    """Those of them that had been sealed: finished work that was redone."""
    late_rejected: dict[str, int]
    """Results that came after their attempt was given up, by reason."""
    running: int
    """In flight at the end of the log."""
    sealed_by_validity: dict[str, int]
    sealed_by_finish: dict[str, int]


class TokenStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Completion tokens, counted over all lives."""

    sealed: int
    superseded: int
    """Of sealed attempts that were given up later."""
    late: int
    """Of results that were rejected."""


class StepStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Optimizer steps and weights."""

    applied: int
    """The last step on the surviving history."""
    rolled_back: int
    """Steps that were applied, and undone by a restart."""
    weight_version: int
    weights_published: int


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that the log says was committed; its directory may have been pruned since."""

    name: str
    kind: CheckpointKind
    train_step: int
    position_seq: int
    committed_us: int


class RunStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What ``kinlog log stats`` shows."""

    run_id: str
    log_id: str
    segments: int
    verified_bytes: int
    events: int
    dropped_events: int
    """The first of them: of these only the sum is left. What is counted event by event is counted after them."""
    events_by_kind: dict[str, int]
    groups: GroupStatistics
    siblings: SiblingStatistics
    tokens: TokenStatistics
    steps: StepStatistics
    draw_cursor: int
    dataset_exhausted: bool
    checkpoints: tuple[CheckpointRecord, ...]
    checkpoints_failed: dict[str, int]
    """By reason."""
    lives: tuple[Life, ...]


class _Tally:
    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.superseded: Counter[str] = Counter()
        self.superseded_sealed: Counter[str] = Counter()
        self.late: Counter[str] = Counter()
        self.validity: Counter[str] = Counter()
        self.finish: Counter[str] = Counter()
        self.failed_checkpoints: Counter[str] = Counter()
        self.sealed_tokens = self.superseded_tokens = self.late_tokens = self.rolled_back = 0
        self.checkpoints: list[CheckpointRecord] = []

    def add(self, record: e.RecordedEvent, before: Projection) -> None:
        """Count an event, given the state that it meets."""
        event = record.event
        self.kinds[e.kind_of(type(event))] += 1
        match event:
            case e.SiblingSealed():
                self.sealed_tokens += event.completion_tokens
                self.validity[event.validity.value] += 1
                self.finish[event.finish_reason.value] += 1
            case e.AttemptSuperseded():
                self.superseded[event.reason.value] += 1
                sealed = _sealed(before, event)
                if sealed is not None:
                    self.superseded_sealed[event.reason.value] += 1
                    self.superseded_tokens += sealed.completion_tokens
            case e.LateResultRejected():
                self.late[event.reason.value] += 1
                self.late_tokens += event.completion_tokens
            case e.RunRestored():
                self.rolled_back += before.train_step - event.train_step
            case e.CheckpointCommitted():
                self.checkpoints.append(
                    CheckpointRecord(
                        name=event.name,
                        kind=event.checkpoint_kind,
                        train_step=event.train_step,
                        position_seq=event.position.seq,
                        committed_us=record.time_us,
                    )
                )
            case e.CheckpointFailed():
                self.failed_checkpoints[event.reason.value] += 1


def _sealed(before: Projection, event: e.AttemptSuperseded) -> e.SiblingSealed | None:
    group = before.groups.get(event.group_id)
    sibling = group.siblings.get(event.generation) if group is not None else None
    return sibling.sealed if sibling is not None else None


def collect_statistics(scan: LogScan) -> RunStatistics:
    """Read a whole log and count.

    Raises
    ------
    TransitionError
        The log tells an impossible story.
    LogUnsupportedError
        An event was written by a newer kinlog.
    """
    projection, lives, tally = scan.beginning(), LivesTally(), _Tally()
    for record in scan.events():
        tally.add(record, projection)
        lives.add(record)
        fold(projection, record)
    groups = projection.groups.values()
    parked = Counter(
        g.parked_reason.value for g in groups if g.phase is GroupPhase.PARKED and g.parked_reason is not None
    )
    alive = Counter(g.phase.value for g in projection.live_groups())
    return RunStatistics(
        run_id=scan.run_id,
        log_id=scan.log_id,
        segments=len(scan.segments),
        verified_bytes=sum(segment.verified_bytes for segment in list_segments(scan)),
        events=scan.end.seq,
        dropped_events=scan.first_seq - 1,
        events_by_kind=dict(tally.kinds),
        groups=GroupStatistics(
            drawn=projection.drawn_total,
            applied=projection.applied_total,
            dropped={reason.value: count for reason, count in projection.dropped.items()},
            parked=dict(parked),
            alive={phase.value: alive[phase.value] for phase in GroupPhase if alive[phase.value]},
        ),
        siblings=SiblingStatistics(
            dispatched=tally.kinds["sibling_dispatched"],
            sealed=tally.kinds["sibling_sealed"],
            superseded=dict(tally.superseded),
            superseded_sealed=dict(tally.superseded_sealed),
            late_rejected=dict(tally.late),
            running=sum(s.running for g in groups for s in g.siblings.values()),
            sealed_by_validity=dict(tally.validity),
            sealed_by_finish=dict(tally.finish),
        ),
        tokens=TokenStatistics(
            sealed=tally.sealed_tokens, superseded=tally.superseded_tokens, late=tally.late_tokens
        ),
        steps=StepStatistics(
            applied=projection.train_step,
            rolled_back=tally.rolled_back,
            weight_version=projection.weight_version,
            weights_published=tally.kinds["weights_published"],
        ),
        draw_cursor=projection.draw_cursor,
        dataset_exhausted=projection.exhausted,
        checkpoints=tuple(tally.checkpoints),
        checkpoints_failed=dict(tally.failed_checkpoints),
        lives=lives.lives(),
    )
