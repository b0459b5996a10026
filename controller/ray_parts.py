"""The real parts of a run: TransferQueue and Ray actors. With ``launch``, the only place that names ``kinlog.workers``."""

import asyncio
from typing import Any

import ray

from kinlog.controller.protocols import Workers
from kinlog.controller.worker_interpreter import worker_interpreter
from kinlog.lineage.run_directory import RunDirectory
from kinlog.schemas.config import RunConfig
from kinlog.schemas.settings import GenerationSettings
from kinlog.workers.agents import open_dataset
from kinlog.workers.data_plane import DataPlane
from kinlog.workers.finalizer_worker import FinalizerWorker
from kinlog.workers.ray_adapters import RayFinalizer, RayRolloutPool, RayTrainer, RevivedActor
from kinlog.workers.rollout_worker import RolloutWorker
from kinlog.workers.trainer_worker import TrainerWorker

__all__ = ["RayParts", "rollout_pool"]


class RayParts:
    """Makes a run's parts inside the process that owns them."""

    def __init__(self, config: RunConfig, directory: RunDirectory) -> None:
        self._config = config
        self._directory = directory
        self._actors: _Actors | None = None
        self.dataset = open_dataset(config)

    async def start_data_plane(self) -> DataPlane:
        # Worker processes take seconds to import the training stack: let them, meanwhile.
        self._actors = self._actors or self._start_actors()
        return await DataPlane.start(self._config.data_plane)

    async def start_workers(self) -> Workers:
        self._actors = self._actors or self._start_actors()
        pool = rollout_pool(self._config, self._actors.generation)
        finalizer, trainer = self._actors.finalizer, self._actors.trainer
        await asyncio.gather(pool.prepare(), finalizer.prepare(), trainer.prepare())
        return Workers(pool, RayFinalizer(finalizer), RayTrainer(trainer, pool))

    def _start_actors(self) -> "_Actors":
        return _Actors(self._config, self._directory)


def rollout_pool(config: RunConfig, workers: list[RevivedActor]) -> RayRolloutPool:
    """Return a pool that gives workers the time that the configuration says."""
    supervision = config.supervision
    finishes_first = config.generation.in_flight_updates == "finish"
    return RayRolloutPool(
        workers,
        # Within the time that the pool as a whole is given, and before the run would be stopped.
        probe_timeout_s=supervision.probe_timeout_s / 2,
        max_unanswered=max(0, supervision.max_failed_probes - 2),
        update_wait_s=config.rollout.sibling_timeout_s if finishes_first else 0.0,
    )


class _Actors:
    """The worker processes, started and not yet attached to a data plane."""

    def __init__(self, config: RunConfig, directory: RunDirectory) -> None:
        # Their logical CPUs are not counted: Ray would not start more of them than there are cores, and most of them
        # wait most of the time.
        restarted = {"num_cpus": 0, "max_restarts": -1}
        limit_s = config.supervision.restart_timeout_s
        generating = {**restarted, **_generation_options(config.generation)}
        self.generation = [
            RevivedActor(
                f"generation-{number}",
                ray.remote(RolloutWorker).options(**generating).remote(config, directory),
                restart_timeout_s=limit_s,
            )
            for number in range(config.generation.num_workers)
        ]
        self.finalizer = RevivedActor(
            "finalizer",
            ray.remote(FinalizerWorker).options(**restarted).remote(config),
            restart_timeout_s=limit_s,
        )
        # A trainer that is restarted would go on from random weights: it is not.
        self.trainer = RevivedActor(
            "trainer",
            ray.remote(TrainerWorker).options(num_cpus=0).remote(config),
            restart_timeout_s=0,
        )


def _generation_options(settings: GenerationSettings) -> dict[str, Any]:
    options: dict[str, Any] = {"num_gpus": settings.num_gpus}
    interpreter = worker_interpreter(settings)
    if interpreter is not None:
        options["runtime_env"] = {"py_executable": interpreter}
    return options
