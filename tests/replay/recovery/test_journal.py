"""The row journal gives back what live groups lack, and is kept for as long as nothing else can."""

import pytest
from kinlog_builders import Story

from kinlog.replay.recovery.inventory import Inventory, canonical_rows, expected_inventory, staged_rows
from kinlog.replay.recovery.journal import needed_attempts, rows_to_put_back
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Reason

NOTHING = Inventory({}, {})


@pytest.fixture
def told() -> Story:
    return Story()


def keys_of(told: Story, group_id: int, *generations: int) -> set[str]:
    group = told.p.groups[group_id]
    return {key for g in generations for key in staged_rows(group, group.siblings[g])}


def test_sealed_siblings_whose_rows_are_gone_are_put_back_and_no_others(told):
    group = told.generating()
    told.seal(group, 0)
    assert set(rows_to_put_back(told.p, NOTHING)) == keys_of(told, group, 0)
    assert rows_to_put_back(told.p, expected_inventory(told.p)) == {}


def test_finalized_group_whose_canonical_rows_are_there_needs_no_staged_ones(told):
    group = told.finalized()
    whole = Inventory({}, canonical_rows(told.p.groups[group]))
    assert rows_to_put_back(told.p, whole) == {}
    assert set(rows_to_put_back(told.p, NOTHING)) == keys_of(told, group, 0, 1)


def test_rows_are_needed_until_a_checkpoint_that_can_be_gone_back_to_has_them(told):
    group = told.generating()
    told.seal(group, 0)
    before = told.p.groups[group].siblings[0].sealed_seq - 1
    assert needed_attempts(told.p, before) == {(group, 0, 1), (group, 1, 1)}
    assert needed_attempts(told.p, told.p.last_seq) == {(group, 1, 1)}  # it still runs


def test_rows_of_groups_that_left_are_needed_by_nobody(told):
    dropped, parked = told.ready(), told.ready()
    told.commit(e.GroupDropped(group_id=dropped, reason=Reason.STALE))
    told.commit(e.GroupParked(group_id=parked, reason=Reason.RETRY_BUDGET))
    assert needed_attempts(told.p, 0) == frozenset()


def test_rows_of_applied_groups_are_needed_until_their_step_is_durable(told):
    group = told.finalized()
    told.commit(e.GroupClaimed(group_id=group, train_step=1))
    told.commit(e.StepApplied(train_step=1, group_ids=(group,)))
    assert needed_attempts(told.p, 0) == {(group, 0, 1), (group, 1, 1)}
