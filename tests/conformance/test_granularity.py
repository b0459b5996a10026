"""Granularity: resolved once, at reservation, and stored with the group."""

import pytest
from kinlog_conformance import COHORT, SIBLING, Given, Like, dispatched, generating, living, restarted, sealed

from kinlog.schemas import events as e
from kinlog.schemas.reasons import Granularity, Reason

AGENTS = "rollout_recovery__agent_granularity_overrides"
TASKS = "rollout_recovery__task_granularity_overrides"
DEFAULT = "rollout_recovery__default_granularity"


@pytest.mark.parametrize(
    ("overrides", "of_even_by_one", "of_odd_by_two"),
    [
        ({}, SIBLING, SIBLING),
        ({DEFAULT: COHORT}, COHORT, COHORT),
        ({TASKS: {"odd": COHORT}}, SIBLING, COHORT),
        ({DEFAULT: COHORT, TASKS: {"odd": SIBLING}}, COHORT, SIBLING),
        ({AGENTS: {"one": COHORT}}, COHORT, SIBLING),
        ({AGENTS: {"one": SIBLING}, TASKS: {"even": COHORT, "odd": COHORT}}, SIBLING, COHORT),
    ],
)
def test_agent_wins_over_task_and_task_over_default_in_what_a_reservation_stores(
    overrides: dict[str, object], of_even_by_one: Granularity, of_odd_by_two: Granularity
):
    done = Given(**overrides).when(living(until=lambda p: p.drawn_total >= 6)).then()
    found = {(r.prompt.task_name, r.prompt.agent_name): r.granularity for r in done.of(e.GroupReserved)}
    assert found == {("even", "one"): of_even_by_one, ("odd", "two"): of_odd_by_two}


@pytest.mark.parametrize(
    ("stored", "configured", "redone"),
    [
        (SIBLING, COHORT, [Like(e.AttemptSuperseded, generation=1, reason=Reason.CONTROLLER_RESTART)]),
        (
            COHORT,
            SIBLING,
            [
                Like(e.AttemptSuperseded, generation=0, reason=Reason.CONTROLLER_RESTART),
                Like(e.AttemptSuperseded, generation=1, reason=Reason.COHORT_RESTART),
            ],
        ),
    ],
)
def test_changed_default_changes_nothing_for_live_groups(
    stored: Granularity, configured: Granularity, redone: list[Like]
):
    given = Given(generating(granularity=stored), *[sealed(0, 0)] * (stored is SIBLING))
    given.when(restarted(tail_rows=True, rollout_recovery__default_granularity=configured)).then(
        events=redone, only=(e.AttemptSuperseded,), state={0: {"granularity": stored}}
    )


def test_changed_default_holds_for_groups_that_are_reserved_after_it():
    done = (
        Given(generating(siblings=3))
        .when(restarted(rollout_recovery__default_granularity=COHORT))
        .when(living(until=lambda p: p.drawn_total >= 3))
        .then(state={0: {"granularity": SIBLING}})
    )
    assert {r.granularity for r in done.of(e.GroupReserved)} == {COHORT}


def test_failure_is_answered_as_stored_and_not_as_configured():
    given = Given(generating(granularity=SIBLING), rollout_recovery__default_granularity=COHORT)
    given.when(lambda bench: bench.story.supersede(0, 1, Reason.WORKER_LOST), dispatched(0)).then(
        state={0: {"attempts": (1, 2), "running": {0, 1}}}
    )
