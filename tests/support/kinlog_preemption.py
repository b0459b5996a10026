"""A life that is told to stop, in virtual time: when it was told, how long its saves take, and what it said."""

import asyncio
from collections.abc import Callable

from kinlog_acts_of_workers import RowKeeper
from kinlog_bench import Bench
from kinlog_scenario import Act

from kinlog.controller.checkpoint import SavedCheckpoint
from kinlog.controller.preemption import ask_to_stop, end_when_asked
from kinlog.controller.rollout_pump import RolloutPump
from kinlog.controller.supervise import supervise
from kinlog.controller.train_pump import TrainPump
from kinlog.lineage.state import Projection
from kinlog.schemas.errors import PreemptedError


class SlowKeeper(RowKeeper):
    """A checkpointer whose saves take their time."""

    def __init__(self, bench: Bench, *, takes_s: float, measured_s: float | None) -> None:
        super().__init__(bench)
        self._takes_s = takes_s
        self.last_seconds = measured_s
        self.problem = ""
        self.begun_at_s: list[float] = []

    async def save(self) -> SavedCheckpoint:
        self.begun_at_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self._takes_s)
        if self.problem:
            return SavedCheckpoint("step", self._takes_s, 0.0, self.problem)
        return await super().save()

    async def save_rollout(self) -> SavedCheckpoint:
        self.begun_at_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self._takes_s)
        return SavedCheckpoint("rollout_000000_0001", self._takes_s, 0.0)


class Preemption:
    """What came of it."""

    said = ""
    """Empty: it had got to its end."""
    took_s = 0.0
    saves_after_s: tuple[float, ...] = ()
    """When saves were begun, after the request."""
    told_seq = 0
    """What was recorded after it came after the request."""


def preempted(
    when: Callable[[Projection], bool] = lambda p: True,
    *,
    grace_s: float = 10.0,
    takes_s: float = 0.0,
    measured_s: float | None = None,
    problem: str = "",
    then: Preemption | None = None,
) -> Act:
    """A life of both pumps that is told to stop as soon as a condition holds, and does. Its groups go on from where they
    stand."""
    came = then or Preemption()

    async def act(bench: Bench) -> None:
        runtime, clock_s = bench.runtime, asyncio.get_running_loop().time
        keeper = SlowKeeper(bench, takes_s=takes_s, measured_s=measured_s)
        keeper.problem = problem
        life = supervise(
            [
                ("preemption", end_when_asked(runtime, keeper, grace_s=grace_s)),
                ("rollout", RolloutPump(runtime, bench.driver).run()),
                ("train", TrainPump(runtime, keeper, lambda metrics: None).run()),
            ],
            until="train",
        )
        task = asyncio.create_task(life)
        task.add_done_callback(lambda _: runtime.changes.notify())
        await runtime.changes.wait_for(lambda: True if when(bench.p) or task.done() else None)
        told_at_s, came.told_seq = clock_s(), bench.p.last_seq
        keeper.begun_at_s.clear()
        ask_to_stop(runtime)
        try:
            await task
        except PreemptedError as error:
            came.said = str(error)
        came.took_s = clock_s() - told_at_s
        came.saves_after_s = tuple(at_s - told_at_s for at_s in keeper.begun_at_s)
        await bench.driver.close()

    return act
