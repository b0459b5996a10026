"""prompt_group: all results of one attempt, or none, whatever fails, restarts or comes late in whatever order."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinlog_conformance import (
    COHORT,
    Given,
    Like,
    admitted,
    cohort_results,
    dispatched,
    driven,
    generating,
    given_up,
    ready,
    reserved,
    restarted,
    result,
    worker_answers_late,
    worker_dies,
)

from kinlog.lineage.state import GroupPhase
from kinlog.schemas import events as e
from kinlog.schemas.errors import TransitionError
from kinlog.schemas.reasons import Reason
from kinlog.schemas.receipts import staging_key


def a_cohort(siblings: int = 3) -> Given:
    return Given(generating(siblings=siblings, granularity=COHORT))


def test_cohort_seals_all_siblings_in_one_event_of_which_the_seals_follow():
    a_cohort().when(cohort_results(0, {0: 1, 1: 1, 2: 1})).then(
        events=[
            e.CohortSealed(group_id=0, attempt=1),
            *(Like(e.SiblingSealed, group_id=0, generation=g, attempt=1) for g in range(3)),
        ],
        state={0: {"phase": GroupPhase.READY, "sealed": {0, 1, 2}}},
    )


@pytest.mark.parametrize("generation", range(3))
def test_seal_of_a_single_sibling_is_refused(generation: int):
    a_cohort().when(result(0, generation, 1)).then(raises=(TransitionError, "seals with its cohort only"))


@pytest.mark.parametrize("missing", range(3))
def test_cohort_with_a_result_missing_is_refused(missing: int):
    results = {g: 1 for g in range(3) if g != missing}
    a_cohort().when(cohort_results(0, results)).then(
        raises=(TransitionError, rf"generations \[{missing}\] have no result")
    )


@pytest.mark.parametrize("failing", range(3))
def test_any_failure_gives_up_the_whole_attempt_and_the_next_one_is_common(failing: int):
    others = [g for g in range(3) if g != failing]
    a_cohort().when(given_up(0, failing, Reason.WORKER_LOST)).then(
        events=[
            Like(e.AttemptSuperseded, generation=failing, reason=Reason.WORKER_LOST),
            *(Like(e.AttemptSuperseded, generation=g, reason=Reason.COHORT_RESTART) for g in others),
        ],
        state={0: {"waiting": {0, 1, 2}}},
    ).when(dispatched(0)).then(state={0: {"attempts": (2, 2, 2), "running": {0, 1, 2}}})


def test_part_of_a_cohort_is_never_sent_alone():
    Given(reserved(siblings=3, granularity=COHORT), admitted(0)).when(dispatched(0, 0, 1)).then(
        raises=(TransitionError, "all its siblings are sent, or none")
    )


@pytest.mark.parametrize("redispatched", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_late_results_of_a_failed_attempt_are_rejected_in_every_order(
    order: tuple[int, ...], redispatched: bool
):
    given = a_cohort().when(given_up(0, 1, Reason.TIMEOUT), *[dispatched(0)] * redispatched)
    given.when(*(result(0, g, 1) for g in order)).then(
        events=[Like(e.LateResultRejected, generation=g, attempt=1) for g in order],
        state={0: {"sealed": set()}, "late_rejected": 3},
    )


def test_results_of_two_attempts_never_seal_together():
    given = a_cohort().when(given_up(0, 1, Reason.TIMEOUT), dispatched(0))
    given.when(cohort_results(0, {0: 1, 1: 2, 2: 2})).then(
        raises=(TransitionError, "0/0: attempt 1 is not running")
    )


def test_restart_in_the_middle_redoes_all_siblings():
    a_cohort().when(restarted()).then(
        events=[
            Like(e.AttemptSuperseded, generation=0, reason=Reason.CONTROLLER_RESTART),
            Like(e.AttemptSuperseded, generation=1, reason=Reason.COHORT_RESTART),
            Like(e.AttemptSuperseded, generation=2, reason=Reason.COHORT_RESTART),
        ],
        only=(e.AttemptSuperseded,),
        state={0: {"waiting": {0, 1, 2}}},
    )


def test_result_that_a_restart_overtook_is_late():
    given = a_cohort().when(restarted(), dispatched(0))
    given.when(result(0, 0, 1), cohort_results(0, {0: 2, 1: 2, 2: 2})).then(
        events=[
            Like(e.LateResultRejected, generation=0, attempt=1),
            Like(e.CohortSealed, attempt=2),
            *(Like(e.SiblingSealed, generation=g, attempt=2) for g in range(3)),
        ]
    )


def test_restart_after_the_seal_keeps_the_whole_cohort():
    Given(ready(siblings=3, granularity=COHORT)).when(restarted(tail_rows=True)).then(
        events=[], only=(e.AttemptSuperseded,), state={0: GroupPhase.READY}
    )


@pytest.mark.parametrize("lost", range(3))
def test_lost_row_of_one_sealed_sibling_redoes_all(lost: int):
    given = Given(ready(siblings=3, granularity=COHORT))
    given.when(restarted(tail_rows=True, lose=[staging_key(0, lost, 1, 0)])).then(
        events=[
            Like(e.AttemptSuperseded, generation=lost, reason=Reason.ROWS_MISSING),
            *(
                Like(e.AttemptSuperseded, generation=g, reason=Reason.COHORT_RESTART)
                for g in range(3)
                if g != lost
            ),
        ],
        only=(e.AttemptSuperseded,),
        state={0: {"waiting": {0, 1, 2}}},
    )


def test_failure_is_seen_at_once_and_the_slow_sibling_s_late_result_rejected():
    Given(
        reserved(siblings=3, granularity=COHORT),
        worker_dies(0, 1, 1),
        worker_answers_late(0, 2, 1, after_s=50),
    ).when(driven(0, wait_s=100)).then(
        events=[
            Like(e.LateResultRejected, generation=0, attempt=1),
            Like(e.CohortSealed, attempt=2),
            Like(e.LateResultRejected, generation=2, attempt=1),
        ],
        only=(e.LateResultRejected, e.CohortSealed),
        state={0: {"phase": GroupPhase.FINALIZED, "attempts": (2, 2, 2)}},
    )


HAPPENINGS = st.lists(
    st.tuples(st.sampled_from(["failure", "late", "restart", "dispatch", "seal"]), st.integers(0, 2)),
    max_size=10,
)


@settings(max_examples=40)
@given(happenings=HAPPENINGS)
def test_failures_restarts_and_late_results_in_any_order_leave_one_attempt_or_nothing(
    happenings: list[tuple[str, int]],
):
    now = a_cohort().when()
    for happening, generation in happenings:
        group = now.p.groups[0]
        sibling = group.siblings[generation]
        attempt = sibling.attempt
        if happening == "failure" and not sibling.waiting:
            now = now.when(given_up(0, generation, Reason.TIMEOUT))
        elif happening == "late" and attempt > 1:
            now = now.when(result(0, generation, attempt - 1)).then(state={0: group.phase})
        elif happening == "restart":
            now = now.when(restarted(tail_rows=bool(generation)))
        elif happening == "dispatch" and sibling.waiting:
            now = now.when(dispatched(0))
        elif happening == "seal" and sibling.running:
            now = now.when(lambda bench: bench.story.seal(0))
        group = now.then().p.groups[0]
        states = {(s.attempt, s.running, s.sealed is not None) for s in group.siblings.values()}
        assert len(states) == 1, "the siblings of a cohort do not stand together"
