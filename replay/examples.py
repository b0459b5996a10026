"""What each optimizer step of the surviving history was trained on, in order."""

from collections.abc import Iterable

import msgspec

from kinlog.lineage.state import GroupState, Projection
from kinlog.schemas import events as e
from kinlog.schemas.prompts import PromptRef
from kinlog.schemas.reasons import FinishReason, Validity

__all__ = ["SiblingExample", "GroupExamples", "StepExamples", "trained_examples"]


class SiblingExample(msgspec.Struct, frozen=True, kw_only=True):
    """One sibling as it was trained on."""

    generation: int
    attempt: int
    """Which execution of the sibling it is. Two runs may well differ in it, and in nothing else."""
    validity: Validity
    raw_reward: float
    shaped_reward: float
    """The value that was trained on."""
    completion_tokens: int
    finish_reason: FinishReason
    min_weight_version: int
    max_weight_version: int
    row_digest: str
    """Digest (hex) of the canonical row: its tokens, masks, log-probabilities, weight versions and rewards."""


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


def trained_examples(
    records: Iterable[e.RecordedEvent], beginning: Projection, *, step: int | None = None
) -> dict[int, StepExamples]:
    """Return the steps of the surviving history, by number, or only ``step``.

    A step that a restart undid is not part of it; the one that was applied in its place is.

    Parameters
    ----------
    records:
        A log's events, in order.
    beginning:
        What the log begins at: an empty projection, or what is left of history that was dropped. Steps of dropped history
        are missing.
    step:
        The only step that is wanted.
    """
    groups = {group_id: _Group.going_on_from(state) for group_id, state in beginning.groups.items()}
    steps: dict[int, StepExamples] = {}
    weight_version = beginning.weight_version
    for record in records:
        match record.event:
            case e.GroupReserved(group_id=group_id, prompt=prompt):
                groups[group_id] = _Group(prompt)
            case e.SiblingSealed() as sealed if sealed.group_id in groups:
                groups[sealed.group_id].sealed[sealed.generation] = sealed
            case e.GroupFinalized(group_id=group_id, rows=rows) if group_id in groups:
                groups[group_id].rows = rows
            case e.GroupDropped(group_id=group_id):
                groups.pop(group_id, None)
            case e.WeightsPublished(weight_version=weight_version):
                pass
            case e.RunRestored() as restored:
                weight_version = restored.weight_version
                for undone in [number for number in steps if number > restored.train_step]:
                    del steps[undone]
            case e.StepApplied() as applied if step is None or applied.train_step == step:
                steps[applied.train_step] = StepExamples(
                    train_step=applied.train_step,
                    seq=record.seq,
                    time_us=record.time_us,
                    groups=tuple(
                        _examples(group_id, groups[group_id], weight_version)
                        for group_id in applied.group_ids
                        if group_id in groups
                    ),
                )
    return steps


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
    return SiblingExample(
        generation=row.generation,
        attempt=row.attempt,
        validity=sealed.validity,
        raw_reward=sealed.raw_reward,
        shaped_reward=sealed.shaped_reward,
        completion_tokens=sealed.completion_tokens,
        finish_reason=sealed.finish_reason,
        min_weight_version=sealed.weight_version,
        max_weight_version=sealed.max_weight_version,
        row_digest=row.row_digest.hex(),
    )
