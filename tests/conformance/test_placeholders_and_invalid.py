"""Siblings without a receipt, and siblings that are no example: never taken for good, never missing from their group."""

import pytest
from kinlog_conformance import (
    COHORT,
    Given,
    Like,
    driven,
    finalize_answered,
    finalizing,
    generating,
    placeholder,
    reserved,
    restarted,
    sealed,
    worker_answers,
    worker_fails,
)

from kinlog.lineage.state import GroupPhase
from kinlog.replay.recovery.inventory import expected_inventory
from kinlog.schemas import events as e
from kinlog.schemas.errors import TransitionError
from kinlog.schemas.reasons import Reason, Validity

VALID, FAILED, POISONED = Validity.VALID, Validity.FAILED, Validity.POISONED
INVALID = [FAILED, POISONED]


def test_placeholder_is_an_attempt_of_its_own_without_receipt_worker_or_reward():
    Given(generating()).when(placeholder(0, 1)).then(
        events=[
            Like(e.AttemptSuperseded, generation=1, attempt=1, reason=Reason.DATA_FAILURE),
            Like(e.SiblingDispatched, generation=1, attempt=2, worker=""),
            Like(
                e.SiblingSealed,
                generation=1,
                attempt=2,
                receipt=None,
                shaped_reward=0.0,
                validity=Validity.PLACEHOLDER,
            ),
        ],
        state={0: {"sealed": {1}, "running": {0}}},
    )


def test_placeholder_is_not_unsealed_a_restart_sends_it_to_nobody():
    Given(generating(), placeholder(0, 1)).when(restarted()).then(
        events=[Like(e.AttemptSuperseded, generation=0, reason=Reason.CONTROLLER_RESTART)],
        only=(e.AttemptSuperseded, e.SiblingDispatched),
        state={0: {"sealed": {1}, "waiting": {0}}},
    )


def test_placeholder_is_not_a_good_sibling_it_lowers_the_valid_fraction():
    Given(reserved(siblings=4), sealing_all_but_one_of_four).when(driven(0)).then(
        state={0: {"phase": GroupPhase.FINALIZED, "valid_fraction": 0.75}}
    )


def sealing_all_but_one_of_four(bench):
    bench.story.admit(0)
    bench.story.dispatch(0)
    bench.story.commit(*placeholder(0, 2)(bench))
    bench.story.seal(0)


def test_placeholder_promises_no_rows():
    done = Given(generating(), placeholder(0, 1)).when(sealed(0)).then(state={0: GroupPhase.READY})
    assert {tag.generation for tag in expected_inventory(done.p).staging.values()} == {0}


def test_placeholder_has_no_place_in_a_cohort():
    Given(generating(granularity=COHORT)).when(placeholder(0, 1)).then(
        raises=(TransitionError, "it has no placeholders")
    )


@pytest.mark.parametrize("validity", INVALID)
def test_invalid_result_is_tried_again_and_the_good_one_is_kept(validity: Validity):
    Given(reserved(budget=e.RetryBudget(1, 1)), worker_answers(0, 1, 1, validity)).when(driven(0)).then(
        events=[Like(e.AttemptSuperseded, generation=1, reason=Reason.DATA_FAILURE)],
        only=(e.AttemptSuperseded,),
        state={0: {"phase": GroupPhase.FINALIZED, "attempts": (1, 2), "validity": (VALID, VALID)}},
    )


@pytest.mark.parametrize("validity", INVALID)
def test_invalid_result_is_kept_masked_once_the_budget_is_spent(validity: Validity):
    Given(
        reserved(budget=e.RetryBudget(1, 1)),
        worker_answers(0, 1, 1, validity),
        worker_answers(0, 1, 2, validity),
    ).when(driven(0)).then(
        state={
            0: {
                "phase": GroupPhase.FINALIZED,
                "attempts": (1, 2),
                "validity": (VALID, validity),
                "valid_fraction": 0.5,
            }
        }
    )


@pytest.mark.parametrize("validity", INVALID)
def test_budget_for_invalid_results_is_of_all_lives_together(validity: Validity):
    once_more = [worker_answers(0, 1, attempt, validity) for attempt in range(1, 9)]
    Given(reserved(budget=e.RetryBudget(9, 1)), lambda bench: bench.story.admit(0), *once_more).when(
        lambda bench: bench.story.dispatch(0),
        lambda bench: bench.story.supersede(0, 1, Reason.DATA_FAILURE),
        restarted(),
        driven(0),
    ).then(state={0: {"attempts": (2, 2), "validity": (VALID, validity)}})


@pytest.mark.parametrize("validity", INVALID)
def test_invalid_result_is_kept_at_once_when_that_is_the_policy(validity: Validity):
    Given(reserved(), worker_answers(0, 1, 1, validity), rollout__invalid_siblings="keep_masked").when(
        driven(0)
    ).then(
        events=[],
        only=(e.AttemptSuperseded,),
        state={0: {"attempts": (1, 1), "validity": (VALID, validity), "valid_fraction": 0.5}},
    )


@pytest.mark.parametrize("validity", INVALID)
def test_invalid_result_of_a_cohort_redoes_the_cohort(validity: Validity):
    Given(reserved(granularity=COHORT), worker_answers(0, 1, 1, validity)).when(driven(0)).then(
        state={0: {"phase": GroupPhase.FINALIZED, "attempts": (2, 2), "validity": (VALID, VALID)}}
    )


def test_invalid_sibling_is_never_reused_as_a_good_one_after_a_restart():
    Given(reserved(), worker_answers(0, 1, 1, POISONED), rollout__invalid_siblings="keep_masked").when(
        driven(0), restarted(tail_rows=True)
    ).then(state={0: {"validity": (VALID, POISONED), "valid_fraction": 0.5}})


def test_finalized_group_has_a_row_for_each_of_its_siblings_good_or_not():
    done = (
        Given(
            reserved(siblings=4, budget=e.RetryBudget(0, 0)),
            worker_fails(0, 1, 1),
            worker_answers(0, 2, 1, FAILED),
            rollout__spent_retry_budget="train_partial",
        )
        .when(driven(0))
        .then(state={0: {"validity": (VALID, Validity.PLACEHOLDER, FAILED, VALID)}})
    )
    (finalized,) = done.of(e.GroupFinalized)
    assert [(row.generation, row.attempt) for row in finalized.rows] == [(0, 1), (1, 2), (2, 1), (3, 1)]


@pytest.mark.parametrize("missing", range(3))
def test_group_with_a_row_missing_is_not_finalized(missing: int):
    given = Given(finalizing(siblings=3))

    def answered_without_one(bench):
        whole = finalize_answered(0)(bench)
        rows = tuple(row for row in whole.rows if row.generation != missing)
        return e.GroupFinalized(group_id=0, rows=rows, valid_fraction=1.0)

    given.when(answered_without_one).then(raises=(TransitionError, "one row of each sealed attempt"))


@pytest.mark.parametrize(("invalid", "kept"), [(1, True), (2, True), (3, False), (4, False)])
def test_controller_drops_a_finalized_group_of_which_too_few_are_valid(invalid: int, kept: bool):
    done = (
        Given(
            reserved(siblings=4),
            *(worker_answers(0, g, 1, FAILED) for g in range(invalid)),
            rollout__invalid_siblings="keep_masked",
            rollout__min_valid_fraction_per_group=0.5,
        )
        .when(driven(0))
        .then(state={0: GroupPhase.FINALIZED if kept else None})
    )
    (finalized,) = done.of(e.GroupFinalized)
    assert len(finalized.rows) == 4, "the finalizer judges nothing"
    assert [d.reason for d in done.of(e.GroupDropped)] == [Reason.LOW_VALID_FRACTION] * (not kept)


def test_placeholder_for_a_sibling_that_waits_is_refused():
    Given(generating(), lambda bench: bench.story.supersede(0, 1)).when(placeholder(0, 1)).then(
        raises=(TransitionError, "no running or sealed attempt")
    )
