"""What each optimizer step of the surviving history was trained on, in order."""

from collections.abc import Iterable, Mapping

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from kinlog.lineage.reading import Choice, read_events
from kinlog.lineage.scan import LogScan
from kinlog.lineage.state import GroupState, Projection
from kinlog.replay.at import surviving_step
from kinlog.replay.settled import is_of
from kinlog.schemas import events as e
from kinlog.schemas.prompts import PromptRef
from kinlog.schemas.reasons import FinishReason, Validity

__all__ = ["SiblingExample", "GroupExamples", "StepExamples", "step_examples", "trained_examples"]


class SiblingExample(msgspec.Struct, frozen=True, kw_only=True):
    """One sibling as it was trained on."""

    generation: int
    attempt: int
    """Which execution of the sibling it is. Two runs may well differ in it, and in nothing else."""
    validity: Validity
    raw_reward: float
    shaped_reward: float
    """The value that was trained on."""
    model_calls: int
    prompt_tokens: int
    """Of the first model call."""
    completion_tokens: int
    """Over all model calls."""
    row_tokens: int
    """Length of the canonical row: prompt, completions, and what the environment said between them."""
    finish_reason: FinishReason
    min_weight_version: int
    max_weight_version: int
    row_digest: str
    """Digest (hex) of the canonical row: its tokens, masks, log-probabilities, weight versions and rewards."""
    call_digests: tuple[str, ...]
    """Digests (hex) of the rows that were staged of its model calls, in order."""


class GroupExamples(msgspec.Struct, frozen=True, kw_only=True):
    """One group as it was trained on."""

    group_id: int
    prompt: PromptRef
    staleness: int
    """Versions that the weights had moved on since the group's oldest token."""
    siblings: tuple[SiblingExample, ...]
    """By generation."""


class StepExamples(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step's groups, in the order in which they were trained on."""

    train_step: int
    seq: int
    time_us: int
    weight_version: int
    """Of the trainer when it began the step."""
    groups: tuple[GroupExamples, ...]


class _Group:
    def __init__(self, prompt: PromptRef) -> None:
        self.prompt = prompt
        self.sealed: dict[int, e.SiblingSealed] = {}
        self.rows: tuple[e.CanonicalRowRef, ...] = ()

    @classmethod
    def going_on_from(cls, state: GroupState) -> "_Group":
        group = cls(state.prompt)
        group.sealed = {s.generation: s.sealed for s in state.siblings.values() if s.sealed is not None}
        group.rows = state.rows
        return group


def trained_examples(records: Iterable[e.RecordedEvent], beginning: Projection) -> dict[int, StepExamples]:
    """Return the steps of the surviving history, by number.

    A step that a restart undid is not part of it; the one that was applied in its place is.

    Parameters
    ----------
    records:
        A log's events, in order.
    beginning:
        What the log begins at: an empty projection, or what is left of history that was dropped. Steps of dropped history
        are missing.
    """
    groups = {group_id: _Group.going_on_from(state) for group_id, state in beginning.groups.items()}
    steps: dict[int, StepExamples] = {}
    weight_version = beginning.weight_version
    for record in records:
        match record.event:
            case e.GroupDropped(group_id=group_id):
                groups.pop(group_id, None)
            case e.WeightsPublished(weight_version=weight_version):
                pass
            case e.RunRestored() as restored:
                weight_version = restored.weight_version
                for undone in [number for number in steps if number > restored.train_step]:
                    del steps[undone]
            case e.StepApplied() as applied:
                steps[applied.train_step] = _step(record, applied, groups, weight_version)
            case event:
                _take(event, groups)
    return steps


def step_examples(scan: LogScan, step: int) -> StepExamples:
    """Return what one step of the surviving history was trained on, as :func:`trained_examples` does.

    The log is read backwards, by columns, until the reservation of each of the step's groups is found.

    Raises
    ------
    NotInRunError
        The step is not on the surviving history, or not in the log any more.
    """
    record = surviving_step(scan, step)
    applied = record.event
    assert isinstance(applied, e.StepApplied)
    beginning = scan.beginning()
    groups = {
        group_id: _Group.going_on_from(beginning.groups[group_id])
        for group_id in applied.group_ids
        if group_id in beginning.groups
    }
    missing = set(applied.group_ids) - groups.keys()
    weight_version: int | None = None
    group_ids = pa.array(sorted(applied.group_ids), pa.int64())

    def rows(batch: pa.RecordBatch) -> pa.Array:
        of_groups = pc.and_(
            pc.is_in(batch.column("group_id"), group_ids),
            is_of(batch, e.GroupReserved, e.SiblingSealed, e.GroupFinalized),
        )
        return pc.or_(of_groups, is_of(batch, e.WeightsPublished, e.RunRestored))

    kept: list[e.RecordedEvent] = []
    choice = Choice(("kind", "group_id"), rows)
    for batch in scan.batches(through_seq=record.seq, newest_first=True, choice=choice):
        for older in reversed(list(read_events(batch))):
            if isinstance(older.event, e.WeightsPublished | e.RunRestored):
                weight_version = older.event.weight_version if weight_version is None else weight_version
            else:
                kept.append(older)
                missing -= {older.event.group_id} if isinstance(older.event, e.GroupReserved) else set()
        if not missing and weight_version is not None:
            break
    for older in reversed(kept):
        _take(older.event, groups)
    if weight_version is None:
        weight_version = beginning.weight_version
    return _step(record, applied, groups, weight_version)


def _take(event: e.Event, groups: dict[int, _Group]) -> None:
    """Keep what an event says of what a group is trained on."""
    match event:
        case e.GroupReserved(group_id=group_id, prompt=prompt):
            groups[group_id] = _Group(prompt)
        case e.SiblingSealed() as sealed if sealed.group_id in groups:
            groups[sealed.group_id].sealed[sealed.generation] = sealed
        case e.GroupFinalized(group_id=group_id, rows=rows) if group_id in groups:
            groups[group_id].rows = rows


def _step(
    record: e.RecordedEvent, applied: e.StepApplied, groups: Mapping[int, _Group], weight_version: int
) -> StepExamples:
    return StepExamples(
        train_step=applied.train_step,
        seq=record.seq,
        time_us=record.time_us,
        weight_version=weight_version,
        groups=tuple(
            _examples(group_id, groups[group_id], weight_version)
            for group_id in applied.group_ids
            if group_id in groups
        ),
    )


def _examples(group_id: int, group: _Group, weight_version: int) -> GroupExamples:
    siblings = tuple(
        _example(group.sealed[row.generation], row)
        for row in sorted(group.rows, key=lambda row: row.generation)
        if row.generation in group.sealed
    )
    oldest = min((s.min_weight_version for s in siblings if s.completion_tokens), default=weight_version)
    return GroupExamples(
        group_id=group_id, prompt=group.prompt, staleness=weight_version - oldest, siblings=siblings
    )


def _example(sealed: e.SiblingSealed, row: e.CanonicalRowRef) -> SiblingExample:
    calls = sealed.receipt.calls if sealed.receipt is not None else ()
    return SiblingExample(
        generation=row.generation,
        attempt=row.attempt,
        validity=sealed.validity,
        raw_reward=sealed.raw_reward,
        shaped_reward=sealed.shaped_reward,
        model_calls=len(calls),
        prompt_tokens=sealed.prompt_tokens,
        completion_tokens=sealed.completion_tokens,
        row_tokens=row.num_tokens,
        finish_reason=sealed.finish_reason,
        min_weight_version=sealed.weight_version,
        max_weight_version=sealed.max_weight_version,
        row_digest=row.row_digest.hex(),
        call_digests=tuple(call.row_digest.hex() for call in calls),
    )
