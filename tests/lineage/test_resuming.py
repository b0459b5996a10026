"""Which attempts the next one may go on from: decided from the log alone, live and at replay alike."""

import pytest
from kinlog_builders import Story

from kinlog.lineage.decide import Assignment, dispatch_siblings, resumable_attempts
from kinlog.replay.recovery.journal import unfinished_attempts
from kinlog.schemas.errors import TransitionError
from kinlog.schemas.events import SiblingDispatched
from kinlog.schemas.reasons import Granularity, Reason

CUT_OFF = (
    Reason.CONTROLLER_RESTART,
    Reason.PREEMPTED,
    Reason.WORKER_LOST,
    Reason.INFRASTRUCTURE_FAILURE,
)


def resumable(told: Story, group_id: int, *, max_resumes: int = 3) -> list[int]:
    group = told.group(group_id)
    return list(resumable_attempts(group, group.siblings[0], max_resumes=max_resumes))


@pytest.mark.parametrize("reason", CUT_OFF)
def test_attempt_that_was_cut_off_is_gone_on_from(reason):
    told = Story()
    group_id = told.generating()
    told.supersede(group_id, 0, reason)
    assert resumable(told, group_id) == [1]
    told.dispatch(group_id, 0)
    assert told.events[-1].resumes_attempt == 1
    assert told.group(group_id).siblings[0].resumed_from == 1


@pytest.mark.parametrize("reason", sorted(set(Reason) - set(CUT_OFF)))
def test_attempt_that_was_given_up_for_any_other_reason_is_not_gone_on_from(reason):
    told = Story()
    group_id = told.generating()
    told.supersede(group_id, 0, Reason.WORKER_LOST)
    told.dispatch(group_id, 0)
    told.supersede(group_id, 0, reason)
    assert resumable(told, group_id) == []
    told.dispatch(group_id, 0)
    assert told.group(group_id).siblings[0].resumed_from == 0


def test_tokens_are_gone_on_from_a_limited_number_of_times_and_then_anew():
    told = Story()
    group_id = told.generating()
    found = []
    for _ in range(5):
        told.supersede(group_id, 0, Reason.WORKER_LOST)
        found.append(resumable(told, group_id, max_resumes=2))
        told.dispatch(group_id, 0)
    assert found == [[1], [1, 2], [], [4], [4, 5]]


def test_nothing_is_gone_on_from_where_that_is_switched_off():
    told = Story()
    group_id = told.generating()
    told.supersede(group_id, 0, Reason.WORKER_LOST)
    (event,) = dispatch_siblings(told.p, group_id, [Assignment(0, "w", 0)])
    assert event.resumes_attempt is None


def test_cohort_is_never_gone_on_from():
    told = Story()
    group_id = told.generating(granularity=Granularity.PROMPT_GROUP)
    told.supersede(group_id, 0, Reason.WORKER_LOST)
    assert resumable(told, group_id) == []


def test_dispatch_that_goes_on_from_another_than_the_last_attempt_is_refused():
    told = Story()
    group_id = told.generating()
    told.supersede(group_id, 0, Reason.WORKER_LOST)
    event = SiblingDispatched(
        group_id=group_id, generation=0, attempt=3, weight_version=0, worker="w", seed=0, resumes_attempt=2
    )
    with pytest.raises(TransitionError, match="attempt 3 resumes attempt 2, and the one before it is 1"):
        told.commit(event)


def test_what_a_sibling_may_go_on_from_is_kept_until_it_is_sealed():
    told = Story()
    group_id = told.generating()
    told.supersede(group_id, 0, Reason.WORKER_LOST)
    told.dispatch(group_id, 0)
    assert unfinished_attempts(told.p) == {(group_id, 0, 1), (group_id, 0, 2), (group_id, 1, 1)}
    told.seal(group_id, 0)
    assert unfinished_attempts(told.p) == {(group_id, 1, 1)}
    told.seal(group_id, 1)
    assert unfinished_attempts(told.p) == frozenset()


def test_tokens_of_earlier_attempts_are_counted_with_the_seal():
    told = Story()
    group_id = told.generating()
    told.supersede(group_id, 0, Reason.WORKER_LOST)
    told.dispatch(group_id, 0)
    told.seal(group_id)
    resumed = told.group(group_id).siblings[0].sealed.resumed_tokens
    assert 0 < resumed == told.p.resumed_tokens_total


def test_tokens_of_weights_that_were_rolled_back_are_told_from_later_ones_of_the_same_version_in_every_life():
    told = Story()
    told.train(told.finalized())
    checkpoint = told.checkpoint()
    told.train(told.finalized())
    group_id = told.generating(siblings=1)  # by version 2, which is undone
    told.restore(checkpoint)
    told.supersede(group_id, 0, Reason.CONTROLLER_RESTART)
    told.train(told.finalized())
    told.train(told.finalized())
    sibling = told.group(group_id).siblings[0]
    assert (told.p.weight_version, sibling.rolled_back_to) == (3, 1)
    told.restore(told.checkpoint())
    assert sibling.rolled_back_to == 1
    told.dispatch(group_id)
    assert (sibling.resumed_from, sibling.rolled_back_to) == (1, 1)
    told.supersede(group_id, 0, Reason.DATA_FAILURE)
    told.dispatch(group_id)
    assert sibling.rolled_back_to is None  # it begins anew
