"""Samplers: given a projection, when asked, then that answer; and whatever happened before, never a standstill."""

import dataclasses
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinlog_bench import Bench
from kinlog_builders import Story
from kinlog_lives import run_config

from kinlog.controller.checkpoint import Checkpointer
from kinlog.controller.rollout_pump import RolloutPump
from kinlog.controller.samplers import Draw, InOrder, WeightFifo, Windowed, build_sampler
from kinlog.controller.train_pump import TrainPump
from kinlog.lineage.state import GroupPhase, GroupState
from kinlog.schemas import events as e
from kinlog.schemas.config import RunConfig
from kinlog.schemas.reasons import Reason
from kinlog.schemas.settings import SamplerSettings


def in_order(told: Story, *steps: int | None) -> list[int]:
    """Groups reserved for these steps."""
    return [told.reserve(train_step=step) for step in steps]


def finish(told: Story, *group_ids: int, weight_version: int | None = None) -> None:
    """Bring groups to ``finalized`` from wherever they stand."""
    for group_id in group_ids:
        group = told.group(group_id)
        if group.phase is GroupPhase.RESERVED:
            told.admit(group_id)
        if group.phase in (GroupPhase.ADMITTED, GroupPhase.GENERATING):
            if any(s.waiting for s in group.siblings.values()):
                told.dispatch(group_id)
            facts = {} if weight_version is None else {"weight_version": weight_version}
            told.seal(group_id, **facts)
        if group.phase is GroupPhase.READY:
            told.start_finalize(group_id)
        if group.phase is GroupPhase.FINALIZING:
            told.finish_finalize(group_id)


def drop(told: Story, group_id: int, reason: Reason = Reason.STALE) -> None:
    told.commit(e.GroupDropped(group_id=group_id, reason=reason))


def published(told: Story, version: int) -> None:
    told.commit(e.WeightsPublished(weight_version=version, train_step=version))


# ---- in_order ---------------------------------------------------------------------------------------------------


def test_in_order_fills_the_next_step_first_and_then_as_far_as_it_may_look_ahead():
    told, sampler = Story(), InOrder(2, max_lookahead_versions=1)
    drawn = []
    while (draw := sampler.may_draw(told.p)) is not None:
        drawn.append(draw.train_step)
        in_order(told, draw.train_step)
    assert drawn == [1, 1, 2, 2]


def test_in_order_without_lookahead_draws_for_the_next_step_only():
    told, sampler = Story(), InOrder(1, max_lookahead_versions=0)
    assert sampler.may_draw(told.p) == Draw(1)
    (group,) = in_order(told, 1)
    assert sampler.may_draw(told.p) is None
    finish(told, group)
    told.claim(group)
    assert sampler.may_draw(told.p) is None
    told.apply(group)
    assert sampler.may_draw(told.p) == Draw(2)


@pytest.mark.parametrize("leave", ["drop", "park"])
def test_in_order_draws_the_place_of_a_group_that_left_again(leave: str):
    told, sampler = Story(), InOrder(2, max_lookahead_versions=1)
    groups = in_order(told, 1, 1, 2, 2)
    assert sampler.may_draw(told.p) is None
    if leave == "drop":
        drop(told, groups[0])
    else:
        told.commit(e.GroupParked(group_id=groups[0], reason=Reason.RETRY_BUDGET))
    assert sampler.may_draw(told.p) == Draw(1)


def test_in_order_selects_the_groups_of_the_next_step_only_and_by_number():
    told, sampler = Story(), InOrder(2, max_lookahead_versions=1)
    groups = in_order(told, 1, 2, 2, 1)
    finish(told, groups[3], groups[1], groups[2])
    assert sampler.select(told.p) is None
    finish(told, groups[0])
    assert sampler.select(told.p) == (groups[0], groups[3])
    told.train(groups[0], groups[3])
    assert sampler.select(told.p) == (groups[1], groups[2])


def test_in_order_calls_a_group_of_a_step_gone_by_stale():
    told, sampler = Story(), InOrder(1, max_lookahead_versions=1)
    first, second, late = in_order(told, 1, 2, 1)
    finish(told, first)
    told.train(first)
    assert [sampler.is_stale(told.p, told.group(g)) for g in (second, late)] == [False, True]


def test_in_order_with_a_smaller_batch_than_before_waits_for_all_that_were_drawn_for_the_step():
    told, sampler = Story(), InOrder(2, max_lookahead_versions=1)
    groups = in_order(told, 1, 1, 1, 2, 2, 2)  # drawn when a step took three
    finish(told, *groups[:2])
    assert sampler.select(told.p) is None  # else the third would come out stale, whatever it cost
    finish(told, groups[2])
    assert sampler.select(told.p) == tuple(groups[:3])


def test_in_order_with_a_larger_batch_than_before_tops_the_next_step_up():
    told, sampler = Story(), InOrder(3, max_lookahead_versions=1)
    groups = in_order(told, 1, 1, 2, 2)
    finish(told, *groups)
    assert sampler.select(told.p) is None
    assert sampler.may_draw(told.p) == Draw(1)


def test_in_order_takes_groups_that_were_drawn_for_no_step_into_the_next_ones():
    """The run was started with another sampler."""
    told, sampler = Story(), InOrder(2, max_lookahead_versions=1)
    groups = in_order(told, None, None, None)
    assert sampler.may_draw(told.p) == Draw(2)
    finish(told, *groups)
    assert sampler.select(told.p) == tuple(groups[:2])
    told.train(*groups[:2])
    assert sampler.may_draw(told.p) == Draw(2)


def test_in_order_after_a_restore_finds_each_group_in_its_step_again():
    told, sampler = Story(), InOrder(2, max_lookahead_versions=1)
    groups = in_order(told, 1, 1, 2, 2, 3, 3)
    finish(told, *groups[:4])
    told.train(*groups[:2])
    checkpoint = told.checkpoint()
    told.train(*groups[2:4])
    told.restore(checkpoint)
    assert sampler.select(told.p) == tuple(groups[2:4])
    assert sampler.may_draw(told.p) is None


# ---- windowed ---------------------------------------------------------------------------------------------------


def aged(told: Story, *versions: int) -> list[int]:
    """Finalized groups, the oldest tokens of each from this weight version."""
    groups = []
    for version in versions:
        group_id = told.reserve()
        finish(told, group_id, weight_version=version)
        groups.append(group_id)
    return groups


def test_windowed_selects_the_oldest_ready_groups_whatever_order_they_were_drawn_in():
    told, sampler = Story(), Windowed(2, 4, freshest_first=False)
    published(told, 3)
    groups = aged(told, 2, 1, 3, 1)
    assert sampler.select(told.p) == (groups[1], groups[3])


def test_windowed_freshest_first_selects_the_freshest():
    told, sampler = Story(), Windowed(2, 4, freshest_first=True)
    published(told, 3)
    groups = aged(told, 2, 1, 3, 1)
    assert sampler.select(told.p) == (groups[0], groups[2])


def test_staleness_is_judged_by_the_oldest_tokens_of_the_group():
    told, sampler = Story(), Windowed(1, 2, freshest_first=False)
    group_id = told.generating(siblings=2)
    told.seal(group_id, 0, weight_version=0, max_weight_version=3)
    told.seal(group_id, 1, weight_version=3)
    for version, stale in ((1, False), (2, False), (3, True), (9, True)):
        published(told, version)
        assert sampler.is_stale(told.p, told.group(group_id)) is stale


def test_group_of_newer_weights_than_the_restored_ones_is_not_stale():
    told, sampler = Story(), Windowed(1, 0, freshest_first=False)
    (group_id,) = aged(told, 5)
    assert not sampler.is_stale(told.p, told.group(group_id))
    assert sampler.select(told.p) == (group_id,)


def test_windowed_never_selects_a_stale_group():
    told, sampler = Story(), Windowed(2, 1, freshest_first=False)
    published(told, 3)
    groups = aged(told, 1, 2, 3)
    assert sampler.select(told.p) == (groups[1], groups[2])
    drop(told, groups[2])
    assert sampler.select(told.p) is None


@pytest.mark.parametrize("sampler", [Windowed(2, 1, freshest_first=False), WeightFifo(2, 1)])
def test_bounded_samplers_draw_no_more_than_can_be_trained_before_it_is_stale(sampler: Windowed | WeightFifo):
    told = Story()
    groups = []
    while sampler.may_draw(told.p) is not None:
        groups.append(told.reserve())
    assert len(groups) == 4  # two steps of two: the second is trained one version later
    finish(told, *groups)
    told.claim(*groups[:2])
    # What is drawn while a step trains has the weights from before it.
    assert sampler.may_draw(told.p) is None
    told.apply(*groups[:2])
    assert sampler.may_draw(told.p) == Draw(None)


# ---- weight_fifo ------------------------------------------------------------------------------------------------


def test_weight_fifo_waits_for_groups_that_were_started_under_older_weights():
    told, sampler = Story(), WeightFifo(1, 4)
    slow = told.generating()
    published(told, 1)
    fast = told.finalized()
    assert sampler.select(told.p) is None
    finish(told, slow)
    assert sampler.select(told.p) == (slow,)
    told.train(slow)
    assert sampler.select(told.p) == (fast,)


def test_weight_fifo_does_not_wait_for_slower_groups_of_the_same_weights():
    told, sampler = Story(), WeightFifo(1, 4)
    told.generating()
    fast = told.finalized()
    assert sampler.select(told.p) == (fast,)


@pytest.mark.parametrize("leave", ["drop", "park"])
def test_weight_fifo_goes_on_when_the_group_it_waited_for_leaves(leave: str):
    told, sampler = Story(), WeightFifo(1, 4)
    slow = told.generating()
    published(told, 1)
    fast = told.finalized()
    assert sampler.select(told.p) is None
    if leave == "drop":
        drop(told, slow)
    else:
        told.commit(e.GroupParked(group_id=slow, reason=Reason.RETRY_BUDGET))
    assert sampler.select(told.p) == (fast,)


def test_configured_sampler_is_built():
    built = [
        build_sampler(SamplerSettings(name=name), groups_per_step=2)
        for name in ("in_order", "windowed", "weight_fifo")
    ]
    assert [type(sampler) for sampler in built] == [InOrder, Windowed, WeightFifo]


# ---- after any history ------------------------------------------------------------------------------------------


class Wanderer:
    """Tells a run by chance, with a real sampler and the pumps' own judgement of when to draw and what to train."""

    def __init__(self, config: RunConfig, seed: int) -> None:
        self.bench = Bench(config)
        self.told = self.bench.story
        self.chance = random.Random(seed)
        self.kept: list[e.CheckpointCommitted] = []
        self.most_alive = 0
        self.lives = 1
        self._judge(config)

    def _judge(self, config: RunConfig) -> None:
        sampler = build_sampler(config.sampler, groups_per_step=config.trainer.groups_per_step)
        self.runtime = dataclasses.replace(self.bench.runtime, config=config, sampler=sampler)
        self.rollout = RolloutPump(self.runtime, self.bench.driver)
        self.train = TrainPump(self.runtime, NoCheckpointer(), lambda metrics: None)

    @property
    def live(self) -> list[GroupState]:
        return list(self.told.p.live_groups())

    def unfinished(self) -> list[int]:
        done = (GroupPhase.FINALIZED, GroupPhase.CLAIMED)
        return [group.group_id for group in self.live if group.phase not in done]

    def draw(self) -> bool:
        draw = self.rollout._may_draw()
        if self.runtime.exhausted and not self.told.p.exhausted:
            self.told.commit(e.DatasetExhausted(draw_cursor=self.told.p.draw_cursor))
            return True
        if not isinstance(draw, Draw):
            return False
        self.told.reserve(train_step=draw.train_step)
        self.most_alive = max(self.most_alive, self.told.p.alive_total)
        return True

    def advance(self) -> bool:
        """One step of one unfinished group."""
        unfinished = self.unfinished()
        if not unfinished:
            return False
        group = self.told.group(self.chance.choice(unfinished))
        if group.phase is GroupPhase.RESERVED:
            self.told.admit(group.group_id)
            self.told.dispatch(group.group_id)
        elif group.phase is GroupPhase.GENERATING:
            if any(s.waiting for s in group.siblings.values()):
                self.told.dispatch(group.group_id)
            running = [g for g, s in group.siblings.items() if s.running]
            self.told.seal(group.group_id, self.chance.choice(running))
        else:
            finish(self.told, group.group_id)
        return True

    def leave(self) -> bool:
        """A group fails for good, of those that can."""
        candidates = [group for group in self.live if group.phase is not GroupPhase.CLAIMED]
        if not candidates:
            return False
        group = self.chance.choice(candidates)
        if group.phase is not GroupPhase.FINALIZED and self.chance.random() < 0.5:
            self.told.commit(e.GroupParked(group_id=group.group_id, reason=Reason.RETRY_BUDGET))
        else:
            drop(self.told, group.group_id, Reason.LOW_VALID_FRACTION)
        return True

    def claim_or_apply(self) -> bool:
        claimed = [group.group_id for group in self.live if group.phase is GroupPhase.CLAIMED]
        p = self.told.p
        if claimed:
            self.told.apply(*claimed)
            if self.chance.random() < 0.4:
                self.kept = [*self.kept[-2:], self.told.checkpoint()]
            return True
        if p.train_step >= self.runtime.config.trainer.max_steps:
            return False
        if stale := self.train._stale():
            for group in stale:
                drop(self.told, group.group_id)
            return True
        selected = self.train._selection()
        if not selected:
            return False
        self.check_selection(selected)
        self.told.claim(*selected)
        return True

    def check_selection(self, selected: Sequence[int]) -> None:
        assert len(set(selected)) == len(selected)
        if self.told.p.exhausted or self.runtime.config.sampler.name != "weight_fifo":
            return
        newest = max(self.told.group(group_id).weight_version for group_id in selected)
        overtaken = [
            g.group_id for g in self.live if g.weight_version < newest and g.group_id not in selected
        ]
        assert not overtaken

    def restart(self, **changes: int) -> None:
        """A crash: the trainer's effects past a checkpoint are undone, and what ran is superseded."""
        for group in self.live:
            for sibling in group.siblings.values():
                if sibling.running:
                    self.told.supersede(group.group_id, sibling.generation, Reason.CONTROLLER_RESTART)
        checkpoint = self.chance.choice([None, *self.kept])
        self.told.restore(checkpoint)
        self.kept = [c for c in self.kept if c.train_step <= self.told.p.train_step]
        self.lives += 1

    def drained(self) -> None:
        """Everything under way comes to its end; then there is something to do, or the run is over."""
        while self.advance():
            pass
        p, config = self.told.p, self.runtime.config
        if any(g.phase is GroupPhase.CLAIMED for g in self.live):
            return  # a step is being trained: it will end
        if p.train_step >= config.trainer.max_steps:
            return
        can_train = bool(self.train._stale()) or self.train._selection() is not None
        can_draw = self.rollout._may_draw() is not None
        assert can_train or can_draw, f"stands still at step {p.train_step}: {self.told.phases()}"

    def wander(self, steps: int, *, restarts: bool) -> None:
        acts = [self.draw] * 6 + [self.advance] * 14 + [self.claim_or_apply] * 5 + [self.leave]
        for _ in range(steps):
            self.chance.choice(acts)()
            if self.chance.random() < 0.04:
                self.drained()
            if restarts and self.chance.random() < 0.02:
                self.restart()
        self.drained()

    def to_the_end(self) -> None:
        """Without further failures the run ends: every step is trained, or the dataset is used up."""
        for _ in range(5_000):
            if not (self.claim_or_apply() or self.draw() or self.advance()):
                break
        p = self.told.p
        if p.train_step < self.runtime.config.trainer.max_steps:
            assert p.exhausted
            assert not self.live


class NoCheckpointer(Checkpointer):
    def __init__(self) -> None: ...


CONFIGS = st.builds(
    lambda name, groups_per_step, spare, ahead, freshest, max_steps, rows: run_config(
        sampler__name=name,
        sampler__max_lookahead_versions=ahead,
        sampler__max_staleness_versions=ahead,
        sampler__freshest_first=freshest,
        trainer__groups_per_step=groups_per_step,
        trainer__max_steps=max_steps,
        rollout__max_live_groups=groups_per_step + spare,
        dataset__max_epochs=rows,
    ),
    st.sampled_from(["in_order", "windowed", "weight_fifo"]),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(0, 3),
    st.booleans(),
    st.integers(1, 12),
    st.sampled_from([1, 100]),
)


@settings(max_examples=150)
@given(config=CONFIGS, seed=st.integers(0, 2**32))
def test_no_history_makes_generation_and_training_wait_for_each_other(config: RunConfig, seed: int):
    wanderer = Wanderer(config, seed)
    wanderer.wander(150, restarts=True)
    wanderer.to_the_end()
    p = wanderer.told.p
    assert p.drawn_total == p.applied_total + p.dropped_total + p.parked_total + p.alive_total


@settings(max_examples=80)
@given(config=CONFIGS, seed=st.integers(0, 2**32))
def test_live_groups_never_exceed_the_permits_in_a_life_without_a_roll_back(config: RunConfig, seed: int):
    wanderer = Wanderer(config, seed)
    wanderer.wander(150, restarts=False)
    assert wanderer.most_alive <= config.rollout.max_live_groups


@settings(max_examples=80)
@given(config=CONFIGS.filter(lambda c: c.sampler.name == "weight_fifo"), seed=st.integers(0, 2**32))
def test_weight_fifo_drops_nothing_as_stale_however_long_a_group_takes(config: RunConfig, seed: int):
    wanderer = Wanderer(config, seed)
    wanderer.wander(200, restarts=False)
    assert Reason.STALE not in wanderer.told.p.dropped


@settings(max_examples=80)
@given(before=CONFIGS, after=CONFIGS, seed=st.integers(0, 2**32))
def test_run_that_is_resumed_with_another_sampler_batch_or_buffer_goes_on(
    before: RunConfig, after: RunConfig, seed: int
):
    wanderer = Wanderer(before, seed)
    wanderer.wander(60, restarts=True)
    wanderer.restart()
    wanderer._judge(after)
    wanderer.drained()
    wanderer.wander(40, restarts=True)
    wanderer.to_the_end()
