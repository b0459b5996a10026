"""The groups of a timeline."""

from enum import StrEnum

import msgspec

from kinlog.lineage.state import GroupPhase, GroupState
from kinlog.schemas.prompts import PromptRef
from kinlog.schemas.reasons import Reason

__all__ = ["GroupEnd", "TimelineGroup", "shown_group", "shown_prompt"]


class GroupEnd(StrEnum):
    """Where a group was at the end of the log."""

    ALIVE = "alive"
    APPLIED = "applied"
    """A step of the surviving history was trained on it."""
    DROPPED = "dropped"
    PARKED = "parked"


class TimelineGroup(msgspec.Struct, kw_only=True):
    """A group of siblings, and where it was at the end of the log."""

    group_id: int
    sample_id: str
    task_name: str
    agent_name: str
    num_generations: int
    end: GroupEnd = GroupEnd.ALIVE
    train_step: int | None = None
    """The step that it was trained on in, on the surviving history."""
    reason: Reason | None = None


def shown_group(state: GroupState) -> TimelineGroup:
    """Return a group that was drawn in dropped history."""
    shown = shown_prompt(state.group_id, state.prompt, state.num_generations)
    if state.phase is GroupPhase.APPLIED:
        shown.end, shown.train_step = GroupEnd.APPLIED, state.claimed_step
    elif state.phase is GroupPhase.PARKED:
        shown.end, shown.reason = GroupEnd.PARKED, state.parked_reason
    return shown


def shown_prompt(group_id: int, prompt: PromptRef, num_generations: int) -> TimelineGroup:
    """Return a group that was drawn just now."""
    return TimelineGroup(
        group_id=group_id,
        sample_id=prompt.sample_id,
        task_name=prompt.task_name,
        agent_name=prompt.agent_name,
        num_generations=num_generations,
    )
