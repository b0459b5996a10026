"""Samplers: each goes on after any history, starves no step, and judges staleness by a group's oldest tokens."""

import pytest
from kinlog_conformance import (
    Act,
    Given,
    Like,
    checkpointed,
    claimed,
    dropped,
    finalized,
    generating,
    living,
    parked,
    published,
    ready,
    reserved,
    restarted,
    sealed,
    trained,
)
from kinlog_fake_parts import FakeDataset

from kinlog.lineage.state import GroupPhase
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Reason

SAMPLERS: dict[str, dict[str, object]] = {
    "in_order": {"sampler__name": "in_order"},
    "in_order_shrinking": {"sampler__name": "in_order", "sampler__shortfall": "shrink"},
    "windowed": {"sampler__name": "windowed"},
    "windowed_freshest_first": {"sampler__name": "windowed", "sampler__freshest_first": True},
    "weight_fifo": {"sampler__name": "weight_fifo"},
    "ready_first": {"sampler__name": "ready_first"},
    "ones_own": {"sampler__name": "kinlog_conformance:AnyReady"},
}

#: Each history, its groups drawn for the steps that a sampler in order would have drawn them for.
HISTORIES: dict[str, tuple[Act, ...]] = {
    "nothing": (),
    "prompts_left": (
        reserved(siblings=3, train_step=1),
        generating(siblings=3, train_step=1),
        finalized(siblings=3, train_step=2),
        generating(siblings=3, train_step=2),
        dropped(0),
        parked(1),
        dropped(2, Reason.EVICTED),
    ),
    "partly_finished_batch": (
        finalized(siblings=3, train_step=1),
        generating(siblings=3, train_step=1),
        sealed(1, 0),
    ),
    "version_0_with_a_claim": (
        finalized(siblings=3, train_step=1),
        finalized(siblings=3, train_step=1),
        checkpointed(),
        claimed(0, 1),
    ),
    "version_2_with_siblings_running": (
        finalized(siblings=3, train_step=1),
        finalized(siblings=3, train_step=2),
        trained(0),
        trained(1),
        checkpointed(),
        generating(siblings=3, train_step=3),
        sealed(2, 1),
    ),
    "trained_past_the_checkpoint": (
        finalized(siblings=3, train_step=1),
        finalized(siblings=3, train_step=1),
        finalized(siblings=3, train_step=2),
        finalized(siblings=3, train_step=2),
        trained(0, 1),
        checkpointed(),
        trained(2, 3),
    ),
}


def stepwise(history: str) -> dict[str, object]:
    """The batch of the history: a run in which steps took one group each was of another batch size."""
    return {"trainer__groups_per_step": 1 if history.startswith("version_2") else 2}


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_sampler_restores_after_any_history_and_trains_to_the_end(sampler: str, history: str):
    given = Given(*HISTORIES[history], **SAMPLERS[sampler], **stepwise(history))
    given.when(restarted(tail_rows=True)).when(living()).then(state={"train_step": 4})


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("history", [h for h in HISTORIES if h != "nothing"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_sampler_goes_on_with_another_batch_size(sampler: str, history: str, batch: int):
    given = Given(*HISTORIES[history], **SAMPLERS[sampler], **stepwise(history))
    given.when(restarted(tail_rows=True, trainer__groups_per_step=batch)).when(living()).then(
        state={"train_step": 4}
    )


@pytest.mark.parametrize("now", SAMPLERS)
@pytest.mark.parametrize("before", ["in_order", "in_order_shrinking", "weight_fifo"])
def test_run_goes_on_with_another_sampler(before: str, now: str):
    given = Given(**SAMPLERS[before]).when(living(until=lambda p: p.train_step >= 2))
    given.when(restarted(**SAMPLERS[now])).when(living()).then(state={"train_step": 4})


@pytest.mark.parametrize("leaves", [dropped(1), dropped(1, Reason.EVICTED), parked(1)])
def test_place_of_a_group_that_left_is_drawn_again_for_its_step(leaves: Act):
    done = Given(
        finalized(siblings=3, train_step=1),
        generating(siblings=3, train_step=1),
        leaves,
        sampler__name="in_order",
    ).when(living(until=lambda p: p.train_step >= 1))
    done.then(
        events=[Like(e.StepApplied, train_step=1, group_ids=(0, 2))], only=(e.StepApplied, e.StepShrunk)
    )
    assert done.of(e.GroupReserved)[0].train_step == 1


@pytest.mark.parametrize("leaves", [dropped(1), dropped(1, Reason.EVICTED), parked(1)])
def test_step_is_trained_without_a_group_that_left_and_says_so_when_that_is_the_policy(leaves: Act):
    Given(
        finalized(siblings=3, train_step=1),
        generating(siblings=3, train_step=1),
        leaves,
        **SAMPLERS["in_order_shrinking"],
    ).when(living(until=lambda p: p.train_step >= 1)).then(
        events=[
            e.StepShrunk(train_step=1, reason=Reason.SHORTFALL, expected_groups=2, found_groups=1),
            Like(e.StepApplied, train_step=1, group_ids=(0,)),
        ],
        only=(e.StepShrunk, e.StepApplied),
    )


@pytest.mark.parametrize("sampler", ["in_order", "in_order_shrinking"])
def test_step_all_of_whose_groups_left_is_drawn_again(sampler: str):
    Given(*[generating(siblings=3, train_step=1)] * 2, dropped(0), parked(1), **SAMPLERS[sampler]).when(
        restarted(), living()
    ).then(state={"train_step": 4})


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_step_that_can_never_be_filled_is_trained_short_and_not_waited_for(sampler: str):
    done = Given(
        dataset=FakeDataset(size=5), dataset__max_epochs=1, trainer__max_steps=9, **SAMPLERS[sampler]
    ).when(living())
    done.then(state={"train_step": 3, "alive_total": 0, "exhausted": True})
    assert [len(step.group_ids) for step in done.of(e.StepApplied)] == [2, 2, 1]
    assert done.of(e.StepShrunk) == [
        e.StepShrunk(train_step=3, reason=Reason.SHORTFALL, expected_groups=2, found_groups=1)
    ]


def two_seals_of_versions(oldest: int, other: int) -> Act:
    """Group 0 waits in the buffer with one sibling of each version; the run has gone on to version 3."""

    def act(bench) -> None:
        story = bench.story
        group_id = story.generating()
        story.seal(group_id, 0, weight_version=oldest, max_weight_version=other)
        story.seal(group_id, 1, weight_version=other)
        story.start_finalize(group_id)
        story.finish_finalize(group_id)

    return act


@pytest.mark.parametrize("sampler", ["windowed", "weight_fifo", "ready_first"])
@pytest.mark.parametrize(("oldest", "stale"), [(0, True), (1, False), (3, False)])
def test_staleness_is_judged_by_the_oldest_token_at_a_restart(sampler: str, oldest: int, stale: bool):
    Given(
        two_seals_of_versions(oldest, 3),
        finalized(),
        finalized(),
        finalized(),
        trained(1),
        trained(2),
        trained(3),
        checkpointed(),
        sampler__name=sampler,
        sampler__max_staleness_versions=2,
    ).when(restarted()).then(
        events=[Like(e.GroupDropped, group_id=0, reason=Reason.STALE)] * stale,
        only=(e.GroupDropped,),
        state={0: None if stale else {"phase": GroupPhase.FINALIZED, "min_weight_version": oldest}},
    )


def test_stale_group_is_dropped_with_its_reason_before_anything_is_claimed():
    done = Given(
        finalized(siblings=3), published(9), sampler__max_staleness_versions=2, trainer__max_steps=1
    ).when(living())
    kinds = [type(event) for event in done.then(state={0: None}).of(e.GroupDropped, e.GroupClaimed)]
    assert kinds[0] is e.GroupDropped
    assert done.p.dropped == {Reason.STALE: 1}


FUTURE = (
    finalized(),
    finalized(),
    trained(0),
    checkpointed(),
    trained(1),
    ready(weight_version=2),
    finalized(weight_version=2),
)


def test_rollouts_newer_than_the_restored_weights_are_reused_when_that_is_the_policy():
    Given(*FUTURE).when(restarted(tail_rows=True, rollout_recovery__future_weights="reuse")).then(
        events=[],
        only=(e.AttemptSuperseded, e.FinalizeFailed),
        state={"weight_version": 1, 2: GroupPhase.READY, 3: GroupPhase.FINALIZED},
    )


def test_rollouts_newer_than_the_restored_weights_are_discarded_when_that_is_the_policy():
    done = Given(*FUTURE).when(restarted(tail_rows=True, rollout_recovery__future_weights="discard"))
    done.then(
        events=[Like(e.FinalizeFailed, group_id=3, reason=Reason.FUTURE_WEIGHTS)],
        only=(e.FinalizeFailed,),
        state={"weight_version": 1, 2: {"waiting": {0, 1}}, 3: {"waiting": {0, 1}}},
    )
    reasons = {(s.group_id, s.generation): s.reason for s in done.of(e.AttemptSuperseded)}
    assert {reasons[2, g] for g in (0, 1)} == {Reason.FUTURE_WEIGHTS}
