"""A plan that a kill cut short: what is decided about one group is one unit, and a torn cohort is redone whole."""

import pytest
from kinlog_conformance import (
    COHORT,
    Given,
    checkpointed,
    driven,
    finalized,
    ready,
    restarted,
    trained,
)

from kinlog.controller.recovery import frames_of
from kinlog.lineage import decide
from kinlog.lineage.state import GroupPhase
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Partition, Reason


def half_superseded(generations: int):
    """What a kill in the middle of a cohort's supersedes leaves in the log."""
    return lambda bench: decide.supersede_attempt(bench.p, 0, 1, Reason.ROWS_MISSING)[:generations]


@pytest.mark.parametrize("generations", [1, 2])
def test_cohort_that_has_lost_a_sibling_is_redone_whole(generations: int):
    given = Given(ready(siblings=3, granularity=COHORT), checkpointed())
    recovered = given.when(half_superseded(generations), restarted())
    recovered.then(state={0: {"waiting": {0, 1, 2}, "sealed": set()}})
    recovered.when(driven(0)).then(state={0: {"phase": GroupPhase.FINALIZED, "attempts": (2, 2, 2)}})


def test_rows_of_a_torn_cohort_are_not_missed():
    given = Given(ready(siblings=3, granularity=COHORT), checkpointed())
    given.when(half_superseded(1), restarted(lose=("g0.s0.a1.c0",))).then(state={0: {"waiting": {0, 1, 2}}})


def dropped(group_id: int) -> e.GroupDropped:
    return e.GroupDropped(group_id=group_id, reason=Reason.STALE)


def test_frame_ends_between_two_groups():
    events = [dropped(group_id) for group_id in (1, 1, 2, 2, 2, 3)]
    frames = list(frames_of(events, at_most=4))
    assert [[event.group_id for event in frame] for frame in frames] == [[1, 1], [2, 2, 2, 3]]
    assert [event for frame in frames for event in frame] == events


def test_events_of_no_group_are_units_of_their_own():
    cleared = e.RowsCleared(partition=Partition.STAGING, reason=Reason.UNREFERENCED, num_rows=1, group_ids=())
    assert [len(frame) for frame in frames_of([cleared] * 5, at_most=2)] == [2, 2, 1]


def test_plan_tells_everything_about_one_group_together():
    lose = tuple(f"g{group}.s{generation}.a1" for group in (0, 1) for generation in (0, 1))
    given = Given(finalized(), finalized(), finalized(), trained(2), checkpointed())
    done = given.when(restarted(lose=lose, rollout_recovery__missing_rows="redispatch"))
    told = [event.group_id for event in done.of(e.FinalizeFailed, e.AttemptSuperseded)]
    assert told == [0, 0, 0, 1, 1, 1]
