"""Both pumps, the driver, checkpoints and an evictor together, in interleavings by chance and in virtual time.

Workers fail, hang, answer late and lose rows; groups are evicted at any moment. One seed is one history.
"""

import asyncio
import random

import pytest
from kinlog_bench import Bench
from kinlog_interleavings import run_by_chance
from kinlog_lives import run_config
from kinlog_unreliable import TIMEOUT_S, make_unreliable

from kinlog.controller.checkpoint import Checkpointer, SavedCheckpoint
from kinlog.controller.rollout_pump import RolloutPump
from kinlog.controller.runtime import clear_group_rows
from kinlog.controller.supervise import supervise
from kinlog.controller.train_pump import TrainPump
from kinlog.lineage.state import GroupPhase, Projection, projection_digest
from kinlog.replay.recovery.inventory import canonical_rows, staged_rows
from kinlog.schemas import events as e
from kinlog.schemas.config import RunConfig
from kinlog.schemas.events import SiblingSealed
from kinlog.schemas.reasons import CheckpointKind, Granularity, Partition, Reason
from kinlog.schemas.receipts import canonical_key


class HoldingCheckpointer(Checkpointer):
    """Checks, inside the exclusive hold, what a checkpoint relies on; writes nothing."""

    def __init__(self, bench: Bench, chance: random.Random) -> None:
        self._bench = bench
        self._chance = chance
        self.held = False
        bench.data_plane.on_clear = lambda partition, keys: self._cleared()

    def _cleared(self) -> None:
        assert not self.held, "rows were cleared during a checkpoint"

    async def save(self) -> SavedCheckpoint:
        bench, runtime = self._bench, self._bench.runtime
        async with runtime.barrier.exclusive("checkpoint"):
            self.held = True
            position = await runtime.ledger.position()
            assert_rows_are_there(bench)
            await asyncio.sleep(self._chance.expovariate(2.0))
            assert bench.p.last_seq == position.seq, "something was recorded during a checkpoint"
            self.held = False
        step = bench.p.train_step
        name = f"step_{step:06d}"
        async with runtime.barrier.cut("checkpoint_committed") as cut:
            event = e.CheckpointCommitted(
                name=name,
                checkpoint_kind=CheckpointKind.TRAINER,
                train_step=step,
                position=position,
                frontier_step=bench.p.frontier_step,
            )
            await runtime.ledger.commit(cut, event).durable()
        return SavedCheckpoint(name, 0.0, 0.0)


def assert_rows_are_there(bench: Bench) -> None:
    """What lineage calls sealed, or finalized, is in the data plane, to the digest."""
    staging, training = (bench.data_plane.rows[p] for p in (Partition.STAGING, Partition.TRAINING))
    for group in bench.p.live_groups():
        if group.rows:
            assert canonical_rows(group).items() <= training.items()
        else:
            for sibling in group.siblings.values():
                assert staged_rows(group, sibling).items() <= staging.items()


async def evict(bench: Bench, chance: random.Random) -> None:
    """While the run trains, groups leave at any moment, whatever their drivers are at."""
    while bench.p.train_step < bench.config.trainer.max_steps and not bench.p.exhausted:
        await asyncio.sleep(chance.expovariate(0.4))
        async with bench.runtime.barrier.cut("evict") as cut:
            candidates = [g for g in bench.p.live_groups() if g.phase is not GroupPhase.CLAIMED]
            if candidates:
                group = chance.choice(candidates)
                bench.runtime.ledger.commit(
                    cut, e.GroupDropped(group_id=group.group_id, reason=Reason.EVICTED)
                )
                await clear_group_rows(bench.runtime, cut, [group], Reason.EVICTED)


async def history(config: RunConfig, seed: int) -> Bench:
    chance = random.Random(seed)
    bench = Bench(config)
    make_unreliable(bench, chance)

    async def train_then_wait() -> None:
        await TrainPump(bench.runtime, HoldingCheckpointer(bench, chance), lambda metrics: None).run()
        # Until the last late answer has come, and every group that is left has been finalized.
        await asyncio.sleep(1_000)

    await supervise(
        [
            ("evictor", evict(bench, chance)),
            ("rollout", RolloutPump(bench.runtime, bench.driver).run()),
            ("train", train_then_wait()),
        ],
        until="train",
    )
    return bench


def assert_sound(bench: Bench) -> None:
    p: Projection = bench.p
    assert p.drawn_total == p.applied_total + p.dropped_total + p.parked_total + p.alive_total
    trained = [group_id for step in bench.events(e.StepApplied) for group_id in step.group_ids]
    assert len(trained) == len(set(trained))
    assert p.train_step == bench.config.trainer.max_steps or p.exhausted
    assert {group.phase for group in p.live_groups()} <= {GroupPhase.FINALIZED}
    assert bench.runtime.budget.in_use == 0
    # No attempt is dispatched twice, nor sent to a worker without having been dispatched.
    dispatched = {(d.group_id, d.generation, d.attempt) for d in bench.events(e.SiblingDispatched)}
    assert len(dispatched) == len(bench.events(e.SiblingDispatched))
    called = {(o.group_id, o.generation, o.attempt) for o in bench.pool.calls}
    assert len(called) == len(bench.pool.calls)
    assert called <= dispatched
    # No row is left that nobody refers to, save those that a finalizer published for a group that was gone by then and
    # whose answer was lost: a restart finds them.
    evicted = {d.group_id for d in bench.events(e.GroupDropped) if d.reason is Reason.EVICTED}
    lost = {
        canonical_key(s.group_id, s.generation, s.attempt)
        for s in bench.events(SiblingSealed)
        if s.group_id in evicted
    }
    owned = {key for group in p.groups.values() for key in canonical_rows(group)}
    assert bench.data_plane.rows[Partition.STAGING] == {}
    assert set(bench.data_plane.rows[Partition.TRAINING]) - owned <= lost


@pytest.mark.parametrize("sampler", ["in_order", "windowed", "weight_fifo", "ready_first"])
@pytest.mark.parametrize("granularity", list(Granularity))
def test_no_interleaving_loses_a_group_trains_one_twice_or_leaves_a_row_behind(
    sampler: str, granularity: Granularity
):
    for seed in range(20):
        chance = random.Random(seed)
        groups_per_step = chance.choice([1, 2])
        config = run_config(
            sampler__name=sampler,
            sampler__max_staleness_versions=chance.choice([0, 1, 4]),
            sampler__max_lookahead_versions=chance.choice([0, 1, 2]),
            rollout_recovery__task_granularity_overrides={"even": granularity},
            rollout__num_generations=chance.choice([1, 2, 3]),
            rollout__max_live_groups=groups_per_step + chance.choice([0, 1, 3]),
            rollout__max_inflight_siblings=chance.choice([3, 4, 9]),
            rollout__sibling_timeout_s=TIMEOUT_S,
            rollout__max_infrastructure_retries=chance.choice([0, 1, 5]),
            rollout__max_data_retries=chance.choice([0, 1, 3]),
            data_plane__call_timeout_s=chance.choice([1.0, 30.0]),
            trainer__groups_per_step=groups_per_step,
            trainer__max_steps=4,
            dataset__max_epochs=chance.choice([1, 100]),
        )
        try:
            assert_sound(run_by_chance(history(config, seed), seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_one_seed_is_one_history():
    config = run_config(sampler__name="weight_fifo")
    first, second = (run_by_chance(history(config, 11), 11) for _ in range(2))
    assert projection_digest(first.p) == projection_digest(second.p)
    assert first.writer.events == second.writer.events
