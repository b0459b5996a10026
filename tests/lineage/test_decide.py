"""Decisions: what becomes of a result, who is sent again, and what is refused before anything is recorded."""

import pytest
from kinlog_builders import Story, prompt_ref, sealed_result
from msgspec.structs import replace

from kinlog.lineage.decide import (
    Assignment,
    SealOutcome,
    dispatch_siblings,
    reserve_group,
    retry_budget_spent,
    seal_cohort,
    seal_sibling,
    supersede_attempt,
)
from kinlog.lineage.state import encode_projection
from kinlog.schemas import events as e
from kinlog.schemas.errors import ResultConflictError, TransitionError
from kinlog.schemas.reasons import Granularity, Reason


@pytest.fixture
def told() -> Story:
    return Story()


def reserve(told: Story, prompt) -> e.GroupReserved:
    return reserve_group(
        told.p,
        prompt=prompt,
        num_generations=2,
        granularity=Granularity.SIBLING,
        retry_budget=e.RetryBudget(1, 1),
        train_step=None,
    )


# ---- reservations ---------------------------------------------------------------------------------------------------


def test_reservation_takes_the_next_group_and_the_next_draw(told):
    told.reserve()
    event = reserve(told, prompt_ref(1))
    assert (event.group_id, event.prompt.draw_index, event.draw_cursor) == (1, 1, 2)


@pytest.mark.parametrize("draw", [0, 2])
def test_reservation_of_another_than_the_next_draw_is_refused(told, draw):
    told.reserve()
    with pytest.raises(TransitionError, match=f"expected draw 1, found {draw}"):
        reserve(told, prompt_ref(draw))


@pytest.mark.parametrize(
    ("sample_id", "match"), [("", "0 bytes"), ("x" * 1025, "1025 bytes"), ("\ud800", "not valid text")]
)
def test_sample_id_that_cannot_be_recorded_is_refused(told, sample_id, match):
    with pytest.raises(TransitionError, match=match):
        reserve(told, replace(prompt_ref(0), sample_id=sample_id))


def test_sample_id_is_opaque(told):
    told.commit(reserve(told, replace(prompt_ref(0), sample_id="a/b.c:\n\0é")))
    assert told.group(0).prompt.sample_id == "a/b.c:\n\0é"


# ---- dispatch -------------------------------------------------------------------------------------------------------


def test_each_sibling_counts_its_own_attempts(told):
    group = told.generating()
    told.supersede(group, 1)
    (event,) = dispatch_siblings(told.p, group, [Assignment(1, "w", 5)])
    assert (event.generation, event.attempt, event.seed) == (1, 2, 5)


def test_cohort_is_sent_whole_on_one_attempt_or_not_at_all(told):
    group = told.generating(siblings=3, granularity=Granularity.PROMPT_GROUP)
    told.supersede(group, 2)
    assignments = [Assignment(g, "w", g) for g in range(3)]
    assert {event.attempt for event in dispatch_siblings(told.p, group, assignments)} == {2}
    with pytest.raises(TransitionError, match="all its siblings are sent, or none"):
        dispatch_siblings(told.p, group, assignments[:2])


def test_dispatch_to_what_does_not_exist_is_refused(told):
    group = told.reserve()
    told.admit(group)
    with pytest.raises(TransitionError, match="group 7 is not alive: unknown"):
        dispatch_siblings(told.p, 7, [Assignment(0, "w", 0)])
    with pytest.raises(TransitionError, match=f"group {group}: no generation 9"):
        dispatch_siblings(told.p, group, [Assignment(9, "w", 0)])


# ---- results --------------------------------------------------------------------------------------------------------


def test_result_of_the_current_attempt_is_accepted(told):
    group = told.generating()
    result = told.result(group, 0)
    assert seal_sibling(told.p, result) == (SealOutcome.ACCEPTED, (result,))


def test_same_result_twice_is_a_no_op(told):
    group = told.generating()
    result = told.result(group, 0)
    told.commit(result)
    assert seal_sibling(told.p, result) == (SealOutcome.DUPLICATE, ())


@pytest.mark.parametrize("change", [{"raw_reward": 0.25}, {"completion_tokens": 9}, {"receipt": None}])
def test_different_result_for_a_sealed_attempt_is_a_conflict(told, change):
    group = told.generating()
    result = told.result(group, 0)
    told.commit(result)
    with pytest.raises(ResultConflictError, match=f"group {group}/0 attempt 1"):
        seal_sibling(told.p, replace(result, **change))


def late(result: e.SiblingSealed) -> tuple[SealOutcome, tuple[e.Event, ...]]:
    rejected = e.LateResultRejected(
        group_id=result.group_id,
        generation=result.generation,
        attempt=result.attempt,
        reason=Reason.SUPERSEDED_ATTEMPT,
        completion_tokens=result.completion_tokens,
    )
    return SealOutcome.LATE, (rejected,)


@pytest.mark.parametrize("then", ["waiting", "running again", "sealed again"])
def test_result_of_a_superseded_attempt_is_rejected_and_recorded(told, then):
    group = told.generating()
    result = told.result(group, 0)
    told.supersede(group, 0)
    if then != "waiting":
        told.dispatch(group, 0)
    if then == "sealed again":
        told.seal(group, 0)
    assert seal_sibling(told.p, result) == late(result)
    told.commit(*seal_sibling(told.p, result)[1])
    assert told.p.late_rejected == 1


def test_result_for_a_group_that_left_is_rejected_and_recorded(told):
    dropped, parked = told.generating(), told.generating()
    results = [told.result(dropped, 0), told.result(parked, 0)]
    told.commit(e.GroupDropped(group_id=dropped, reason=Reason.STALE))
    told.commit(e.GroupParked(group_id=parked, reason=Reason.RETRY_BUDGET))
    for result in results:
        assert seal_sibling(told.p, result) == late(result)


@pytest.mark.parametrize(("group_id", "generation", "attempt"), [(1, 0, 1), (0, 2, 1), (0, 0, 2), (0, 0, 0)])
def test_result_of_what_was_never_dispatched_is_an_error(told, group_id, generation, attempt):
    told.generating()
    with pytest.raises(TransitionError, match="never"):
        seal_sibling(told.p, sealed_result(group_id, generation, attempt))


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("field", ["raw_reward", "shaped_reward"])
def test_reward_that_is_not_finite_is_refused(told, field, reward):
    group = told.generating()
    with pytest.raises(TransitionError, match=f"the {field.removesuffix('_reward')} reward is"):
        seal_sibling(told.p, replace(told.result(group, 0), **{field: reward}))


def test_placeholder_and_zero_token_results_are_sealed(told):
    group = told.generating()
    told.seal(group, 0, placeholder=True)
    told.commit(replace(told.result(group, 1), completion_tokens=0))
    assert told.group(group).all_sealed


# ---- cohorts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cohort(told) -> int:
    return told.generating(siblings=3, granularity=Granularity.PROMPT_GROUP)


def results_of(told: Story, group: int) -> dict[int, e.SiblingSealed]:
    return {g: told.result(group, g) for g in told.group(group).siblings}


def test_cohort_seals_in_one_decision_in_order_of_generation(told, cohort):
    results = results_of(told, cohort)
    events = seal_cohort(told.p, cohort, dict(reversed(results.items())))
    assert events == (e.CohortSealed(group_id=cohort, attempt=1), *results.values())
    told.commit(*events)
    assert told.group(cohort).cohort_attempt == 1


def test_cohort_does_not_seal_without_every_result_nor_by_single_siblings(told, cohort):
    results = results_of(told, cohort)
    with pytest.raises(TransitionError, match=r"generations \[1\] have no result"):
        seal_cohort(told.p, cohort, {g: r for g, r in results.items() if g != 1})
    with pytest.raises(TransitionError, match="seals with its cohort only"):
        seal_sibling(told.p, results[0])


def test_cohort_results_are_paired_by_identity(told, cohort):
    results = results_of(told, cohort)
    results[0], results[1] = results[1], results[0]
    with pytest.raises(TransitionError, match="result of another sibling"):
        seal_cohort(told.p, cohort, results)


def test_one_failure_discards_every_result_of_the_cohorts_attempt(told, cohort):
    results = results_of(told, cohort)
    events = supersede_attempt(told.p, cohort, 1, Reason.WORKER_LOST, "gone")
    assert [(event.generation, event.reason) for event in events] == [
        (1, Reason.WORKER_LOST),
        (0, Reason.COHORT_RESTART),
        (2, Reason.COHORT_RESTART),
    ]
    assert all("generation 1: worker_lost" in event.detail for event in events[1:])
    told.commit(*events)
    assert told.group(cohort).cohort_attempt is None
    with pytest.raises(TransitionError, match="attempt 1 is not running"):
        seal_cohort(told.p, cohort, results)
    told.dispatch(cohort)
    with pytest.raises(TransitionError, match="attempt 1 is not running"):
        seal_cohort(told.p, cohort, results)
    assert seal_sibling(told.p, results[0]) == late(results[0])
    told.seal(cohort)
    assert {s.attempt for s in told.group(cohort).siblings.values()} == {2}


def test_failure_after_the_cohort_sealed_takes_the_whole_cohort_back(told, cohort):
    told.seal(cohort)
    told.supersede(cohort, 0, Reason.ROWS_MISSING)
    assert told.group(cohort).cohort_attempt is None
    assert all(s.waiting for s in told.group(cohort).siblings.values())
    assert told.p.superseded == {Reason.ROWS_MISSING: 1, Reason.COHORT_RESTART: 2}


def test_only_the_sibling_that_failed_is_charged_for_a_cohorts_restart(told, cohort):
    told.supersede(cohort, 1, Reason.TIMEOUT)
    assert [s.infrastructure_failures for s in told.group(cohort).siblings.values()] == [0, 1, 0]


# ---- supersede and budgets ------------------------------------------------------------------------------------------


def test_supersede_of_what_cannot_be_given_up_is_refused(told):
    group = told.reserve()
    told.admit(group)
    with pytest.raises(TransitionError, match="no running or sealed attempt"):
        supersede_attempt(told.p, group, 0, Reason.STALE)
    with pytest.raises(TransitionError, match=f"group {group}: no generation 9"):
        supersede_attempt(told.p, group, 9, Reason.STALE)
    with pytest.raises(TransitionError, match="not alive"):
        supersede_attempt(told.p, 5, 0, Reason.STALE)


def test_supersede_with_a_long_detail_still_fits_an_event(told):
    group = told.generating()
    (event,) = supersede_attempt(told.p, group, 0, Reason.TIMEOUT, "é" * 100_000)
    assert event.detail == "é" * 500


def test_budget_is_spent_by_its_own_class_of_failures_over_all_lives(told):
    group = told.reserve(siblings=1, budget=e.RetryBudget(2, 1))
    told.admit(group)
    spent = []
    for reason in (Reason.TIMEOUT, Reason.DATA_FAILURE, Reason.WORKER_LOST):
        told.dispatch(group)
        told.supersede(group, 0, reason)
        told.restore()
        sibling = told.group(group).siblings[0]
        spent.append(
            tuple(
                retry_budget_spent(told.group(group), sibling, r)
                for r in (Reason.INFRASTRUCTURE_FAILURE, Reason.DATA_FAILURE, Reason.STALE)
            )
        )
    assert spent == [(False, False, False), (False, True, False), (True, True, False)]


def test_granularity_is_what_was_stored_at_the_reservation(told):
    group = told.generating(granularity=Granularity.PROMPT_GROUP)
    assert told.group(group).granularity is Granularity.PROMPT_GROUP
    assert len(supersede_attempt(told.p, group, 0, Reason.TIMEOUT)) == 2


def test_decisions_change_nothing(told):
    group, cohort = told.generating(), told.generating(granularity=Granularity.PROMPT_GROUP)
    before = encode_projection(told.p)
    reserve(told, prompt_ref(2))
    seal_sibling(told.p, told.result(group, 0))
    seal_cohort(told.p, cohort, results_of(told, cohort))
    supersede_attempt(told.p, cohort, 0, Reason.TIMEOUT)
    assert encode_projection(told.p) == before
