"""The one transition function: what each event does to the projection, live and at replay.

``fold`` depends on nothing but its arguments: no clock, no random number, no environment. It refuses an event that does
not fit the state, before changing anything.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from kinlog.lineage.state import CheckpointState, GroupPhase, GroupState, Projection, SiblingState
from kinlog.schemas import events as e
from kinlog.schemas.errors import TransitionError
from kinlog.schemas.reasons import Granularity, Reason

__all__ = [
    "FOLD_VERSION",
    "changes_state",
    "fold",
    "sibling_of",
    "INFRASTRUCTURE_REASONS",
    "DATA_REASONS",
]

#: What the fold makes of an event, as one number: raised whenever the same log would amount to another projection. A
#: projection of another version is not gone on from, where the log can be folded again.
FOLD_VERSION = 3

#: What counts against a sibling's infrastructure budget, and against its data budget. Nothing else counts.
INFRASTRUCTURE_REASONS = frozenset({Reason.INFRASTRUCTURE_FAILURE, Reason.WORKER_LOST, Reason.TIMEOUT})
DATA_REASONS = frozenset({Reason.DATA_FAILURE})

_UNFINISHED = frozenset({GroupPhase.ADMITTED, GroupPhase.GENERATING, GroupPhase.READY})


def fold(projection: Projection, record: e.RecordedEvent) -> None:
    """Apply the next event of the log to the projection, in place.

    Raises
    ------
    TransitionError
        The event is not the next one, or does not fit the state. The projection is unchanged.
    """
    if record.seq != projection.last_seq + 1:
        raise TransitionError(f"event seq {record.seq} does not follow seq {projection.last_seq}")
    transition = _TRANSITIONS.get(type(record.event))
    if transition is not None:
        try:
            transition(projection, record.event, record.seq)
        except TransitionError as error:
            raise TransitionError(f"seq {record.seq}, {e.kind_of(type(record.event))}: {error}") from None
    projection.last_seq = record.seq
    projection.last_epoch = record.epoch


def changes_state(event_type: type[e.Event]) -> bool:
    """Whether events of this type do anything to a projection. The others are history for people."""
    return event_type in _TRANSITIONS


def _group(p: Projection, group_id: int, phases: frozenset[GroupPhase] | None = None) -> GroupState:
    group = p.groups.get(group_id)
    if group is None:
        raise TransitionError(f"group {group_id} is not alive")
    if phases is not None and group.phase not in phases:
        expected = " or ".join(sorted(phases))
        raise TransitionError(f"group {group_id}: expected phase {expected}, found {group.phase}")
    return group


def sibling_of(group: GroupState, generation: int) -> SiblingState:
    """Return a sibling of a group, or raise ``TransitionError`` when it has no such generation."""
    sibling = group.siblings.get(generation)
    if sibling is None:
        raise TransitionError(
            f"group {group.group_id}: no generation {generation}; it has 0 to {group.num_generations - 1}"
        )
    return sibling


def _run_opened(p: Projection, event: e.RunOpened, seq: int) -> None:
    if p.run_id:
        raise TransitionError(f"run {p.run_id} was opened before")
    p.run_id = event.run_id
    p.seed = event.seed
    p.dataset_fingerprint = event.dataset_fingerprint


def _writer_opened(p: Projection, event: e.WriterOpened, seq: int) -> None:
    p.cleanly_closed = False


def _writer_closed(p: Projection, event: e.WriterClosed, seq: int) -> None:
    p.cleanly_closed = True


def _group_reserved(p: Projection, event: e.GroupReserved, seq: int) -> None:
    if event.group_id != p.next_group_id:
        raise TransitionError(f"expected group {p.next_group_id}, found {event.group_id}")
    if event.prompt.draw_index != p.draw_cursor or event.draw_cursor != p.draw_cursor + 1:
        raise TransitionError(
            f"group {event.group_id}: expected draw {p.draw_cursor}, found {event.prompt.draw_index}"
        )
    if event.num_generations < 1:
        raise TransitionError(f"group {event.group_id}: has {event.num_generations} generations")
    p.groups[event.group_id] = GroupState(
        group_id=event.group_id,
        prompt=event.prompt,
        num_generations=event.num_generations,
        granularity=event.granularity,
        retry_budget=event.retry_budget,
        weight_version=event.weight_version,
        train_step=event.train_step,
        siblings={generation: SiblingState(generation) for generation in range(event.num_generations)},
    )
    if event.train_step is not None:
        p.places[event.train_step] = p.places.get(event.train_step, 0) + 1
    p.next_group_id += 1
    p.draw_cursor = event.draw_cursor


def _group_admitted(p: Projection, event: e.GroupAdmitted, seq: int) -> None:
    _group(p, event.group_id, frozenset({GroupPhase.RESERVED})).phase = GroupPhase.ADMITTED


def _sibling_dispatched(p: Projection, event: e.SiblingDispatched, seq: int) -> None:
    group = _group(p, event.group_id, frozenset({GroupPhase.ADMITTED, GroupPhase.GENERATING}))
    sibling = sibling_of(group, event.generation)
    if sibling.sealed is not None:
        raise TransitionError(
            f"group {group.group_id}/{event.generation}: attempt {sibling.attempt} is sealed"
        )
    if sibling.running:
        raise TransitionError(
            f"group {group.group_id}/{event.generation}: attempt {sibling.attempt} is running"
        )
    if event.attempt <= sibling.attempt:
        raise TransitionError(
            f"group {group.group_id}/{event.generation}: attempt {event.attempt} does not follow {sibling.attempt}"
        )
    if event.resumes_attempt not in (None, sibling.attempt):
        raise TransitionError(
            f"group {group.group_id}/{event.generation}: attempt {event.attempt} resumes attempt "
            f"{event.resumes_attempt}, and the one before it is {sibling.attempt}"
        )
    if event.resumes_attempt is None:
        sibling.resumed_from, sibling.rolled_back_to = 0, None
    else:
        sibling.resumed_from = sibling.resumed_from or sibling.attempt
    sibling.attempt = event.attempt
    sibling.running = True
    group.phase = GroupPhase.GENERATING


def _cohort_sealed(p: Projection, event: e.CohortSealed, seq: int) -> None:
    group = _group(p, event.group_id, frozenset({GroupPhase.GENERATING}))
    for sibling in group.siblings.values():
        if not sibling.running or sibling.attempt != event.attempt:
            raise TransitionError(
                f"group {group.group_id}: generation {sibling.generation} is not running attempt {event.attempt}"
            )
    group.cohort_attempt = event.attempt


def _sibling_sealed(p: Projection, event: e.SiblingSealed, seq: int) -> None:
    group = _group(p, event.group_id, frozenset({GroupPhase.GENERATING}))
    sibling = sibling_of(group, event.generation)
    if not sibling.running or event.attempt != sibling.attempt:
        raise TransitionError(
            f"group {group.group_id}/{event.generation}: attempt {event.attempt} is not running "
            f"(last attempt {sibling.attempt})"
        )
    if group.granularity is Granularity.PROMPT_GROUP and group.cohort_attempt != event.attempt:
        raise TransitionError(
            f"group {group.group_id}: seals with its cohort only, and attempt {event.attempt} has no cohort seal"
        )
    sibling.running = False
    sibling.sealed = event
    sibling.sealed_seq = seq
    p.sealed_total += 1
    p.sealed_tokens_total += event.completion_tokens
    p.resumed_tokens_total += event.resumed_tokens
    if group.all_sealed:
        group.phase = GroupPhase.READY


def _attempt_superseded(p: Projection, event: e.AttemptSuperseded, seq: int) -> None:
    group = _group(p, event.group_id, _UNFINISHED)
    sibling = sibling_of(group, event.generation)
    if sibling.waiting or event.attempt != sibling.attempt:
        raise TransitionError(
            f"group {group.group_id}/{event.generation}: attempt {event.attempt} is neither running nor sealed"
        )
    sibling.running = False
    sibling.sealed = None
    sibling.sealed_seq = 0
    sibling.last_reason = event.reason
    sibling.infrastructure_failures += event.reason in INFRASTRUCTURE_REASONS
    sibling.data_failures += event.reason in DATA_REASONS
    sibling.restarts += event.reason is Reason.CONTROLLER_RESTART
    group.cohort_attempt = None
    group.phase = GroupPhase.GENERATING
    p.superseded[event.reason] = p.superseded.get(event.reason, 0) + 1


def _late_result_rejected(p: Projection, event: e.LateResultRejected, seq: int) -> None:
    p.late_rejected += 1


def _finalize_started(p: Projection, event: e.FinalizeStarted, seq: int) -> None:
    # Also from FINALIZING: a finalize whose outcome was lost is driven again.
    phases = frozenset({GroupPhase.READY, GroupPhase.FINALIZING})
    _group(p, event.group_id, phases).phase = GroupPhase.FINALIZING


def _group_finalized(p: Projection, event: e.GroupFinalized, seq: int) -> None:
    group = _group(p, event.group_id, frozenset({GroupPhase.FINALIZING}))
    expected = {(s.generation, s.attempt) for s in group.siblings.values()}
    found = {(row.generation, row.attempt) for row in event.rows}
    if expected != found or len(event.rows) != group.num_generations:
        raise TransitionError(
            f"group {group.group_id}: expected one row of each sealed attempt {sorted(expected)}, found {sorted(found)}"
        )
    group.phase = GroupPhase.FINALIZED
    group.rows = event.rows
    group.valid_fraction = event.valid_fraction
    group.finalized_seq = seq
    group.finalize_failures = 0


def _finalize_failed(p: Projection, event: e.FinalizeFailed, seq: int) -> None:
    group = _group(p, event.group_id, frozenset({GroupPhase.FINALIZING, GroupPhase.FINALIZED}))
    group.phase = GroupPhase.READY
    group.rows = ()
    group.valid_fraction = 0.0
    group.finalized_seq = 0
    group.finalize_failures += event.charged


def _group_claimed(p: Projection, event: e.GroupClaimed, seq: int) -> None:
    group = _group(p, event.group_id, frozenset({GroupPhase.FINALIZED}))
    if event.train_step != p.train_step + 1:
        raise TransitionError(f"expected a claim for step {p.train_step + 1}, found step {event.train_step}")
    group.phase = GroupPhase.CLAIMED
    group.claimed_step = event.train_step


def _step_applied(p: Projection, event: e.StepApplied, seq: int) -> None:
    if event.train_step != p.train_step + 1:
        raise TransitionError(f"expected step {p.train_step + 1}, found step {event.train_step}")
    groups = [_group(p, group_id, frozenset({GroupPhase.CLAIMED})) for group_id in event.group_ids]
    if len(set(event.group_ids)) != len(event.group_ids):
        raise TransitionError(f"step {event.train_step} lists a group twice")
    for group in groups:
        if group.claimed_step != event.train_step:
            raise TransitionError(f"group {group.group_id} is claimed by step {group.claimed_step}")
    left_out = sorted(
        group_id
        for group_id, group in p.groups.items()
        if group.phase is GroupPhase.CLAIMED and group_id not in event.group_ids
    )
    if left_out:
        # It could never be applied nor claimed again.
        raise TransitionError(f"step {event.train_step} leaves out claimed groups {left_out}")
    for group in groups:
        group.phase = GroupPhase.APPLIED
        group.rolled_back = False
    p.steps[event.train_step] = event.group_ids
    p.train_step = event.train_step


def _weights_published(p: Projection, event: e.WeightsPublished, seq: int) -> None:
    p.weight_version = event.weight_version


def _group_dropped(p: Projection, event: e.GroupDropped, seq: int) -> None:
    group = _group(p, event.group_id)
    if not group.live and group.phase is not GroupPhase.PARKED:
        raise TransitionError(f"group {group.group_id} is {group.phase}")
    del p.groups[event.group_id]
    p.dropped[event.reason] = p.dropped.get(event.reason, 0) + 1


def _group_parked(p: Projection, event: e.GroupParked, seq: int) -> None:
    group = _group(p, event.group_id)
    if not group.live:
        raise TransitionError(f"group {group.group_id} is {group.phase}")
    group.phase = GroupPhase.PARKED
    group.parked_reason = event.reason
    for sibling in group.siblings.values():
        sibling.running = False


def _checkpoint_committed(p: Projection, event: e.CheckpointCommitted, seq: int) -> None:
    if event.frontier_step < p.frontier_step:
        raise TransitionError(f"the frontier goes back from step {p.frontier_step} to {event.frontier_step}")
    if event.frontier_step > p.train_step:
        raise TransitionError(
            f"the frontier's step {event.frontier_step} was never applied: the last step is {p.train_step}"
        )
    state = CheckpointState(event.name, event.checkpoint_kind, event.train_step, event.position)
    # Of neither kind can one from before the frontier be gone back to.
    p.checkpoints = (*(c for c in p.checkpoints if c.train_step >= event.frontier_step), state)
    p.frontier_step = event.frontier_step
    p.places = {step: drawn for step, drawn in p.places.items() if step > event.frontier_step}
    for step in [step for step in p.steps if step <= event.frontier_step]:
        for group_id in p.steps.pop(step):
            del p.groups[group_id]
            p.applied_forgotten += 1


def _run_restored(p: Projection, event: e.RunRestored, seq: int) -> None:
    if event.train_step < p.frontier_step:
        raise TransitionError(f"step {event.train_step} is before the frontier, step {p.frontier_step}")
    if event.train_step > p.train_step:
        raise TransitionError(
            f"step {event.train_step} was never applied on this history: its last step is {p.train_step}"
        )
    for group in p.groups.values():
        undone = group.phase is GroupPhase.APPLIED and (group.claimed_step or 0) > event.train_step
        if undone or group.phase is GroupPhase.CLAIMED:
            group.phase = GroupPhase.FINALIZED
            group.claimed_step = None
            group.rolled_back |= undone
        if not group.live:
            continue
        for sibling in group.siblings.values():
            if sibling.attempt:
                versions = (event.weight_version, sibling.rolled_back_to)
                sibling.rolled_back_to = min(version for version in versions if version is not None)
    for step in [step for step in p.steps if step > event.train_step]:
        del p.steps[step]
    p.checkpoints = tuple(c for c in p.checkpoints if c.train_step <= event.train_step)
    p.train_step = event.train_step
    p.weight_version = event.weight_version
    p.restarts += 1


def _dataset_exhausted(p: Projection, event: e.DatasetExhausted, seq: int) -> None:
    p.exhausted = True


_Transition: TypeAlias = Callable[[Projection, Any, int], None]

#: Kinds that are not here change nothing.
_TRANSITIONS: dict[type[e.Event], _Transition] = {
    e.RunOpened: _run_opened,
    e.WriterOpened: _writer_opened,
    e.WriterClosed: _writer_closed,
    e.GroupReserved: _group_reserved,
    e.GroupAdmitted: _group_admitted,
    e.SiblingDispatched: _sibling_dispatched,
    e.CohortSealed: _cohort_sealed,
    e.SiblingSealed: _sibling_sealed,
    e.AttemptSuperseded: _attempt_superseded,
    e.LateResultRejected: _late_result_rejected,
    e.FinalizeStarted: _finalize_started,
    e.GroupFinalized: _group_finalized,
    e.FinalizeFailed: _finalize_failed,
    e.GroupClaimed: _group_claimed,
    e.StepApplied: _step_applied,
    e.WeightsPublished: _weights_published,
    e.GroupDropped: _group_dropped,
    e.GroupParked: _group_parked,
    e.CheckpointCommitted: _checkpoint_committed,
    e.RunRestored: _run_restored,
    e.DatasetExhausted: _dataset_exhausted,
}
