"""The train pump: claims, steps, publications and checkpoints, in their order; and how it ends."""

import asyncio

import pytest
from kinlog_bench import Bench
from kinlog_interleavings import apart, ticks
from kinlog_lives import run_config

from kinlog.controller.checkpoint import Checkpointer, SavedCheckpoint
from kinlog.controller.train_pump import TrainPump
from kinlog.lineage.state import GroupPhase
from kinlog.schemas import events as e
from kinlog.schemas.errors import CheckpointError, WorkerLostError
from kinlog.schemas.orders import TrainMetrics, TrainOrder
from kinlog.schemas.reasons import Partition, Reason, Validity
from kinlog.schemas.receipts import canonical_key


class ScriptedCheckpointer(Checkpointer):
    """Records checkpoints without writing any."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.problem = ""
        self.saved: list[int] = []

    async def save(self) -> SavedCheckpoint:
        await asyncio.sleep(0)
        step = self._bench.p.train_step
        self.saved.append(step)
        if not self.problem:
            self._bench.story.checkpoint()
        return SavedCheckpoint(f"step_{step:06d}", 0.0, 0.0, self.problem)


class Training:
    """A train pump on the bench, and what it told."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.checkpointer = ScriptedCheckpointer(bench)
        self.told: list[TrainMetrics] = []
        self.pump = TrainPump(bench.runtime, self.checkpointer, self.told.append)

    async def finalized(self, number: int) -> list[int]:
        """Groups with their canonical rows, by way of the real driver."""
        groups = [self.bench.admitted() for _ in range(number)]
        for group_id in groups:
            await self.bench.driver.drive(group_id)
        return groups


async def test_step_trains_on_the_rows_of_its_groups_in_order():
    bench = Bench(run_config(trainer__max_steps=1, trainer__groups_per_step=2))
    training = Training(bench)
    groups = await training.finalized(2)
    await training.pump.run()
    (order,) = bench.trainer.steps
    assert order.group_ids == tuple(groups)
    assert order.row_keys == tuple(canonical_key(g, n, 1) for g in groups for n in range(3))
    assert [metrics.train_step for metrics in training.told] == [1]
    assert bench.p.steps[1] == tuple(groups)


async def test_claims_are_durable_before_the_trainer_hears_of_the_step():
    bench = Bench(run_config(trainer__max_steps=1, trainer__groups_per_step=1))
    training = Training(bench)
    await training.finalized(1)
    await bench.writer.position()
    bench.writer.held = True
    task = asyncio.create_task(training.pump.run())
    await ticks()
    assert bench.p.groups[0].phase is GroupPhase.CLAIMED
    assert bench.trainer.steps == []
    bench.writer.held = False
    await task
    assert len(bench.trainer.steps) == 1


async def test_step_and_its_weights_are_recorded_as_one_after_they_are_published():
    """A draw between the two would be counted as a version younger than what it is trained with."""
    bench = Bench(run_config(trainer__max_steps=1, trainer__groups_per_step=1))
    training = Training(bench)
    await training.finalized(1)
    seen: list[tuple[int, int]] = []
    publish = bench.trainer.publish

    async def looking(weight_version: int) -> None:
        seen.append((bench.p.train_step, bench.p.weight_version))
        await publish(weight_version)
        await ticks()
        seen.append((bench.p.train_step, bench.p.weight_version))

    bench.trainer.publish = looking  # type: ignore[method-assign]
    await training.pump.run()
    assert seen == [(0, 0), (0, 0)]
    kinds = [type(event) for event in bench.writer.events]
    place = kinds.index(e.StepApplied)
    assert kinds[place + 1] is e.WeightsPublished
    assert (bench.p.train_step, bench.p.weight_version) == (1, 1)


@pytest.mark.parametrize("part", ["step", "publish"])
async def test_step_that_fails_is_not_recorded_as_applied(part: str):
    bench = Bench(run_config(trainer__max_steps=1, trainer__groups_per_step=1))
    training = Training(bench)
    (group_id,) = await training.finalized(1)
    error = WorkerLostError("the trainer died")

    async def broken(argument: object) -> None:
        raise error

    setattr(bench.trainer, part, broken)
    with pytest.raises(WorkerLostError) as caught:
        await training.pump.run()
    assert caught.value is error
    assert bench.p.train_step == 0
    assert bench.p.groups[group_id].phase is GroupPhase.CLAIMED
    assert training.checkpointer.saved == []


async def test_checkpoints_are_taken_at_their_steps_and_at_the_end():
    bench = Bench(run_config(trainer__max_steps=5, trainer__groups_per_step=1, checkpointing__every_steps=2))
    training = Training(bench)
    await training.finalized(5)
    await training.pump.run()
    assert training.checkpointer.saved == [2, 4, 5]


async def test_end_that_a_checkpoint_covers_already_takes_no_second_one():
    bench = Bench(run_config(trainer__max_steps=4, trainer__groups_per_step=1, checkpointing__every_steps=2))
    training = Training(bench)
    await training.finalized(4)
    await training.pump.run()
    assert training.checkpointer.saved == [2, 4]


async def test_failed_checkpoint_costs_the_run_nothing_until_the_last_one():
    bench = Bench(run_config(trainer__max_steps=3, trainer__groups_per_step=1, checkpointing__every_steps=1))
    training = Training(bench)
    training.checkpointer.problem = "scripted"
    await training.finalized(3)
    with pytest.raises(CheckpointError, match="step_000003 failed: scripted"):
        await training.pump.run()
    assert bench.p.train_step == 3
    assert training.checkpointer.saved == [1, 2, 3, 3]


async def test_checkpointing_that_is_switched_off_takes_none():
    bench = Bench(
        run_config(
            trainer__max_steps=1,
            trainer__groups_per_step=1,
            checkpointing__enabled=False,
            rollout_recovery__enabled=False,
        )
    )
    training = Training(bench)
    await training.finalized(1)
    await training.pump.run()
    assert training.checkpointer.saved == []


async def test_stale_groups_are_dropped_with_their_rows_before_anything_is_claimed():
    bench = Bench(
        run_config(trainer__max_steps=1, trainer__groups_per_step=1, sampler__max_staleness_versions=0)
    )
    training = Training(bench)
    (stale,) = await training.finalized(1)
    bench.story.commit(e.WeightsPublished(weight_version=1, train_step=0))
    bench.pool.weight_version = 1
    (fresh,) = await training.finalized(1)
    await training.pump.run()
    assert bench.p.dropped == {Reason.STALE: 1}
    assert bench.p.steps[1] == (fresh,)
    rows = bench.data_plane.rows[Partition.TRAINING]
    assert not {canonical_key(stale, n, 1) for n in range(3)} & set(rows)


async def test_group_that_goes_stale_while_its_driver_still_clears_its_rows_leaves_none():
    """Finalized is what the sampler sees at once; the driver clears the staged rows a little later, in its own cut."""
    bench = Bench(
        run_config(trainer__max_steps=1, trainer__groups_per_step=1, sampler__max_staleness_versions=0)
    )
    training = Training(bench)
    stale = bench.admitted()
    driving = asyncio.create_task(bench.driver.drive(stale))
    await bench.runtime.changes.wait_for(lambda: bench.events(e.GroupFinalized) or None)
    assert bench.data_plane.rows[Partition.STAGING]
    bench.story.commit(e.WeightsPublished(weight_version=1, train_step=0))
    pumping = asyncio.create_task(training.pump.run())
    await driving
    await ticks()
    assert bench.p.dropped == {Reason.STALE: 1}
    assert bench.data_plane.rows == {Partition.STAGING: {}, Partition.TRAINING: {}}
    pumping.cancel()
    await asyncio.gather(pumping, return_exceptions=True)


async def test_group_dropped_for_its_valid_fraction_is_never_selectable():
    bench = Bench(
        run_config(trainer__max_steps=1, trainer__groups_per_step=1, rollout__invalid_siblings="keep_masked")
    )
    training = Training(bench)
    pumping = asyncio.create_task(training.pump.run())
    bad = bench.admitted()
    for generation in range(3):
        bench.pool.answers[bad, generation, 1] = lambda order: bench.pool.seal(
            order, validity=Validity.FAILED
        )
    await bench.driver.drive(bad)
    await ticks()
    assert not pumping.done()
    (good,) = await training.finalized(1)
    await pumping
    assert bench.p.steps[1] == (good,)
    assert bench.p.dropped == {Reason.LOW_VALID_FRACTION: 1}


async def test_pump_waits_for_groups_and_goes_on_when_they_are_there():
    bench = Bench(run_config(trainer__max_steps=1, trainer__groups_per_step=2))
    training = Training(bench)
    pumping = asyncio.create_task(training.pump.run())
    await training.finalized(1)
    await ticks()
    assert not pumping.done()
    await training.finalized(1)
    await pumping
    assert bench.p.train_step == 1


async def test_exhausted_dataset_trains_what_is_left_once_nothing_is_under_way():
    bench = Bench(run_config(trainer__max_steps=9, trainer__groups_per_step=2))
    training = Training(bench)
    await training.finalized(2)
    slow = bench.admitted()
    bench.exhaust()
    pumping = asyncio.create_task(training.pump.run())
    await ticks(60)
    assert bench.p.train_step == 1
    assert not pumping.done()
    await bench.driver.drive(slow)
    await pumping
    assert bench.p.steps[2] == (slow,)


async def test_exhausted_dataset_with_nothing_left_ends_at_once():
    bench = Bench()
    bench.exhaust()
    training = Training(bench)
    await training.pump.run()
    assert bench.p.train_step == 0
    assert bench.trainer.steps == []


async def test_exhausted_run_in_order_takes_an_earlier_step_s_group_first_and_loses_none():
    """The place of a dropped group was drawn again, so that its number is higher than its step's neighbours'."""
    bench = Bench(
        run_config(
            sampler__name="in_order",
            sampler__max_lookahead_versions=3,
            trainer__max_steps=9,
            trainer__groups_per_step=2,
        )
    )
    training = Training(bench)
    for step in (2, 2, 1):
        group_id = bench.story.reserve(siblings=3, train_step=step)
        bench.story.admit(group_id)
        await bench.driver.drive(group_id)
    bench.exhaust()
    await training.pump.run()
    assert bench.p.steps == {1: (2, 0), 2: (1,)}
    assert bench.p.dropped == {}


async def test_claim_that_waited_for_the_barrier_looks_again():
    bench = Bench(run_config(trainer__max_steps=1, trainer__groups_per_step=1))
    training = Training(bench)
    (gone,) = await training.finalized(1)

    async with bench.runtime.barrier.exclusive("checkpoint"):
        pumping = apart(training.pump.run())
        await ticks()
        bench.drop(gone)
    await ticks()
    assert bench.events(e.GroupClaimed) == []
    (other,) = await training.finalized(1)
    await pumping
    assert bench.p.steps[1] == (other,)


async def test_trainer_gets_each_step_once_and_in_order():
    bench = Bench(run_config(trainer__max_steps=3, trainer__groups_per_step=1))
    training = Training(bench)
    seen: list[TrainOrder] = bench.trainer.steps
    await training.finalized(3)
    await training.pump.run()
    assert [order.train_step for order in seen] == [1, 2, 3]
    assert [order.group_ids for order in seen] == [(0,), (1,), (2,)]
