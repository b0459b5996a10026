"""Poison pills: a rollout that is under way at every death of the controller is found out, when a limit is set."""

import pytest
from kinlog_conformance import (
    COHORT,
    SIBLING,
    Given,
    Like,
    dispatched,
    driven,
    living,
    reserved,
    restarted,
    result,
    sealed,
)

from kinlog.lineage.state import GroupPhase
from kinlog.schemas import events as e
from kinlog.schemas.errors import RolloutsFailError
from kinlog.schemas.reasons import Granularity, Reason, Validity

LIMIT = e.RetryBudget(5, 2, 1)


def admitted(bench) -> None:
    bench.story.admit(0)


def under_way_at_a_death(policy: str = "park", *, granularity: Granularity = SIBLING, siblings: int = 2):
    """Sibling 0 was under way at one death, which is all that it may, and is so again; the others are sealed."""
    others = [sealed(0, *range(1, siblings))] if granularity is SIBLING else []
    given = Given(
        reserved(siblings=siblings, granularity=granularity, budget=LIMIT),
        admitted,
        dispatched(0),
        *others,
        rollout__spent_retry_budget=policy,
    )
    now = given.when(restarted(tail_rows=True)).then(state={0: GroupPhase.GENERATING})
    assert now.p.groups[0].siblings[0].restarts == 1
    return now.when(dispatched(0))


def test_deaths_are_counted_by_sibling_and_charged_to_nobody_without_a_limit():
    now = Given(reserved(budget=e.RetryBudget(0, 0)), admitted).when()
    for life in range(1, 8):
        now = now.when(dispatched(0), restarted()).then(state={0: {"attempts": (life, life)}})
        assert [s.restarts for s in now.p.groups[0].siblings.values()] == [life, life]


@pytest.mark.parametrize("granularity", [SIBLING, COHORT])
def test_group_is_parked_at_the_restart_that_finds_the_limit_passed(granularity: Granularity):
    done = under_way_at_a_death(granularity=granularity).when(restarted(tail_rows=True))
    done.then(
        events=[Like(e.GroupParked, group_id=0, reason=Reason.RETRY_BUDGET)],
        only=(e.GroupParked, e.GroupDropped),
        state={0: {"phase": GroupPhase.PARKED, "parked_reason": Reason.RETRY_BUDGET}},
    )
    assert "under way as the controller died 2 times" in done.of(e.GroupParked)[0].detail
    assert not done.bench.data_plane.rows["staging"]
    done.when(living()).then(state={"train_step": 4, 0: GroupPhase.PARKED})


@pytest.mark.parametrize("granularity", [SIBLING, COHORT])
def test_group_is_dropped_when_that_is_the_policy(granularity: Granularity):
    under_way_at_a_death("drop", granularity=granularity).when(restarted(tail_rows=True)).then(
        events=[Like(e.GroupDropped, group_id=0, reason=Reason.RETRY_BUDGET)],
        only=(e.GroupParked, e.GroupDropped),
        state={0: None},
    )


def test_placeholder_stands_in_for_the_sibling_when_that_is_the_policy():
    done = under_way_at_a_death("train_partial", siblings=3).when(restarted(tail_rows=True))
    done.then(
        state={0: {"phase": GroupPhase.READY, "attempts": (3, 1, 1)}},
        events=[],
        only=(e.GroupParked, e.GroupDropped),
    )
    done.when(driven(0)).then(state={0: {"validity": (Validity.PLACEHOLDER, Validity.VALID, Validity.VALID)}})


def test_cohort_which_is_whole_or_nothing_is_parked_instead():
    under_way_at_a_death("train_partial", granularity=COHORT).when(restarted()).then(
        state={0: GroupPhase.PARKED}
    )


def test_run_is_stopped_once_when_that_is_the_policy_and_goes_on_at_the_next_restart():
    stopped = under_way_at_a_death("fail_run").when(restarted(tail_rows=True))
    stopped.then(
        raises=(RolloutsFailError, "group 0 is parked: the retry budget of generation 0: controller_restart"),
        # What the life that was stopped has recorded is in its log, of which this bench has the events.
        events=[],
    )


def test_sibling_that_has_ended_by_the_death_is_not_counted():
    given = Given(reserved(budget=LIMIT), admitted, dispatched(0), sealed(0, 1))
    now = given.when(restarted(tail_rows=True))
    now.then(state={0: {"sealed": {1}}})
    assert [s.restarts for s in now.p.groups[0].siblings.values()] == [1, 0]


def test_result_of_an_attempt_that_outlived_its_controller_is_late_and_is_not_charged():
    now = Given(reserved(budget=LIMIT), admitted).when(dispatched(0), restarted(), result(0, 1, 1))
    now.then(events=[Like(e.LateResultRejected, generation=1)], only=(e.LateResultRejected,))
    assert now.p.groups[0].siblings[1].restarts == 1


def test_limit_that_was_stored_at_the_reservation_counts_and_not_the_configured_one():
    done = Given(rollout__max_controller_restarts=3).when(living(until=lambda p: p.drawn_total >= 1))
    assert done.then().of(e.GroupReserved)[0].retry_budget == e.RetryBudget(5, 2, 3)
