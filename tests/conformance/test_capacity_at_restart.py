"""A buffer that is smaller than before: live groups are kept, evicted or refused, by policy, before anything else."""

import pytest
from kinlog_conformance import (
    Act,
    Given,
    Like,
    checkpointed,
    dropped,
    finalized,
    generating,
    living,
    ready,
    reserved,
    restarted,
    trained,
)

from kinlog.lineage.state import GroupPhase
from kinlog.schemas import events as e
from kinlog.schemas.errors import ConfigError
from kinlog.schemas.reasons import Partition, Reason
from kinlog.schemas.receipts import staging_key

PERMITS = "rollout__max_live_groups"
POLICY = "rollout_recovery__over_capacity"
FAR = {"sampler__max_staleness_versions": 9, "sampler__max_lookahead_versions": 9}

FIVE: tuple[Act, ...] = (
    finalized(siblings=3),
    generating(siblings=3),
    ready(siblings=3),
    reserved(siblings=3),
    reserved(siblings=3),
)


def test_groups_are_kept_unless_another_policy_is_chosen():
    done = Given(*FIVE, **FAR).when(restarted(tail_rows=True, **{PERMITS: 2}))
    done.then(events=[], only=(e.GroupDropped,), state={"alive_total": 5})
    done.when(living()).then(state={"train_step": 4})


def test_groups_that_were_drawn_last_are_evicted_when_that_is_the_policy():
    done = Given(*FIVE, **FAR).when(restarted(tail_rows=True, **{PERMITS: 3, POLICY: "evict"}))
    done.then(
        events=[Like(e.GroupDropped, group_id=group_id, reason=Reason.EVICTED) for group_id in (3, 4)],
        only=(e.GroupDropped,),
        state={"alive_total": 3, 0: GroupPhase.FINALIZED, 2: GroupPhase.READY},
    )
    assert done.of(e.RecoveryPlanned)[0].groups_dropped == 2
    done.when(living()).then(state={"train_step": 4})
    assert max(p.alive_total for p in done.prefixes) == 5


def test_groups_for_the_furthest_steps_are_evicted_first_so_that_the_next_ones_stay_whole():
    Given(
        *[reserved(siblings=3, train_step=step) for step in (1, 1, 2, 2, 3)],
        dropped(0),
        reserved(siblings=3, train_step=1),
        sampler__name="in_order",
        **FAR,
    ).when(restarted(**{PERMITS: 2, POLICY: "evict"})).then(
        events=[Like(e.GroupDropped, group_id=group_id) for group_id in (2, 3, 4)],
        only=(e.GroupDropped,),
        state={1: {"train_step": 1}, 5: {"train_step": 1}},
    )


def test_rows_of_evicted_groups_are_cleared_and_none_of_them_is_missed():
    done = Given(ready(), ready(), ready(), checkpointed(), **FAR).when(
        restarted(lose=[staging_key(2, 1, 1, 0)], **{PERMITS: 2, POLICY: "evict"})
    )
    done.then(state={0: GroupPhase.READY, 1: GroupPhase.READY, 2: None})
    assert {tag.group_id for tag in done.bench.data_plane.rows[Partition.STAGING].values()} == {0, 1}
    assert {cleared.group_ids for cleared in done.of(e.RowsCleared)} == {(2,)}


def test_restart_is_refused_with_the_numbers_when_that_is_the_policy():
    Given(*FIVE, **FAR).when(restarted(tail_rows=True, **{PERMITS: 4, POLICY: "refuse"})).then(
        raises=(ConfigError, "max_live_groups is 4, and 5 groups are alive. Nothing was changed")
    )


@pytest.mark.parametrize("policy", ["keep", "evict", "refuse"])
def test_buffer_that_is_exactly_full_is_nobody_s_problem(policy: str):
    Given(*FIVE, **FAR).when(restarted(tail_rows=True, **{PERMITS: 5, POLICY: policy})).then(
        events=[], only=(e.GroupDropped,), state={"alive_total": 5}
    ).when(living()).then(state={"train_step": 4})


@pytest.mark.parametrize("policy", ["evict", "refuse"])
def test_groups_that_are_trained_on_again_count_for_no_policy_in_any_later_life(policy: str):
    """They had given their permits away before the kill: no fewer permits are there than before."""
    now = Given(
        *[finalized(siblings=3)] * 4,
        trained(0, 1),
        trained(2, 3),
        *[reserved(siblings=3)] * 3,
        **{PERMITS: 3, POLICY: policy},
        **FAR,
    ).when(restarted(from_start=True, tail_rows=True))
    for _ in range(2):
        now = now.then(events=[], only=(e.GroupDropped,), state={"alive_total": 7}).when(
            restarted(tail_rows=True)
        )
    now.when(living()).then(state={"train_step": 4})


def test_stale_groups_leave_first_and_only_what_is_still_too_much_is_evicted():
    Given(
        finalized(siblings=3),
        finalized(siblings=3),
        trained(0),
        checkpointed(),
        *[finalized(siblings=3, weight_version=1)] * 3,
        sampler__max_staleness_versions=0,
    ).when(restarted(tail_rows=True, **{PERMITS: 2, POLICY: "evict"})).then(
        events=[
            Like(e.GroupDropped, group_id=1, reason=Reason.STALE),
            Like(e.GroupDropped, group_id=4, reason=Reason.EVICTED),
        ],
        only=(e.GroupDropped,),
        state={2: GroupPhase.FINALIZED, 3: GroupPhase.FINALIZED},
    )
