"""When rollout checkpoints are taken: at an interval while anything happens, and whenever somebody asks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
from kinlog_bench import Bench
from kinlog_interleavings import ticks
from kinlog_lives import run_config

from kinlog.controller.checkpoint import Checkpointer, SavedCheckpoint
from kinlog.controller.rollout_checkpoints import RolloutCheckpoints
from kinlog.schemas.errors import CheckpointError
from kinlog.schemas.reasons import CheckpointKind


class ScriptedCheckpointer(Checkpointer):
    """Records rollout checkpoints without writing any."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._recorded_seq = 0
        self._runtime = bench.runtime
        self.saved: list[str] = []
        self.failure: Exception | None = None

    async def save_rollout(self) -> SavedCheckpoint:
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        self.saved.append(f"rollout_000000_{len(self.saved) + 1:04d}")
        self._bench.story.checkpoint(name=self.saved[-1], kind=CheckpointKind.ROLLOUT)
        self._recorded_seq = self._bench.p.last_seq
        return SavedCheckpoint(self.saved[-1], 0.0, 0.0)


class Taking:
    """Rollout checkpoints of a bench, where time passes when a test says so."""

    def __init__(self, every_s: float | None = None, *, enabled: bool = True) -> None:
        config = run_config(checkpointing__rollout_every_s=every_s, checkpointing__enabled=enabled)
        self.bench = Bench(config)
        self.checkpointer = ScriptedCheckpointer(self.bench)
        self.paused_s: list[float] = []
        self._over = asyncio.Event()
        runtime = replace(self.bench.runtime, sleep=self._sleep)
        self.checkpoints = RolloutCheckpoints(runtime, self.checkpointer)

    async def _sleep(self, seconds: float) -> None:
        self.paused_s.append(seconds)
        await self._over.wait()

    async def pass_time(self) -> None:
        """Let the pause that is going on be over."""
        self.end_pause()
        await ticks(20)

    def end_pause(self) -> None:
        self._over.set()
        self._over = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(self.checkpoints.run())
        await ticks(20)
        yield task
        task.cancel()
        with suppress(asyncio.CancelledError, CheckpointError):
            await task


async def test_one_is_taken_at_each_interval_in_which_anything_was_recorded():
    taking = Taking(every_s=60.0)
    async with taking.running():
        for number in (1, 2):
            taking.bench.story.reserve()
            await taking.pass_time()
            assert len(taking.checkpointer.saved) == number
        assert taking.paused_s == [60.0] * 3
        # Nothing happens: the watchdog must be able to see that.
        for _ in range(3):
            await taking.pass_time()
        assert len(taking.checkpointer.saved) == 2
        taking.bench.story.reserve()
        await taking.pass_time()
        assert len(taking.checkpointer.saved) == 3


@pytest.mark.parametrize("later", range(8))
async def test_run_that_ends_just_when_a_pause_does_is_not_held_up(later: int):
    taking = Taking(every_s=60.0)
    task = asyncio.create_task(taking.checkpoints.run())
    await ticks(20)
    taking.end_pause()
    await ticks(later)
    task.cancel()
    await ticks(20)
    heeded = task.done()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert heeded


async def test_without_an_interval_they_are_taken_when_asked_for_only():
    taking = Taking()
    async with taking.running():
        taking.bench.story.reserve()
        await ticks(20)
        assert taking.paused_s == taking.checkpointer.saved == []
        assert (await taking.checkpoints.take()).name == "rollout_000000_0001"


async def test_asking_brings_one_at_once_also_when_nothing_was_recorded():
    taking = Taking(every_s=60.0)
    async with taking.running():
        asked = await asyncio.gather(taking.checkpoints.take(), taking.checkpoints.take())
        assert [saved.name for saved in asked] == ["rollout_000000_0001"] * 2
        assert (await taking.checkpoints.take()).name == "rollout_000000_0002"


async def test_one_that_ends_the_run_is_told_to_who_asked_as_well():
    taking = Taking()
    taking.checkpointer.failure = CheckpointError("5 checkpoints in a row have failed")
    async with taking.running() as task:
        with pytest.raises(CheckpointError, match="no checkpoint was taken: 5 checkpoints in a row"):
            await taking.checkpoints.take()
        with pytest.raises(CheckpointError, match="5 checkpoints in a row"):
            await task


async def test_nobody_waits_for_one_of_a_run_that_has_ended():
    taking = Taking()
    waiting = asyncio.create_task(taking.checkpoints.take())
    await ticks(2)
    taking.checkpoints.close()
    for asked in (waiting, taking.checkpoints.take()):
        with pytest.raises(CheckpointError, match="the run has ended"):
            await asked


async def test_run_without_checkpoints_takes_none():
    with pytest.raises(CheckpointError, match=r"checkpointing\.enabled is false"):
        await Taking(enabled=False).checkpoints.take()
