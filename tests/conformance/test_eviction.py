"""Eviction: a replay buffer with a bound keeps the freshest finalized groups, live and at a restart, and starves no step."""

from itertools import pairwise

import pytest
from kinlog_conformance import (
    AnyReady,
    Given,
    Like,
    checkpointed,
    driven,
    finalized,
    living,
    published,
    reserved,
    restarted,
    trained,
)
from kinlog_fake_parts import FakeDataset

from kinlog.lineage.state import GroupPhase, Projection
from kinlog.schemas import events as e
from kinlog.schemas.errors import ConfigError
from kinlog.schemas.reasons import Partition, Reason
from kinlog.schemas.receipts import canonical_key

BOUNDED = ["windowed", "weight_fifo", "ready_first"]
BOUND = "sampler__max_ready_groups"
FAR = {"sampler__max_staleness_versions": 9}


def ready(p: Projection) -> int:
    return sum(group.phase is GroupPhase.FINALIZED for group in p.live_groups())


@pytest.mark.parametrize("sampler", BOUNDED)
def test_group_of_the_oldest_weights_is_evicted_with_its_rows_when_one_more_is_finalized(sampler: str):
    done = Given(
        finalized(weight_version=1),
        finalized(weight_version=0),
        reserved(),
        published(2),
        sampler__name=sampler,
        **{BOUND: 2},
        **FAR,
    ).when(driven(2))
    done.then(
        events=[Like(e.GroupDropped, group_id=1, reason=Reason.EVICTED)],
        only=(e.GroupDropped,),
        state={0: GroupPhase.FINALIZED, 1: None, 2: GroupPhase.FINALIZED},
    )
    assert Like(e.RowsCleared, reason=Reason.EVICTED, group_ids=(1,), num_rows=2) in done.of(e.RowsCleared)
    held = done.bench.data_plane.rows[Partition.TRAINING]
    assert set(held) == {canonical_key(group, g, 1) for group in (0, 2) for g in (0, 1)}


def test_group_that_comes_with_the_oldest_weights_of_all_is_the_one_that_leaves():
    Given(
        finalized(weight_version=3),
        finalized(weight_version=3),
        published(3),
        reserved(),
        lambda bench: bench.story.admit(2),
        lambda bench: bench.story.dispatch(2),
        lambda bench: bench.story.seal(2, weight_version=1) and None,
        **{BOUND: 2},
        **FAR,
    ).when(driven(2)).then(state={2: None, 0: GroupPhase.FINALIZED, 1: GroupPhase.FINALIZED})


@pytest.mark.parametrize("sampler", BOUNDED)
@pytest.mark.parametrize("bound", [2, 3])
def test_buffer_never_holds_more_than_its_bound_and_no_step_is_starved(sampler: str, bound: int):
    done = Given(sampler__name=sampler, **{BOUND: bound}, rollout__max_live_groups=9, **FAR).when(living())
    kept = [ready(p) for p in done.then(state={"train_step": 4}).prefixes]
    # Between the event that finalizes a group and the one that evicts another nobody looks.
    assert max(kept) <= bound + 1
    assert all(later <= bound for before, later in pairwise(kept) if before == bound + 1)
    assert done.of(e.StepShrunk) == []


@pytest.mark.parametrize("sampler", BOUNDED)
def test_prompts_are_not_burnt_for_groups_that_are_no_fresher(sampler: str):
    """While a step is trained the weights stay as they are: what is drawn fills the buffer once, and no more."""

    def trainer_never_ends(bench) -> None:
        async def step(order: object) -> None:
            await bench.runtime.changes.wait_for(lambda: None)

        bench.trainer.step = step

    done = Given(sampler__name=sampler, **{BOUND: 3}, rollout__max_live_groups=9, **FAR).when(
        trainer_never_ends,
        living(until=lambda p: ready(p) == 3 and any(g.phase is GroupPhase.CLAIMED for g in p.live_groups())),
    )
    done.then(events=[], only=(e.GroupDropped,), state={"drawn_total": 5})


def test_nothing_is_evicted_once_the_dataset_is_exhausted():
    done = Given(
        dataset=FakeDataset(size=8), dataset__max_epochs=1, trainer__max_steps=9, **{BOUND: 2}, **FAR
    ).when(living())
    done.then(state={"exhausted": True, "alive_total": 0})
    exhausted = done.events.index(done.of(e.DatasetExhausted)[0])
    assert not any(isinstance(event, e.GroupDropped) for event in done.events[exhausted:])
    trained_on = sum(len(step.group_ids) for step in done.of(e.StepApplied))
    assert trained_on + done.p.dropped_total == 8


def test_restart_with_a_smaller_bound_evicts_the_oldest_and_clears_their_rows():
    done = Given(
        *[finalized(weight_version=version) for version in (0, 2, 1, 2)], published(2), checkpointed(), **FAR
    ).when(restarted(**{BOUND: 2}))
    done.then(
        events=[
            Like(e.GroupDropped, group_id=0, reason=Reason.EVICTED),
            Like(e.GroupDropped, group_id=2, reason=Reason.EVICTED),
        ],
        only=(e.GroupDropped,),
        state={1: GroupPhase.FINALIZED, 3: GroupPhase.FINALIZED},
    )
    held = done.bench.data_plane.rows[Partition.TRAINING]
    assert set(held) == {canonical_key(group, g, 1) for group in (1, 3) for g in (0, 1)}
    done.when(living()).then(state={"train_step": 4})


def test_restart_that_brings_trained_groups_back_keeps_to_the_bound_and_goes_on():
    done = Given(*[finalized(siblings=3)] * 6, trained(0, 1), trained(2, 3), **{BOUND: 2}, **FAR).when(
        restarted(from_start=True, tail_rows=True)
    )
    assert ready(done.then().p) == 2
    done.when(living()).then(state={"train_step": 4})


class KeepsNewest(AnyReady):
    """A sampler of somebody's own that keeps the two groups drawn last."""

    def evict(self, p, ready):
        return [group.group_id for group in ready][:-2]


class EvictsAnything(AnyReady):
    def evict(self, p, ready):
        return [999]


def test_sampler_of_ones_own_may_evict():
    Given(*[finalized()] * 2, reserved(), sampler__name=f"{__name__}:KeepsNewest").when(driven(2)).then(
        events=[Like(e.GroupDropped, group_id=0, reason=Reason.EVICTED)], only=(e.GroupDropped,)
    )


def test_sampler_of_ones_own_without_the_verb_evicts_nothing():
    Given(*[finalized()] * 2, reserved(), sampler__name="kinlog_conformance:AnyReady", **{BOUND: 2}).when(
        driven(2)
    ).then(events=[], only=(e.GroupDropped,))


def test_sampler_that_evicts_what_is_not_in_the_buffer_is_refused_by_name():
    given = Given(finalized(), reserved(), sampler__name=f"{__name__}:EvictsAnything")
    with pytest.raises(BaseExceptionGroup) as caught:
        given.when(driven(1))
    assert caught.group_contains(ConfigError, match=r"EvictsAnything evicts groups \[999\]")
