"""What is durable before what, while a group is driven."""

import asyncio
from pathlib import Path

from kinlog_bench import Bench
from kinlog_builders import new_log
from kinlog_driving import phase_of, staged
from kinlog_interleavings import ticks
from kinlog_stores import FaultyStore, Gate

from kinlog.lineage.state import GroupPhase
from kinlog.schemas import events as e
from kinlog.schemas.reasons import Reason
from kinlog.schemas.receipts import staging_key


class Durability:
    """A bench on a real log whose syncs stop at a gate."""

    def __init__(self, directory: Path) -> None:
        self.store = FaultyStore()
        self.opened = new_log(directory / "log", store=self.store)
        self.bench = Bench(writer=self.opened.writer)
        self._gate: Gate | None = None

    async def driven_to_sync(self, number: int) -> "asyncio.Task[None]":
        """Drive a fresh group of one sibling until the ``number``-th sync, and stop the log there."""
        group_id = self.bench.admitted(siblings=1)
        await self.opened.writer.position()
        self._gate = self.store.before = Gate(nth=number)
        task = asyncio.create_task(self.bench.driver.drive(group_id))
        assert await asyncio.to_thread(self._gate.reached.wait, 20)
        await ticks()
        return task

    async def go_on(self, task: "asyncio.Task[None]") -> None:
        assert self._gate is not None
        self._gate.open()
        await task
        assert phase_of(self.bench, 0) is GroupPhase.FINALIZED
        self.opened.close()


async def test_dispatch_is_durable_before_the_worker_hears_of_it(tmp_path: Path):
    log = Durability(tmp_path)
    task = await log.driven_to_sync(1)
    assert log.bench.p.groups[0].siblings[0].running  # recorded
    assert log.bench.pool.calls == []
    await log.go_on(task)
    assert len(log.bench.pool.calls) == 1


async def test_seal_is_durable_before_the_group_is_finalized(tmp_path: Path):
    log = Durability(tmp_path)
    task = await log.driven_to_sync(2)
    assert phase_of(log.bench, 0) is GroupPhase.READY
    assert log.bench.finalizer.calls == []
    await log.go_on(task)


async def test_finalize_is_recorded_durably_before_the_finalizer_is_called(tmp_path: Path):
    log = Durability(tmp_path)
    task = await log.driven_to_sync(3)
    assert phase_of(log.bench, 0) is GroupPhase.FINALIZING
    assert log.bench.finalizer.calls == []
    await log.go_on(task)


async def test_finalized_is_durable_before_the_staged_rows_are_cleared(tmp_path: Path):
    log = Durability(tmp_path)
    task = await log.driven_to_sync(4)
    assert phase_of(log.bench, 0) is GroupPhase.FINALIZED
    assert staged(log.bench) == {staging_key(0, 0, 1, 0)}
    await log.go_on(task)
    assert staged(log.bench) == set()


async def test_supersede_is_in_the_log_before_the_next_dispatch():
    bench = Bench()
    group_id = bench.admitted(siblings=1)
    bench.pool.fail(group_id, 0, 1, Reason.DATA_FAILURE)
    await bench.driver.drive(group_id)
    kinds = [type(event) for event in bench.writer.events]
    first, second = (n for n, kind in enumerate(kinds) if kind is e.SiblingDispatched)
    assert first < kinds.index(e.AttemptSuperseded) < second
