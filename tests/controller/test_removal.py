"""Leaving the replay buffer: by group id, whatever selects, finalizes, evicts and aborts at the same time.

By its place in a list that others change meanwhile, the wrong group would leave, or lose its rows.
"""

import asyncio
from typing import Literal

from hypothesis import given, settings
from hypothesis import strategies as st
from kinlog_bench import Bench
from kinlog_fake_parts import FakeFinalizer
from kinlog_interleavings import run_by_chance, ticks
from kinlog_lives import run_config
from msgspec.structs import replace

from kinlog.controller.checkpoint import Checkpointer
from kinlog.controller.runtime import clear_group_rows
from kinlog.controller.train_pump import TrainPump
from kinlog.lineage.state import GroupPhase
from kinlog.replay.recovery.inventory import canonical_rows, expected_inventory
from kinlog.schemas import events as e
from kinlog.schemas.orders import FinalizeOrder, FinalizeRejected
from kinlog.schemas.reasons import Partition, Reason

GROUPS = 3
CONFIG = run_config(
    sampler__name="windowed",
    checkpointing__enabled=False,
    trainer__max_steps=GROUPS,
    trainer__groups_per_step=1,
)

Removal = tuple[int, Literal["evict", "abort"], int]
"""Which group, how, and after how many ticks."""

REMOVALS = st.lists(
    st.tuples(st.integers(0, GROUPS - 1), st.sampled_from(["evict", "abort"]), st.integers(0, 30)),
    max_size=3,
)


class CarefulFinalizer(FakeFinalizer):
    """Rejects, as a real one does, what an eviction has cleared meanwhile."""

    async def finalize(self, order: FinalizeOrder) -> tuple[e.CanonicalRowRef, ...] | FinalizeRejected:
        await ticks(1)
        try:
            answer = await super().finalize(order)
        except KeyError as missing:
            return FinalizeRejected(
                group_id=order.group_id, generation=0, reason=Reason.ROWS_MISSING, detail=str(missing)
            )
        await ticks(1)
        return answer


class NoCheckpoints(Checkpointer):
    def __init__(self) -> None:
        pass


async def remove(bench: Bench, drives: "list[asyncio.Task[None]]", removal: Removal) -> None:
    """Let a group leave. Aborted, its driver is stopped wherever it is; evicted, its driver has to find out."""
    group_id, how, after = removal
    await ticks(after)
    if how == "abort":
        drives[group_id].cancel()
    async with bench.runtime.barrier.cut(how) as cut:
        group = bench.p.groups.get(group_id)
        if group is not None and group.live and group.phase is not GroupPhase.CLAIMED:
            reason = Reason.EVICTED if how == "evict" else Reason.DISCARDED_BY_REQUEST
            bench.runtime.ledger.commit(cut, e.GroupDropped(group_id=group_id, reason=reason))
            await clear_group_rows(bench.runtime, cut, [group], reason)


async def run_with(removals: list[Removal], groups_per_step: int, checkpoint_after: int) -> Bench:
    bench = Bench(replace(CONFIG, trainer=replace(CONFIG.trainer, groups_per_step=groups_per_step)))
    bench.finalizer.__class__ = CarefulFinalizer
    for _ in range(GROUPS):
        bench.story.ready()
    bench.data_plane.rows[Partition.STAGING].update(expected_inventory(bench.p).staging)
    drives = [asyncio.create_task(bench.driver.drive(group_id)) for group_id in range(GROUPS)]
    # Its rows are read as it trains: one that was cleared too early is a KeyError.
    train = asyncio.create_task(TrainPump(bench.runtime, NoCheckpoints(), lambda metrics: None).run())
    leaving = [asyncio.create_task(remove(bench, drives, removal)) for removal in removals]
    await ticks(checkpoint_after)
    async with bench.runtime.barrier.exclusive("checkpoint"):
        seq = bench.p.last_seq
        await ticks(3)
        assert bench.p.last_seq == seq
    await asyncio.gather(*leaving)
    await asyncio.gather(*drives, return_exceptions=True)
    await until_all_are_trained(bench, groups_per_step)
    assert not train.done() or train.exception() is None
    train.cancel()
    await asyncio.gather(train, return_exceptions=True)
    await bench.driver.close()
    for drive in drives:
        assert drive.cancelled() or drive.exception() is None
    return bench


async def until_all_are_trained(bench: Bench, groups_per_step: int) -> None:
    for _ in range(500):
        phases = [group.phase for group in bench.p.live_groups()]
        if GroupPhase.CLAIMED not in phases and phases.count(GroupPhase.FINALIZED) < groups_per_step:
            return
        await ticks(1)
    raise AssertionError(f"nobody trains on what is finalized: {phases}")


@settings(max_examples=2_000)
@given(
    removals=REMOVALS,
    groups_per_step=st.integers(1, 2),
    checkpoint_after=st.integers(0, 30),
    seed=st.integers(0, 2**32),
)
def test_removal_is_by_group_id_whatever_selects_finalizes_evicts_and_aborts_meanwhile(
    removals: list[Removal], groups_per_step: int, checkpoint_after: int, seed: int
):
    bench = run_by_chance(run_with(removals, groups_per_step, checkpoint_after), seed)
    p = bench.p
    dropped = [event.group_id for event in bench.events(e.GroupDropped)]
    trained = [group_id for step in bench.events(e.StepApplied) for group_id in step.group_ids]
    left = [group.group_id for group in p.live_groups()]
    # Each is in one place, and only those leave that were told to.
    assert sorted([*dropped, *trained, *left]) == list(range(GROUPS))
    assert set(dropped) <= {group_id for group_id, _, _ in removals}
    # What nobody removed is finalized, and trained on as far as it fills a step.
    aborted = {group_id for group_id, how, _ in removals if how == "abort"}
    waiting = [group_id for group_id in left if p.groups[group_id].phase is GroupPhase.FINALIZED]
    assert len(waiting) < groups_per_step
    assert set(left) - set(waiting) <= aborted
    # Everybody has their own rows, and only those of a driver that was stopped half-way are anybody's.
    rows = bench.data_plane.rows[Partition.TRAINING]
    for group_id in [*trained, *waiting]:
        assert canonical_rows(p.groups[group_id]).items() <= rows.items()
    owners = {tag.group_id for of in bench.data_plane.rows.values() for tag in of.values()}
    assert owners <= {*trained, *waiting, *aborted}
