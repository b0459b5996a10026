"""Retries: two classes of failure with a budget each, over all lives, and a policy for a group whose budget is spent."""

import pytest
from kinlog_conformance import (
    COHORT,
    SIBLING,
    Act,
    Given,
    Like,
    dispatched,
    driven,
    generating,
    given_up,
    living,
    reserved,
    restarted,
    worker_cannot_stage,
    worker_dies,
    worker_fails,
    worker_hangs,
)

from kinlog.lineage.decide import retry_budget_spent
from kinlog.lineage.state import GroupPhase
from kinlog.schemas import events as e
from kinlog.schemas.errors import RolloutsFailError
from kinlog.schemas.reasons import Granularity, Reason, Validity

INFRASTRUCTURE = [Reason.INFRASTRUCTURE_FAILURE, Reason.WORKER_LOST, Reason.TIMEOUT]
UNCHARGED = [r for r in Reason if r not in INFRASTRUCTURE and r is not Reason.DATA_FAILURE]
ATTEMPTS = range(1, 9)


@pytest.mark.parametrize("reason", INFRASTRUCTURE)
def test_infrastructure_failure_is_charged_to_the_infrastructure_budget(reason: Reason):
    Given(generating()).when(given_up(0, 1, reason)).then(
        state={0: {"infrastructure_failures": (0, 1), "data_failures": (0, 0)}}
    )


def test_data_failure_is_charged_to_the_data_budget():
    Given(generating()).when(given_up(0, 1, Reason.DATA_FAILURE)).then(
        state={0: {"infrastructure_failures": (0, 0), "data_failures": (0, 1)}}
    )


@pytest.mark.parametrize("reason", UNCHARGED)
def test_what_is_no_failure_of_the_sibling_s_is_charged_to_nobody(reason: Reason):
    Given(generating()).when(given_up(0, 1, reason)).then(
        state={0: {"infrastructure_failures": (0, 0), "data_failures": (0, 0)}}
    )


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        (worker_dies(0, 1, 1), Reason.WORKER_LOST),
        (worker_cannot_stage(0, 1, 1), Reason.INFRASTRUCTURE_FAILURE),
        (worker_hangs(0, 1, 1), Reason.TIMEOUT),
        (worker_fails(0, 1, 1), Reason.DATA_FAILURE),
    ],
)
def test_attempt_that_fails_is_superseded_with_its_reason_and_made_again(ends: Act, reason: Reason):
    Given(reserved(), ends).when(driven(0)).then(
        events=[Like(e.AttemptSuperseded, generation=1, attempt=1, reason=reason)],
        only=(e.AttemptSuperseded,),
        state={0: {"phase": GroupPhase.FINALIZED, "attempts": (1, 2)}},
    )


@pytest.mark.parametrize(
    ("budget", "reason", "tried"),
    [
        (e.RetryBudget(0, 5), Reason.WORKER_LOST, 1),
        (e.RetryBudget(2, 0), Reason.WORKER_LOST, 3),
        (e.RetryBudget(5, 0), Reason.DATA_FAILURE, 1),
        (e.RetryBudget(0, 2), Reason.DATA_FAILURE, 3),
    ],
)
def test_budget_that_was_stored_at_the_reservation_counts_and_not_the_configured_one(
    budget: e.RetryBudget, reason: Reason, tried: int
):
    given = Given(
        reserved(budget=budget),
        *(worker_fails(0, 1, attempt, reason) for attempt in ATTEMPTS),
        rollout__max_infrastructure_retries=4,
        rollout__max_data_retries=4,
    )
    given.when(driven(0)).then(
        events=[Like(e.AttemptSuperseded, generation=1, reason=reason)] * tried,
        only=(e.AttemptSuperseded,),
        state={0: {"phase": GroupPhase.PARKED, "parked_reason": Reason.RETRY_BUDGET}},
    )


def test_pauses_double_up_to_a_bound():
    done = Given(
        reserved(siblings=1, budget=e.RetryBudget(9, 9)),
        *(worker_dies(0, 0, attempt) for attempt in range(1, 6)),
        supervision__retry_backoff_s=1.0,
        supervision__max_retry_backoff_s=5.0,
    ).when(driven(0))
    assert done.then().bench.slept_s == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_pause_goes_on_from_where_the_last_life_stood():
    done = Given(
        reserved(siblings=1, budget=e.RetryBudget(9, 9)),
        worker_dies(0, 0, 1),
        worker_dies(0, 0, 2),
        worker_hangs(0, 0, 3),
        supervision__retry_backoff_s=1.0,
    ).when(
        living(until=lambda p: p.groups[0].siblings[0].attempt == 3),
        restarted(),
        worker_answers_now,
        driven(0),
    )
    assert done.then(state={0: {"attempts": (4,)}}).bench.slept_s == [2.0]


def worker_answers_now(bench) -> None:
    bench.pool.gates.clear()


@pytest.mark.parametrize("granularity", [SIBLING, COHORT])
@pytest.mark.parametrize("reason", [Reason.WORKER_LOST, Reason.DATA_FAILURE])
def test_sibling_that_fails_in_every_life_is_parked(granularity: Granularity, reason: Reason):
    now = Given(reserved(granularity=granularity, budget=e.RetryBudget(2, 2))).when(
        lambda bench: bench.story.admit(0)
    )
    for life in range(1, 3):
        now = now.when(dispatched(0), given_up(0, 1, reason), restarted()).then(
            state={0: {"phase": GroupPhase.GENERATING}}
        )
        failed = now.p.groups[0].siblings[1]
        assert failed.infrastructure_failures + failed.data_failures == life
    assert retry_budget_spent(now.p.groups[0], now.p.groups[0].siblings[1], reason)
    now.when(worker_fails(0, 1, 3, reason), driven(0)).then(state={0: GroupPhase.PARKED})


def test_restarts_spend_no_budget():
    now = Given(generating(siblings=1)).when()
    for life in range(2, 7):
        now = now.when(restarted(), dispatched(0)).then(
            state={0: {"attempts": (life,), "infrastructure_failures": (0,), "data_failures": (0,)}}
        )


SPENT = (
    reserved(siblings=3, budget=e.RetryBudget(0, 0)),
    worker_fails(0, 1, 1),
)


@pytest.mark.parametrize(
    ("policy", "granularity", "phase", "events"),
    [
        ("park", SIBLING, GroupPhase.PARKED, [Like(e.GroupParked, reason=Reason.RETRY_BUDGET)]),
        ("drop", SIBLING, None, [Like(e.GroupDropped, reason=Reason.RETRY_BUDGET)]),
        ("train_partial", SIBLING, GroupPhase.FINALIZED, []),
        ("park", COHORT, GroupPhase.PARKED, [Like(e.GroupParked, reason=Reason.RETRY_BUDGET)]),
        ("drop", COHORT, None, [Like(e.GroupDropped, reason=Reason.RETRY_BUDGET)]),
        ("train_partial", COHORT, GroupPhase.PARKED, [Like(e.GroupParked, reason=Reason.RETRY_BUDGET)]),
    ],
)
def test_group_whose_budget_is_spent_goes_as_the_policy_says(
    policy: str, granularity: Granularity, phase: GroupPhase | None, events: list[Like]
):
    Given(
        reserved(siblings=3, granularity=granularity, budget=e.RetryBudget(0, 0)),
        worker_fails(0, 1, 1),
        rollout__spent_retry_budget=policy,
    ).when(driven(0)).then(events=events, only=(e.GroupParked, e.GroupDropped), state={0: phase})


def test_partial_group_is_trained_with_a_masked_placeholder():
    Given(*SPENT, rollout__spent_retry_budget="train_partial").when(driven(0)).then(
        state={0: {"validity": (Validity.VALID, Validity.PLACEHOLDER, Validity.VALID), "attempts": (1, 2, 1)}}
    )


@pytest.mark.parametrize("policy", ["park", "drop", "train_partial"])
def test_other_groups_go_on_and_the_run_trains_to_its_end(policy: str):
    Given(*SPENT, rollout__spent_retry_budget=policy).when(living()).then(state={"train_step": 4})


def test_one_group_s_failure_ends_the_run_only_when_configured():
    done = Given(*SPENT, rollout__spent_retry_budget="fail_run").when(living())
    done.then(
        raises=(RolloutsFailError, "group 0 is parked"),
        events=[Like(e.GroupParked, group_id=0, reason=Reason.RETRY_BUDGET)],
        only=(e.GroupParked,),
        state={0: GroupPhase.PARKED},
    )


def test_group_that_was_parked_stays_parked_in_the_next_life():
    Given(*SPENT).when(driven(0), restarted(), living()).then(
        events=[], only=(e.CohortSealed,), state={0: GroupPhase.PARKED, "train_step": 4}
    )
