"""The controller's side of the Ray actors: what the controller's protocols ask for, over actor handles.

A dead actor is a ``WorkerLostError``. Ray restarts it; it is attached again, and a generation worker is given the
current weights again, before anything else is sent to it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from ray.exceptions import RayActorError, RayTaskError

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


class RevivedActor:
    """An actor that Ray restarts when it dies, and that is made ready again before it is used.

    Parameters
    ----------
    name:
        For messages, and for the log.
    handle:
        The Ray actor's handle, with an ``attach`` method.
    """

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self.handle = handle
        self._ready = False
        self._preparing = asyncio.Lock()

    async def prepare(self, also: Callable[[Any], Awaitable[None]] | None = None) -> None:
        """Attach the actor if this life of it has not been attached."""
        async with self._preparing:
            if not self._ready:
                await self._answer(self.handle.attach.remote())
                if also is not None:
                    await also(self.handle)
                self._ready = True

    async def ask(self, call: Callable[[Any], Awaitable[T]]) -> T:
        """Return what the actor answers.

        Raises
        ------
        WorkerLostError
            It died.
        """
        return await self._answer(call(self.handle))

    async def _answer(self, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except RayTaskError as error:
            # What the actor raised, without the traceback that Ray puts around it: it goes into the log.
            if isinstance(error.cause, KinlogError):
                raise error.cause from None
            raise
        except RayActorError as error:
            self._ready = False
            raise WorkerLostError(f"{self.name} died: {str(error).splitlines()[0]}") from error


class RayRolloutPool:
    """Generation workers, taken in turn."""

    def __init__(self, workers: list[RevivedActor]) -> None:
        self._workers = {worker.name: worker for worker in workers}
        self._turn = 0
        self._weights: tuple[Any, int] | None = None

    def assign(self) -> str:
        """Return the next worker's name."""
        names = list(self._workers)
        self._turn = (self._turn + 1) % len(names)
        return names[self._turn]

    async def run(self, worker: str, order: RolloutOrder) -> SiblingSealed | RolloutFailed:
        """Run one attempt on a worker. Raises ``WorkerLostError`` when it died."""
        actor = self._workers[worker]
        await actor.prepare(self._give_weights)
        return await actor.ask(lambda handle: handle.run.remote(order))

    async def update_weights(self, weights: Any, version: int) -> None:
        """Give every worker new weights. ``weights`` is an object reference: Ray ships it once a node.

        A worker that dies meanwhile gets them when it is prepared again.
        """
        self._weights = (weights, version)
        await asyncio.gather(*(self._update(worker) for worker in self._workers.values()))

    async def prepare(self) -> None:
        """Attach all workers."""
        await asyncio.gather(*(worker.prepare(self._give_weights) for worker in self._workers.values()))

    async def probe(self) -> None:
        await asyncio.gather(
            *(worker.ask(lambda handle: handle.probe.remote()) for worker in self._workers.values())
        )

    async def _update(self, worker: RevivedActor) -> None:
        try:
            await worker.prepare(self._give_weights)
            await worker.ask(self._give_weights)
        except WorkerLostError:
            return

    async def _give_weights(self, handle: Any) -> None:
        if self._weights is not None:
            weights, version = self._weights
            await handle.update_weights.remote(weights, version)


class RayFinalizer:
    """The finalizer."""

    def __init__(self, actor: RevivedActor) -> None:
        self._actor = actor

    async def finalize(self, order: FinalizeOrder) -> tuple[CanonicalRowRef, ...] | FinalizeRejected:
        await self._actor.prepare()
        return await self._actor.ask(lambda handle: handle.finalize.remote(order))

    async def probe(self) -> None:
        await self._actor.ask(lambda handle: handle.probe.remote())


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
        await self._actor.ask(lambda handle: handle.probe.remote())
