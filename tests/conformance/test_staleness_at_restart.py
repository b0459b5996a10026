"""Staleness at a restart: judged by the tokens that are kept, after it is decided which are. Without one, none is stale."""

import pytest
from kinlog_conformance import (
    Given,
    admitted,
    checkpointed,
    dispatched,
    finalized,
    generating,
    living,
    placeholder,
    published,
    reserved,
    restarted,
    sealed,
    trained,
)

from kinlog.lineage.state import GroupPhase
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Reason

#: Three steps of one group each, and a bound that a group of version 0 does not keep to after them.
TRAINED = (finalized(), finalized(), finalized(), trained(1), trained(2), trained(3), checkpointed())
BOUND = {"sampler__max_staleness_versions": 2, "trainer__groups_per_step": 1, "trainer__max_steps": 6}
BOUNDED = ["weight_fifo", "windowed", "ready_first"]


@pytest.mark.parametrize("sampler", BOUNDED)
@pytest.mark.parametrize("before", [(), (admitted(0),), (admitted(0), dispatched(0))])
def test_prompt_that_no_token_was_generated_for_is_kept(before, sampler):
    given = Given(reserved(), *TRAINED, *before, sampler__name=sampler, **BOUND)
    given.when(restarted()).then(state={0: {"waiting": {0, 1}}}, events=[], only=(e.GroupDropped,))


@pytest.mark.parametrize("lost", [True, False])
def test_group_whose_only_old_tokens_are_gone_is_generated_again(lost: bool):
    given = Given(generating(), *TRAINED, sealed(0, 1, weight_version=0), **BOUND)
    given.when(restarted(tail_rows=not lost)).then(
        state={0: {"waiting": {0, 1}} if lost else None},
        events=[] if lost else [e.GroupDropped(group_id=0, reason=Reason.STALE, detail="at restart")],
        only=(e.GroupDropped,),
    )


def test_finalized_group_that_is_generated_again_is_not_stale():
    given = Given(finalized(), *TRAINED, **BOUND)
    lost = given.when(
        restarted(lose=("g0.s0.a1", "g0.s1.a1"), rollout_recovery__missing_rows="redispatch", **BOUND)
    )
    lost.then(state={0: {"waiting": {0, 1}}})
    lost.when(living()).then(state={"train_step": 6})


def test_group_that_keeps_an_old_token_is_dropped_whatever_else_of_it_is_redone():
    given = Given(generating(), sealed(0, 0), *TRAINED, **BOUND)
    given.when(restarted()).then(state={0: None})


@pytest.mark.parametrize("discard", [True, False])
def test_group_of_a_step_that_is_past_is_late_whatever_is_kept_of_it(discard: bool):
    given = Given(
        reserved(train_step=1),
        finalized(train_step=1),
        trained(1),
        checkpointed(),
        sampler__name="in_order",
        trainer__groups_per_step=1,
    )
    given.when(restarted(discard_rollouts=discard)).then(state={0: None})


@pytest.mark.parametrize("discard", [True, False])
def test_group_that_in_order_drew_is_judged_by_its_tokens_by_another_sampler(discard: bool):
    given = Given(reserved(train_step=1), *TRAINED, sampler__name="windowed", **BOUND)
    given.when(restarted(discard_rollouts=discard)).then(state={0: GroupPhase.RESERVED})


def test_placeholder_makes_no_group_stale():
    given = Given(
        generating(siblings=2),
        placeholder(0, 1),
        published(5),
        sealed(0, 0, weight_version=5, max_weight_version=5),
        sampler__max_staleness_versions=2,
        trainer__groups_per_step=1,
        trainer__max_steps=1,
    )
    done = given.when(living(until=lambda p: p.train_step == 1 or 0 not in p.groups))
    done.then(state={0: GroupPhase.APPLIED, "dropped": {}})
