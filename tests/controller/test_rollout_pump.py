"""The rollout pump: what it draws, when it stops, and what it leaves to the driver."""

import asyncio

import pytest
from kinlog_bench import Bench
from kinlog_fake_parts import FakeDataset
from kinlog_interleavings import apart, ticks
from kinlog_lives import run_config

from kinlog.controller.rollout_pump import RolloutPump
from kinlog.lineage.state import GroupPhase
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Granularity, Reason


class Pumping:
    """The pump in the background, until the block ends."""

    def __init__(self, bench: Bench) -> None:
        self.pump = RolloutPump(bench.runtime, bench.driver)

    async def __aenter__(self) -> "asyncio.Task[None]":
        self.task = asyncio.create_task(self.pump.run())
        await ticks(200)
        return self.task

    async def __aexit__(self, *exc: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_pump_draws_up_to_the_permits_and_no_further():
    bench = Bench(
        run_config(rollout__max_live_groups=3, sampler__max_staleness_versions=9, trainer__max_steps=9)
    )
    async with Pumping(bench) as task:
        assert bench.p.alive_total == 3
        assert not task.done()
        bench.drop(0)
        await ticks(200)
        assert [group.group_id for group in bench.p.live_groups()] == [1, 2, 3]


async def test_pump_draws_no_more_than_the_steps_that_are_left_can_train():
    bench = Bench(run_config(trainer__max_steps=2, trainer__groups_per_step=2, rollout__max_live_groups=9))
    async with Pumping(bench):
        assert bench.p.drawn_total == 4


async def test_pump_stops_drawing_when_the_last_step_is_trained():
    bench = Bench(run_config(trainer__max_steps=1, trainer__groups_per_step=1))
    bench.story.train(bench.story.finalized())
    async with Pumping(bench) as task:
        assert task.done()
        assert bench.p.drawn_total == 1


async def test_exhausted_dataset_is_recorded_once_and_ends_the_drawing():
    bench = Bench(run_config(dataset__max_epochs=1, trainer__max_steps=50), dataset=FakeDataset(size=3))
    async with Pumping(bench) as task:
        assert task.done()
        assert task.exception() is None
    assert len(bench.events(e.DatasetExhausted)) == 1
    assert [event.prompt.draw_index for event in bench.events(e.GroupReserved)] == [0, 1, 2]
    assert {group.phase for group in bench.p.live_groups()} == {GroupPhase.FINALIZED}


async def test_pump_that_begins_after_the_dataset_was_exhausted_drives_what_is_left():
    bench = Bench()
    left = bench.admitted()
    bench.exhaust()
    async with Pumping(bench) as task:
        assert task.done()
    assert bench.p.groups[left].phase is GroupPhase.FINALIZED
    assert len(bench.events(e.DatasetExhausted)) == 1


async def test_reservation_carries_what_is_settled_for_good_at_that_moment():
    bench = Bench(
        run_config(
            rollout_recovery__task_granularity_overrides={"odd": Granularity.PROMPT_GROUP},
            rollout_recovery__agent_granularity_overrides={"one": Granularity.SIBLING},
            rollout__max_infrastructure_retries=7,
            rollout__max_data_retries=3,
            sampler__name="in_order",
        )
    )
    async with Pumping(bench):
        pass
    for event in bench.events(e.GroupReserved):
        odd = event.prompt.task_name == "odd"
        assert event.granularity is (Granularity.PROMPT_GROUP if odd else Granularity.SIBLING)
        assert event.retry_budget == e.RetryBudget(7, 3)
        assert event.num_generations == bench.config.rollout.num_generations
        assert event.train_step is not None


async def test_reservation_is_durable_before_the_group_is_driven():
    bench = Bench()
    await bench.writer.position()
    bench.writer.held = True
    async with Pumping(bench):
        assert len(bench.events(e.GroupReserved)) == 1
        assert bench.events(e.SiblingDispatched) == []
        bench.writer.held = False
        await ticks(200)
        assert bench.events(e.SiblingDispatched) != []


async def test_restored_groups_hold_permits_before_anything_fresh_is_drawn():
    bench = Bench(run_config(rollout__max_live_groups=2))
    restored = [bench.admitted(), bench.admitted()]
    async with Pumping(bench):
        assert [group.group_id for group in bench.p.live_groups()] == restored
        assert {order.group_id for order in bench.pool.calls} == set(restored)


async def test_what_was_decided_before_a_wait_for_the_barrier_is_decided_again_after_it():
    bench = Bench(run_config(rollout__max_live_groups=2, rollout__num_generations=1))
    kept = bench.admitted(siblings=1)
    pump = RolloutPump(bench.runtime, bench.driver)
    async with bench.runtime.barrier.exclusive("checkpoint"):
        task = apart(pump._draw())
        await ticks()  # it has seen a free permit, and waits for the barrier
        other = bench.story.reserve()
    await ticks()
    assert not task.done()
    assert [group.group_id for group in bench.p.live_groups()] == [kept, other]
    bench.drop(other)
    assert await task == other + 1


@pytest.mark.parametrize("leave", ["drop", "park"])
async def test_place_in_the_next_step_is_drawn_again_though_trained_groups_that_came_back_hold_all_permits(
    leave: str,
):
    """A restart brings trained groups back. Were their permits to hold up the next step's last place, the run would
    stand still for ever, in this life and the next."""
    bench = Bench(
        run_config(
            sampler__name="in_order",
            sampler__max_lookahead_versions=2,
            rollout__max_live_groups=4,
            trainer__groups_per_step=2,
            trainer__max_steps=9,
        )
    )
    story = bench.story
    for step in (1, 2):
        groups = []
        for _ in range(2):
            group_id = story.reserve(train_step=step)
            story.admit(group_id)
            story.dispatch(group_id)
            story.seal(group_id)
            story.start_finalize(group_id)
            story.finish_finalize(group_id)
            groups.append(group_id)
        story.train(*groups)
    for step in (3, 3, 4, 4):
        story.reserve(train_step=step)
    story.restore(None)
    assert bench.p.alive_total == 8
    if leave == "drop":
        bench.drop(1, Reason.LOW_VALID_FRACTION)
    else:
        story.commit(e.GroupParked(group_id=1, reason=Reason.RETRY_BUDGET))
    async with Pumping(bench):
        fresh = bench.events(e.GroupReserved)[8:]
        assert [event.train_step for event in fresh] == [1]
        assert bench.runtime.sampler.select(bench.p) == (0, fresh[0].group_id)


async def test_failure_in_one_group_s_driver_cancels_the_others_and_surfaces():
    bench = Bench()

    def broken(order: object) -> None:
        raise ZeroDivisionError

    bench.pool.hold(0, 0, 1)
    bench.pool.answers[1, 0, 1] = broken  # type: ignore[assignment]
    with pytest.raises(ExceptionGroup) as caught:
        await RolloutPump(bench.runtime, bench.driver).run()
    assert caught.group_contains(ZeroDivisionError)
    await ticks()
    assert bench.pool.running == 0
    assert bench.runtime.budget.in_use == 0
