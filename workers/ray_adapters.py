"""The controller's side of the Ray actors: what the controller's protocols ask for, over actor handles.

Ray restarts an actor that died, and a generation worker that hangs is killed so that it does. Its new life knows nothing:
it refuses work with ``NotAttachedError`` until it is attached again, and given the current weights again. A call that
meets a dead or a fresh actor, or that Ray loses, is a ``WorkerLostError``; waiting for a restart is charged to nobody.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from kinlog.schemas.errors import KinlogError, WorkerLostError
from kinlog.schemas.events import CanonicalRowRef, SiblingSealed
from kinlog.schemas.orders import (
    FinalizeOrder,
    FinalizeRejected,
    RolloutFailed,
    RolloutOrder,
    TrainMetrics,
    TrainOrder,
)

__all__ = ["RevivedActor", "RayRolloutPool", "RayFinalizer", "RayTrainer"]

T = TypeVar("T")

_RESTART_POLL_S = 0.5


class RevivedActor:
    """An actor that Ray restarts when it dies, and that is made ready again before it is used.

    Parameters
    ----------
    name:
        For messages, and for the log.
    handle:
        The Ray actor's handle, with ``attach`` and ``probe`` methods.
    restart_timeout_s:
        How long a restart may take before the actor counts as lost; 0 for one that Ray does not restart.
    """

    def __init__(self, name: str, handle: Any, *, restart_timeout_s: float) -> None:
        self.name = name
        self.handle = handle
        self._restart_timeout_s = restart_timeout_s
        self._ready = False
        self._lost: tuple[WorkerLostError, float] | None = None
        """How it was lost, and when (monotonic seconds), until it is ready again."""
        self._preparing = asyncio.Lock()

    @property
    def ready(self) -> bool:
        """Whether the actor is attached, as far as is known."""
        return self._ready

    async def prepare(self, also: Callable[[Any], Awaitable[None]] | None = None) -> None:
        """Attach the actor if this life of it has not been attached, waiting for Ray to restart it if need be.

        Raises
        ------
        WorkerLostError
            It did not come back in time, or is not restarted.
        """
        async with self._preparing:
            if self._ready:
                return
            limit_s = self._restart_timeout_s or None
            try:
                async with asyncio.timeout(limit_s):
                    await self._attach(also)
            except TimeoutError as error:
                raise WorkerLostError(f"{self.name} did not come back in {limit_s:g} s") from error
            self._ready = True
            self._lost = None

    async def _attach(self, also: Callable[[Any], Awaitable[None]] | None) -> None:
        while True:
            try:
                await self._answer(self.handle.attach.remote())
                if also is not None:
                    await self._answer(also(self.handle))
                return
            except WorkerLostError as error:
                if isinstance(error.__cause__, ActorDiedError):
                    raise  # Ray has given it up
                # A call to an actor that is being restarted fails at once: ask again until it is there.
                await asyncio.sleep(_RESTART_POLL_S)

    async def ask(self, call: Callable[[Any], Awaitable[T]]) -> T:
        """Return what the actor answers.

        Raises
        ------
        WorkerLostError
            It died, or has been restarted since it was prepared.
        """
        return await self._answer(call(self.handle))

    async def probe(self) -> None:
        """Raise ``WorkerLostError`` unless the actor answers; one that is being restarted is given its time."""
        if self._ready:
            await self.ask(lambda handle: handle.probe.remote())
        elif self._lost is not None and time.monotonic() - self._lost[1] >= self._restart_timeout_s:
            raise self._lost[0]

    def kill(self, why: str) -> None:
        """End the actor's process, so that Ray starts another: every call to it ends with ``WorkerLostError``."""
        ray.kill(self.handle, no_restart=False)
        self._lose(WorkerLostError(f"{self.name} was killed: {why}"))

    async def _answer(self, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except RayTaskError as error:
            # What the actor raised, without the traceback that Ray puts around it: it goes into the log.
            if isinstance(error.cause, WorkerLostError):
                self._lose(error.cause)
            if isinstance(error.cause, KinlogError):
                raise error.cause from None
            raise
        except RayError as error:
            # It died, or Ray lost the call: out of memory, the object's owner gone, a fault of its own. Whatever it was,
            # this answer will not come, and another attempt may have better luck.
            reason = str(error).strip().splitlines()
            lost = WorkerLostError(
                f"{self.name}: {type(error).__name__}: {reason[0] if reason else 'no details'}"
            )
            self._lose(lost)
            raise lost from error

    def _lose(self, lost: WorkerLostError) -> None:
        self._ready = False
        self._lost = self._lost or (lost, time.monotonic())


class RayRolloutPool:
    """Generation workers, taken in turn.

    Parameters
    ----------
    workers:
        The workers.
    probe_timeout_s:
        How long one worker may take to answer a probe.
    max_unanswered:
        Probes in a row that it may leave unanswered. One more, and it hangs, and is killed: what it was asked for would
        never end, and the worker slots of that would never come back.
    update_wait_s:
        How long a worker may let new weights wait for what it generates, before that counts as not answering.
    """

    def __init__(
        self,
        workers: list[RevivedActor],
        *,
        probe_timeout_s: float,
        max_unanswered: int,
        update_wait_s: float = 0.0,
    ) -> None:
        self._workers = {worker.name: worker for worker in workers}
        self._probe_timeout_s = probe_timeout_s
        self._max_unanswered = max_unanswered
        self._update_wait_s = update_wait_s
        self._unanswered = dict.fromkeys(self._workers, 0)
        self._turn = 0
        self._weights: tuple[Any, int] | None = None
        self._reviving: dict[str, asyncio.Task[None]] = {}

    async def available(self) -> None:
        """Return when a worker is ready, and see to it that those that are not become so.

        Raises
        ------
        WorkerLostError
            Not one of them came back in time.
        """
        while True:
            for name, worker in self._workers.items():
                if not worker.ready and name not in self._reviving:
                    task = asyncio.create_task(worker.prepare(self._give_weights), name=name)
                    self._reviving[name] = task
                    task.add_done_callback(self._revived)
            if any(worker.ready for worker in self._workers.values()):
                return
            done, pending = await asyncio.wait(self._reviving.values(), return_when=asyncio.FIRST_COMPLETED)
            failures = [error for task in done if (error := task.exception()) is not None]
            if failures and not pending:
                raise failures[0]

    def assign(self) -> str:
        """Return the next worker's name: one that is ready, if any is."""
        names = [name for name, worker in self._workers.items() if worker.ready] or list(self._workers)
        self._turn += 1
        return names[self._turn % len(names)]

    async def run(self, worker: str, order: RolloutOrder) -> SiblingSealed | RolloutFailed:
        """Run one attempt on a worker. Raises ``WorkerLostError`` when it died."""
        return await self._workers[worker].ask(lambda handle: handle.run.remote(order))

    def abort(self, worker: str, order: RolloutOrder) -> None:
        """Have a worker stop an attempt. What comes of it is seen by the attempt's own call."""
        identity = (order.group_id, order.generation, order.attempt)
        self._workers[worker].handle.abort.remote(*identity)

    async def update_weights(self, weights: Any, version: int) -> None:
        """Give every worker new weights. ``weights`` is an object reference: Ray ships it once a node.

        A worker that is down gets them when it is prepared again.
        """
        self._weights = (weights, version)
        await asyncio.gather(*(self._update(worker) for worker in self._workers.values() if worker.ready))

    async def prepare(self) -> None:
        """Attach all workers."""
        await asyncio.gather(*(worker.prepare(self._give_weights) for worker in self._workers.values()))

    async def probe(self) -> None:
        """Raise ``WorkerLostError`` when not one worker answers: rollouts go on as long as one does.

        A worker that has left too many probes unanswered is killed, and restarted.
        """
        probes = (self._probe(worker) for worker in self._workers.values())
        results = await asyncio.gather(*probes, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if len(failures) == len(results):
            raise failures[0]

    async def _probe(self, worker: RevivedActor) -> None:
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                await worker.probe()
        except TimeoutError as error:
            self._unanswered[worker.name] += 1
            problem = f"it left {self._unanswered[worker.name]} health probes in a row unanswered"
            if self._unanswered[worker.name] > self._max_unanswered:
                worker.kill(problem)
                self._unanswered[worker.name] = 0
            raise WorkerLostError(f"{worker.name}: {problem}") from error
        self._unanswered[worker.name] = 0

    def _revived(self, task: "asyncio.Task[None]") -> None:
        del self._reviving[task.get_name()]
        if not task.cancelled():
            task.exception()  # looked at: who needs a worker is told, others go on with those that are there

    async def _update(self, worker: RevivedActor) -> None:
        """Give one worker the weights. One that does not take them hangs: training goes on with the others."""
        limit_s = self._update_wait_s + self._probe_timeout_s * (self._max_unanswered + 1)
        try:
            async with asyncio.timeout(limit_s):
                await worker.ask(self._give_weights)
        except TimeoutError:
            worker.kill(f"it did not take new weights in {limit_s:g} s")
        except WorkerLostError:
            return

    async def _give_weights(self, handle: Any) -> None:
        given = None
        while self._weights is not given:  # newer ones may be published while these are on their way
            given = self._weights
            if given is not None:
                weights, version = given
                await handle.update_weights.remote(weights, version)


class RayFinalizer:
    """The finalizer."""

    def __init__(self, actor: RevivedActor) -> None:
        self._actor = actor

    async def available(self) -> None:
        """Return when the finalizer is ready. Raises ``WorkerLostError`` when it did not come back in time."""
        await self._actor.prepare()

    async def finalize(self, order: FinalizeOrder) -> tuple[CanonicalRowRef, ...] | FinalizeRejected:
        return await self._actor.ask(lambda handle: handle.finalize.remote(order))

    async def probe(self) -> None:
        await self._actor.probe()


class RayTrainer:
    """The trainer, and the way of its weights to the generation workers.

    A trainer that died has lost its optimizer state: the run must be resumed from a checkpoint.
    """

    def __init__(self, actor: RevivedActor, pool: RayRolloutPool) -> None:
        self._actor = actor
        self._pool = pool

    async def step(self, order: TrainOrder) -> TrainMetrics:
        return await self._actor.ask(lambda handle: handle.step.remote(order))

    async def publish(self, weight_version: int) -> None:
        weights = self._actor.handle.weights.remote()
        await self._actor.ask(lambda handle: handle.probe.remote())
        await self._pool.update_weights(weights, weight_version)

    async def save(self, directory: Path) -> None:
        await self._actor.ask(lambda handle: handle.save.remote(directory))

    async def load(self, directory: Path) -> None:
        await self._actor.ask(lambda handle: handle.load.remote(directory))

    async def probe(self) -> None:
        await self._actor.probe()
