"""Decisions: pure functions from the projection and a request to the events that are to be appended.

Nothing here changes state or knows of files. The ledger appends what is decided, then folds it.
"""

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from kinlog.lineage.fold import DATA_REASONS, INFRASTRUCTURE_REASONS, sibling_of
from kinlog.lineage.state import GroupState, Projection, SiblingState
from kinlog.schemas import events as e
from kinlog.schemas.errors import ResultConflictError, TransitionError
from kinlog.schemas.prompts import MAX_NAME_BYTES, PromptRef
from kinlog.schemas.reasons import FinishReason, Granularity, Reason, Validity

__all__ = [
    "Assignment",
    "RESUMABLE_REASONS",
    "SealOutcome",
    "reserve_group",
    "dispatch_siblings",
    "seal_sibling",
    "seal_cohort",
    "classify_result",
    "supersede_attempt",
    "superseded_event",
    "seal_placeholder",
    "retry_budget_spent",
    "finalize_budget_spent",
    "resumable_attempts",
]

#: Why an attempt was given up that there was nothing wrong with: what it had generated is as good as any.
RESUMABLE_REASONS = frozenset(
    {Reason.CONTROLLER_RESTART, Reason.PREEMPTED, Reason.WORKER_LOST, Reason.INFRASTRUCTURE_FAILURE}
)


class Assignment(NamedTuple):
    """A sibling that is to be dispatched, and to whom."""

    generation: int
    worker: str
    seed: int


class SealOutcome(Enum):
    """What becomes of a result."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """The same result was sealed before: nothing to do."""
    LATE = "late"
    """Its attempt was superseded, or its group left: rejected, and recorded."""


def reserve_group(
    p: Projection,
    *,
    prompt: PromptRef,
    num_generations: int,
    granularity: Granularity,
    retry_budget: e.RetryBudget,
    train_step: int | None,
) -> e.GroupReserved:
    """Reserve the next group for the next draw.

    Raises
    ------
    TransitionError
        The prompt is not the next draw, or a name of it cannot be recorded.
    """
    if prompt.draw_index != p.draw_cursor:
        raise TransitionError(f"expected draw {p.draw_cursor}, found {prompt.draw_index}")
    for what, name in (
        ("sample id", prompt.sample_id),
        ("task name", prompt.task_name),
        ("agent name", prompt.agent_name),
    ):
        _check_name(prompt.draw_index, what, name)
    return e.GroupReserved(
        group_id=p.next_group_id,
        prompt=prompt,
        num_generations=num_generations,
        granularity=granularity,
        retry_budget=retry_budget,
        weight_version=p.weight_version,
        train_step=train_step,
        draw_cursor=prompt.draw_index + 1,
    )


def resumable_attempts(group: GroupState, sibling: SiblingState, *, max_resumes: int) -> range:
    """Return the attempts that the sibling's next one may go on from: the newest that left any tokens counts.

    None when the last one was given up for what it had made, or when as many as ``max_resumes`` have gone on from the
    same tokens: there may be something about them. A cohort is redone from the start.
    """
    oldest = sibling.resumed_from or sibling.attempt
    if (
        group.granularity is Granularity.PROMPT_GROUP
        or not sibling.attempt
        or sibling.last_reason not in RESUMABLE_REASONS
        or sibling.attempt - oldest >= max_resumes
    ):
        return range(0)
    return range(oldest, sibling.attempt + 1)


def dispatch_siblings(
    p: Projection, group_id: int, assignments: Sequence[Assignment], *, max_resumes: int = 0
) -> tuple[e.SiblingDispatched, ...]:
    """Allocate the next attempt of each assigned sibling. A ``prompt_group`` group goes as a whole, on one attempt.

    Parameters
    ----------
    max_resumes:
        How many attempts in a row may go on from what those before them generated. 0: each begins anew.

    Raises
    ------
    TransitionError
        The group or a sibling is not there, or only a part of a cohort is assigned.
    """
    group = _alive(p, group_id)
    cohort = group.granularity is Granularity.PROMPT_GROUP
    if cohort and {a.generation for a in assignments} != set(group.siblings):
        raise TransitionError(
            f"group {group_id} is of granularity prompt_group: all its siblings are sent, or none"
        )
    cohort_attempt = 1 + max(sibling.attempt for sibling in group.siblings.values())
    dispatched: list[e.SiblingDispatched] = []
    for assignment in assignments:
        sibling = sibling_of(group, assignment.generation)
        resumable = resumable_attempts(group, sibling, max_resumes=max_resumes)
        dispatched.append(
            e.SiblingDispatched(
                group_id=group_id,
                generation=assignment.generation,
                attempt=cohort_attempt if cohort else 1 + sibling.attempt,
                weight_version=p.weight_version,
                worker=assignment.worker,
                seed=assignment.seed,
                resumes_attempt=resumable[-1] if resumable else None,
            )
        )
    return tuple(dispatched)


def classify_result(p: Projection, result: e.SiblingSealed) -> SealOutcome:
    """Say what becomes of a result, whatever its group's granularity.

    Raises
    ------
    ResultConflictError
        A different result of the same attempt is sealed.
    TransitionError
        The attempt was never dispatched, or the result is not what a seal may hold.
    """
    group = p.groups.get(result.group_id)
    if group is None:
        if result.group_id >= p.next_group_id:
            raise TransitionError(f"a result for group {result.group_id}, which was never reserved")
        return SealOutcome.LATE
    sibling = group.siblings.get(result.generation)
    if sibling is None or result.attempt > sibling.attempt or result.attempt < 1:
        raise TransitionError(
            f"a result for group {result.group_id}/{result.generation} attempt {result.attempt}, "
            "which was never dispatched"
        )
    if sibling.sealed is not None and result.attempt == sibling.attempt:
        if sibling.sealed == result:
            return SealOutcome.DUPLICATE
        raise ResultConflictError(
            f"group {result.group_id}/{result.generation} attempt {result.attempt} is sealed with another result: "
            f"sealed {sibling.sealed}, found {result}"
        )
    if not sibling.running or result.attempt != sibling.attempt:
        return SealOutcome.LATE
    if (result.receipt is None) != (result.validity is Validity.PLACEHOLDER):
        found = "no receipt" if result.receipt is None else "a receipt"
        raise TransitionError(
            f"group {result.group_id}/{result.generation}: the result is {result.validity} and has {found}; "
            "placeholders have none, and everything else has one"
        )
    for name, reward in (("raw", result.raw_reward), ("shaped", result.shaped_reward)):
        if not math.isfinite(reward):
            raise TransitionError(
                f"group {result.group_id}/{result.generation}: the {name} reward is {reward}; rewards are finite"
            )
    return SealOutcome.ACCEPTED


def seal_sibling(p: Projection, result: e.SiblingSealed) -> tuple[SealOutcome, tuple[e.Event, ...]]:
    """Decide about one sibling's result. Raises as :func:`classify_result`."""
    outcome = classify_result(p, result)
    if outcome is SealOutcome.LATE:
        return outcome, (_rejected(result),)
    if outcome is SealOutcome.DUPLICATE:
        return outcome, ()
    if p.groups[result.group_id].granularity is Granularity.PROMPT_GROUP:
        raise TransitionError(
            f"group {result.group_id} is of granularity prompt_group: it seals with its cohort only"
        )
    return outcome, (result,)


def seal_cohort(p: Projection, group_id: int, results: Mapping[int, e.SiblingSealed]) -> tuple[e.Event, ...]:
    """Seal all siblings of a ``prompt_group`` group at once.

    Raises
    ------
    TransitionError
        A sibling's result is missing, or is not of the cohort's current attempt.
    ResultConflictError
        As for :func:`classify_result`.
    """
    group = _alive(p, group_id)
    if set(results) != set(group.siblings):
        missing = sorted(set(group.siblings) - set(results))
        raise TransitionError(
            f"group {group_id}: the cohort seals whole; generations {missing} have no result"
        )
    for generation, result in results.items():
        if (result.group_id, result.generation) != (group_id, generation):
            raise TransitionError(f"group {group_id}/{generation}: got the result of another sibling")
        if classify_result(p, result) is not SealOutcome.ACCEPTED:
            raise TransitionError(f"group {group_id}/{generation}: attempt {result.attempt} is not running")
    attempt = next(iter(results.values())).attempt
    return (e.CohortSealed(group_id=group_id, attempt=attempt), *(results[g] for g in sorted(results)))


def supersede_attempt(
    p: Projection, group_id: int, generation: int, reason: Reason, detail: str = ""
) -> tuple[e.AttemptSuperseded, ...]:
    """Give up a sibling's current attempt, and with ``prompt_group`` its whole cohort's.

    Raises
    ------
    TransitionError
        The sibling has no attempt that could be given up.
    """
    group = _alive(p, group_id)
    sibling = sibling_of(group, generation)
    if sibling.waiting:
        raise TransitionError(f"group {group_id}/{generation} has no running or sealed attempt")
    first = superseded_event(group, sibling, reason, detail)
    if group.granularity is not Granularity.PROMPT_GROUP:
        return (first,)
    others = [s for g, s in sorted(group.siblings.items()) if g != generation and not s.waiting]
    because = f"generation {generation}: {reason}"
    return (first, *(superseded_event(group, s, Reason.COHORT_RESTART, because) for s in others))


def superseded_event(
    group: GroupState, sibling: SiblingState, reason: Reason, detail: str
) -> e.AttemptSuperseded:
    """Return what gives up the current attempt of one sibling, and of no other, where it is known that it has one."""
    return e.AttemptSuperseded(
        group_id=group.group_id,
        generation=sibling.generation,
        attempt=sibling.attempt,
        reason=reason,
        detail=detail[:500],
    )


def seal_placeholder(
    p: Projection, group_id: int, generation: int, reason: Reason, detail: str = ""
) -> tuple[e.Event, ...]:
    """Give up a sibling's running attempt, and seal a placeholder in its place: one unit, for a sibling that no further
    attempt is made of. The placeholder is an attempt of its own, without a worker, a receipt or a reward.

    Raises
    ------
    TransitionError
        The sibling has no running attempt, or its group is a cohort, which is whole or nothing.
    """
    group = _alive(p, group_id)
    if group.granularity is Granularity.PROMPT_GROUP:
        raise TransitionError(f"group {group_id} is of granularity prompt_group: it has no placeholders")
    superseded = supersede_attempt(p, group_id, generation, reason, detail)
    attempt = 1 + sibling_of(group, generation).attempt
    return (
        *superseded,
        e.SiblingDispatched(
            group_id=group_id,
            generation=generation,
            attempt=attempt,
            weight_version=p.weight_version,
            worker="",
            seed=0,
        ),
        e.SiblingSealed(
            group_id=group_id,
            generation=generation,
            attempt=attempt,
            weight_version=p.weight_version,
            max_weight_version=p.weight_version,
            receipt=None,
            raw_reward=0.0,
            shaped_reward=0.0,
            prompt_tokens=0,
            completion_tokens=0,
            finish_reason=FinishReason.ABORTED,
            validity=Validity.PLACEHOLDER,
        ),
    )


def retry_budget_spent(group: GroupState, sibling: SiblingState, reason: Reason) -> bool:
    """Whether one more failure of this class, or one more restart, is more than the sibling's budget allows."""
    if reason in INFRASTRUCTURE_REASONS:
        return sibling.infrastructure_failures >= group.retry_budget.infrastructure
    if reason in DATA_REASONS:
        return sibling.data_failures >= group.retry_budget.data
    if reason is Reason.CONTROLLER_RESTART and group.retry_budget.restarts is not None:
        return sibling.restarts >= group.retry_budget.restarts
    return False


def finalize_budget_spent(group: GroupState) -> bool:
    """Whether one more finalize that comes to nothing is more than the group's budget allows."""
    return group.finalize_failures >= group.retry_budget.infrastructure


def _check_name(draw_index: int, what: str, name: str) -> None:
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise TransitionError(f"draw {draw_index}: the {what} {name!r} is not valid text") from error
    if not 0 < size <= MAX_NAME_BYTES:
        raise TransitionError(
            f"draw {draw_index}: the {what} has {size} bytes; 1 to {MAX_NAME_BYTES} are allowed"
        )


def _alive(p: Projection, group_id: int) -> GroupState:
    group = p.groups.get(group_id)
    if group is None or not group.live:
        phase = "unknown" if group is None else group.phase
        raise TransitionError(f"group {group_id} is not alive: {phase}")
    return group


def _rejected(result: e.SiblingSealed) -> e.LateResultRejected:
    return e.LateResultRejected(
        group_id=result.group_id,
        generation=result.generation,
        attempt=result.attempt,
        reason=Reason.SUPERSEDED_ATTEMPT,
        completion_tokens=result.completion_tokens,
    )
