"""Acts of a scenario: what the workers will do, and lives that are lived with them."""

import asyncio
from collections.abc import Callable

from kinlog_bench import Bench
from kinlog_scenario import (
    Act,
    copied_rows,
    saved_rows,
    told,
)

from kinlog.controller.checkpoint import Checkpointer, SavedCheckpoint
from kinlog.controller.retention import newly_durable, retain
from kinlog.controller.rollout_pump import RolloutPump
from kinlog.controller.runtime import clear_group_rows
from kinlog.controller.samplers import Draw
from kinlog.controller.supervise import supervise
from kinlog.controller.train_pump import TrainPump
from kinlog.lineage.state import GroupPhase, GroupState, Projection
from kinlog.schemas import events as e
from kinlog.schemas.errors import DataPlaneError
from kinlog.schemas.orders import FinalizeRejected, RolloutOrder
from kinlog.schemas.reasons import CheckpointKind, Reason, Validity
from kinlog.schemas.settings import SamplerSettings


def worker_fails(group_id: int, generation: int, attempt: int, reason: Reason = Reason.DATA_FAILURE) -> Act:
    return lambda bench: bench.pool.fail(group_id, generation, attempt, reason)


def worker_dies(group_id: int, generation: int, attempt: int) -> Act:
    return lambda bench: bench.pool.lose_worker(group_id, generation, attempt)


def worker_hangs(group_id: int, generation: int, attempt: int) -> Act:
    return lambda bench: told(bench.pool.hold(group_id, generation, attempt))


def worker_answers_late(group_id: int, generation: int, attempt: int, *, after_s: float) -> Act:
    """The answer comes after so many seconds of virtual time."""

    def act(bench: Bench) -> None:
        run = bench.pool.run

        async def late(worker: str, order: RolloutOrder) -> object:
            if (order.group_id, order.generation, order.attempt) == (group_id, generation, attempt):
                await asyncio.sleep(after_s)
            return await run(worker, order)

        bench.pool.run = late  # type: ignore[method-assign, assignment]

    return act


def worker_cannot_stage(group_id: int, generation: int, attempt: int) -> Act:
    """The data plane refuses an attempt's rows."""

    def refused(order: RolloutOrder) -> e.SiblingSealed:
        raise DataPlaneError("no storage unit answers")

    return lambda bench: bench.pool.answers.__setitem__((group_id, generation, attempt), refused)


def worker_answers(group_id: int, generation: int, attempt: int, validity: Validity) -> Act:
    """An attempt's result is not valid."""

    def act(bench: Bench) -> None:
        bench.pool.answers[group_id, generation, attempt] = lambda order: bench.pool.seal(
            order, validity=validity
        )

    return act


def finalizer_loses_answers(number: int) -> Act:
    """The finalizer dies this often after it has put a group's rows."""
    return lambda bench: setattr(bench.finalizer, "lose_answers", number)


def finalizer_rejects(group_id: int, generation: int, reason: Reason) -> Act:
    """The next finalize of a group finds a sibling's rows no good."""
    rejected = FinalizeRejected(group_id=group_id, generation=generation, reason=reason, detail="scripted")
    return lambda bench: bench.finalizer.reject.__setitem__(group_id, rejected)


def driven(*group_ids: int, wait_s: float = 0.0) -> Act:
    """Groups are driven until they are finalized or have left, side by side, and late answers are waited for."""

    async def act(bench: Bench) -> None:
        async with asyncio.TaskGroup() as tasks:
            for group_id in group_ids:
                tasks.create_task(bench.driver.drive(group_id))
        await asyncio.sleep(wait_s)
        await bench.driver.close()

    return act


def living(until: Callable[[Projection], bool] | None = None) -> Act:
    """A whole life: both pumps, with a checkpoint at every step that the configuration says. It ends by itself, or it is
    killed as soon as a condition holds."""

    async def act(bench: Bench) -> None:
        life = supervise(
            [
                ("rollout", RolloutPump(bench.runtime, bench.driver).run()),
                ("train", TrainPump(bench.runtime, RowKeeper(bench), lambda metrics: None).run()),
            ],
            until="train",
        )
        task = asyncio.create_task(life)
        task.add_done_callback(lambda _: bench.runtime.changes.notify())
        if until is not None:
            await bench.runtime.changes.wait_for(lambda: True if until(bench.p) or task.done() else None)
            assert not task.done(), "the life ended before the condition held"
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            await task
        await bench.driver.close()

    return act


class RowKeeper(Checkpointer):
    """A checkpointer that writes no files: it keeps a copy of the data plane's rows."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    async def save(self) -> SavedCheckpoint:
        bench, runtime = self._bench, self._bench.runtime
        async with runtime.barrier.exclusive("checkpoint"):
            position = await runtime.ledger.position()
            step = bench.p.train_step
            saved_rows(bench)[step] = copied_rows(bench.data_plane.rows)
        name = f"step_{step:06d}"
        kept = retain(
            bench.p,
            name=name,
            train_step=step,
            keep=bench.config.checkpointing.keep,
            present=frozenset(c.name for c in bench.p.checkpoints),
        )
        durable = newly_durable(bench.p, step)
        async with runtime.barrier.cut("checkpoint_committed") as cut:
            committed = e.CheckpointCommitted(
                name=name,
                checkpoint_kind=CheckpointKind.TRAINER,
                train_step=step,
                position=position,
                frontier_step=kept.frontier_step,
            )
            await runtime.ledger.commit(cut, committed).durable()
            await clear_group_rows(runtime, cut, durable, Reason.STEP_DURABLE)
        return SavedCheckpoint(name, 0.0, 0.0)


class AnyReady:
    """A sampler of somebody's own: as much ahead as there are permits, and whatever is finalized, oldest first."""

    def __init__(self, settings: SamplerSettings, *, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step

    def may_draw(self, p: Projection) -> Draw | None:
        return Draw(None)

    def select(self, p: Projection) -> tuple[int, ...] | None:
        ready = [g.group_id for g in p.live_groups() if g.phase is GroupPhase.FINALIZED]
        return tuple(ready[: self._groups_per_step]) if len(ready) >= self._groups_per_step else None

    def is_stale(self, p: Projection, group: GroupState) -> bool:
        return False
