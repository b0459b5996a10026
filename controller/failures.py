"""What failures lead to: another attempt after a pause, or the end of the group as the policy says."""

from collections.abc import Sequence

from kinlog.controller.attempts import Answer
from kinlog.controller.runtime import Runtime, clear_group_rows
from kinlog.lineage import decide
from kinlog.lineage.ledger import Cut
from kinlog.lineage.state import GroupState
from kinlog.schemas.codec import encode_event
from kinlog.schemas.errors import EventTooLargeError, RolloutsFailError
from kinlog.schemas.events import Event, GroupDropped, GroupParked, SiblingSealed
from kinlog.schemas.orders import RolloutFailed
from kinlog.schemas.reasons import Granularity, Reason, Validity

__all__ = ["failure_of", "give_up", "park", "pause", "back_off"]


def failure_of(runtime: Runtime, answer: Answer) -> RolloutFailed | None:
    """Return what is wrong with an answer: a failure, or a result that is no example and may be tried again."""
    if isinstance(answer, RolloutFailed):
        return answer
    group = runtime.projection.groups.get(answer.group_id)
    if group is None or not group.live:
        return None
    sibling = group.siblings[answer.generation]
    if not sibling.running or sibling.attempt != answer.attempt:
        return None  # late, whatever it is worth
    too_large = _too_large(answer)
    if too_large:
        return _data_failure(answer, too_large)
    if answer.validity is Validity.VALID or runtime.config.rollout.invalid_siblings == "keep_masked":
        return None
    if decide.retry_budget_spent(group, sibling, Reason.DATA_FAILURE):
        return None  # kept, masked: whether too few are valid is judged when the group is finalized
    return _data_failure(answer, f"the result is {answer.validity}")


def _too_large(answer: SiblingSealed) -> str:
    """Say how a result is too large for an event, if it is: recorded, it would end the run, and so every life after it."""
    try:
        encode_event(answer)
    except EventTooLargeError as error:
        calls = len(answer.receipt.calls) if answer.receipt is not None else 0
        return f"the receipt of {calls} model calls is too large for an event: {error}"
    return ""


def _data_failure(answer: SiblingSealed, detail: str) -> RolloutFailed:
    return RolloutFailed(
        group_id=answer.group_id,
        generation=answer.generation,
        attempt=answer.attempt,
        reason=Reason.DATA_FAILURE,
        detail=detail,
    )


async def give_up(runtime: Runtime, cut: Cut, failed: RolloutFailed) -> None:
    """Supersede a failed attempt; do with the group as configured when the sibling's budget is spent.

    Raises
    ------
    RolloutsFailError
        The budget is spent, and the policy is to stop the run.
    """
    group = runtime.projection.groups.get(failed.group_id)
    if group is None or not group.live:
        return
    sibling = group.siblings[failed.generation]
    if not sibling.running or sibling.attempt != failed.attempt:
        return
    superseded = decide.supersede_attempt(
        runtime.projection, failed.group_id, failed.generation, failed.reason, failed.detail
    )
    if not decide.retry_budget_spent(group, sibling, failed.reason):
        runtime.ledger.commit(cut, *superseded)
        return
    policy = runtime.config.rollout.spent_retry_budget
    detail = f"generation {failed.generation}: {failed.reason}: {failed.detail}"
    if policy == "train_partial" and group.granularity is Granularity.SIBLING:
        events = decide.seal_placeholder(
            runtime.projection, failed.group_id, failed.generation, failed.reason, failed.detail
        )
        runtime.ledger.commit(cut, *events)
    elif policy == "drop":
        dropped = GroupDropped(group_id=failed.group_id, reason=Reason.RETRY_BUDGET, detail=detail[:500])
        runtime.ledger.commit(cut, *superseded, dropped)
        await clear_group_rows(runtime, cut, [group], Reason.RETRY_BUDGET)
    else:
        await park(runtime, cut, group, detail, *superseded)
    if policy == "fail_run":
        raise RolloutsFailError(
            f"group {failed.group_id} is parked: the retry budget of {detail} is spent, and "
            "rollout.spent_retry_budget is fail_run. Correct the cause, then resume the run."
        )


async def park(runtime: Runtime, cut: Cut, group: GroupState, detail: str, *before: Event) -> None:
    """Give a group up for good, in one unit with what led to it. Its sealed siblings' rows are nobody's then."""
    parked = GroupParked(group_id=group.group_id, reason=Reason.RETRY_BUDGET, detail=detail[:500])
    runtime.ledger.commit(cut, *before, parked)
    await clear_group_rows(runtime, cut, [group], Reason.RETRY_BUDGET)


async def back_off(runtime: Runtime, group: GroupState, generations: Sequence[int]) -> None:
    """Wait before the next attempt of siblings, as long as their failures so far ask for."""
    siblings = [group.siblings[generation] for generation in generations]
    failures = max(s.infrastructure_failures + s.data_failures for s in siblings)
    if failures:
        await pause(runtime, failures, f"group {group.group_id} before its next attempt")


async def pause(runtime: Runtime, failures: int, who: str) -> None:
    """Wait before the next try: twice as long after each failure, up to a bound. ``who`` pauses is for the report of a
    stall."""
    settings = runtime.config.supervision
    doublings = min(failures - 1, 64)  # budgets have no upper limit, floats do
    pause_s = min(settings.retry_backoff_s * 2**doublings, settings.max_retry_backoff_s)
    with runtime.waits.on(f"the pause of {pause_s:g} s of {who}"):
        await runtime.sleep(pause_s)
