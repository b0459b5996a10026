"""Starting a run from the command line: checks first, then Ray, then the controller actor, then watching it."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from kinlog.controller.checkpoint import SavedCheckpoint
from kinlog.controller.metrics_run import refuse_missing_extra
from kinlog.controller.overrides import refuse_unknown_overrides
from kinlog.controller.progress import checkpoint_line, step_line
from kinlog.controller.progress_output import ProgressOutput
from kinlog.controller.run_status import RunStatus
from kinlog.controller.samplers import build_sampler
from kinlog.controller.single_controller import SingleController
from kinlog.controller.stop_signals import StopSignals
from kinlog.controller.watching import News, watch
from kinlog.controller.worker_interpreter import worker_interpreter
from kinlog.lineage.log import lock_log
from kinlog.lineage.run_directory import RunDirectory
from kinlog.replay.checkpoints import MANIFEST_NAME
from kinlog.replay.recovery.report import RecoveryReport
from kinlog.replay.recovery.restore import verify_run
from kinlog.schemas.config import RunConfig, load_config
from kinlog.schemas.errors import (
    CheckpointError,
    ConfigError,
    RunExistsError,
    RunNotFoundError,
)
from kinlog.schemas.orders import TrainMetrics
from kinlog.workers.agents import open_dataset
from kinlog.workers.tq_native import TQ_ENVIRONMENT
from kinlog.workers.tq_session import required_cpus

__all__ = ["train", "ControllerActor"]

_OBJECT_STORE_BYTES = 256 * 1024 * 1024


class ControllerActor:
    """The controller's process: a Ray actor that owns the data plane and the log."""

    def __init__(self, config: RunConfig, directory: Path) -> None:
        # Here and not at the top: the process that starts the run imports this module too, and has no use for torch.
        from kinlog.controller.ray_parts import RayParts

        self._news: list[News] = []
        self._controller = SingleController(
            config,
            RunDirectory(directory),
            RayParts(config, RunDirectory(directory)),
            on_step=self._on_step,
            on_checkpoint=self._on_checkpoint,
        )

    async def start(self) -> None:
        await self._controller.start()
        self._say_where_metrics_are()

    async def resume(self, checkpoint: str | None, discard_rollouts: bool) -> RecoveryReport:
        report = await self._controller.resume(checkpoint=checkpoint, discard_rollouts=discard_rollouts)
        self._say_where_metrics_are()
        return report

    async def run(self) -> None:
        await self._controller.run()

    async def preempt(self) -> None:
        self._controller.preempt()

    async def checkpoint(self) -> None:
        await self._controller.checkpoint()

    async def news(self) -> tuple[list[News], RunStatus]:
        """Return what happened since the last call, line by line, and a glance at the run."""
        news, self._news = self._news, []
        return news, self._controller.status()

    async def close(self, *, cleanly: bool) -> None:
        await self._controller.close(cleanly=cleanly)

    def _on_step(self, metrics: TrainMetrics) -> None:
        self._news.append(News(step_line(metrics, self._controller.status())))

    def _on_checkpoint(self, saved: SavedCheckpoint) -> None:
        self._news.append(News(checkpoint_line(saved), is_problem=bool(saved.problem)))

    def _say_where_metrics_are(self) -> None:
        address = self._controller.metrics.address
        if address is not None:
            self._news.append(News(f"metrics are served at {address}"))


def train(
    config_path: Path,
    *,
    resume: bool,
    run_dir: Path | None = None,
    checkpoint: str | None = None,
    discard_rollouts: bool = False,
    engine: str | None = None,
    quiet: bool = False,
) -> int:
    """Start a run, or resume it, and watch it to its end. Prints progress. Returns the exit code.

    Parameters
    ----------
    config_path:
        The YAML configuration.
    resume:
        Go on from wherever the run died.
    run_dir:
        Where the run lives; by default the configuration's ``run_dir``.
    checkpoint:
        With ``resume``: an explicit checkpoint to go back to, or ``start``.
    discard_rollouts:
        With ``resume``: keep every prompt, and have what was generated and not trained on generated again.
    engine:
        What generates, instead of the configuration's ``generation.engine``.
    quiet:
        Print only what goes wrong, and what a restart came to.

    Raises
    ------
    PreemptedError
        SIGTERM or Ctrl-C came. After the first one what is under way may finish for a while; the second ends it at once.
    KinlogError
        The run cannot be started, or failed.
    """
    config = load_config(config_path, engine=engine)
    refuse_missing_extra(config.metrics)
    # What is wrong with dataset, agents or sampler is said before anything is started.
    directory = RunDirectory((run_dir or Path(config.run_dir)).resolve())
    refuse_unknown_overrides(config.rollout_recovery, open_dataset(config))
    build_sampler(config.sampler, groups_per_step=config.trainer.groups_per_step)
    worker_interpreter(config.generation)
    if resume and not config.rollout_recovery.enabled:
        raise ConfigError(f"{config_path}: rollout_recovery.enabled is false, so the run cannot be resumed")
    output = ProgressOutput(quiet=quiet)
    _check_run(directory, output, resume=resume)
    with output, _ray_cluster(config, output):
        actor: Any = (
            ray.remote(ControllerActor).options(num_cpus=0, max_concurrency=64).remote(config, directory.path)
        )
        signals = StopSignals()
        with signals.heeded():  # within the cluster: Ray sets handlers of its own when it starts
            begin = actor.resume.remote(checkpoint, discard_rollouts) if resume else actor.start.remote()
            return watch(actor, begin, signals, output)


def _check_run(directory: RunDirectory, output: ProgressOutput, *, resume: bool) -> None:
    """Refuse in seconds what would be refused in the end: a cluster takes a while to build."""
    if (directory.path / MANIFEST_NAME).exists():
        raise CheckpointError(
            f"{directory.path} is a checkpoint, not a run. Make a run of it first: "
            f"kinlog restore {directory.path} RUN_DIR"
        )
    if directory.log.is_dir():
        lock_log(directory.log).release()
    try:
        scan = verify_run(directory)
    except RunNotFoundError:
        if resume:
            raise
        return
    begun = scan.end.seq > 0
    if resume and not begun:
        raise RunNotFoundError(f"the run in {directory.path} was never begun: start it without --resume")
    if not resume and not begun:
        return
    if not resume:
        raise RunExistsError(
            f"{directory.path} already holds a run. Go on with it (--resume), or choose another directory (--run-dir)."
        )
    output.say(f"run {scan.run_id} in {directory.path}: log verified up to seq {scan.end.seq}")


@contextmanager
def _ray_cluster(config: RunConfig, output: ProgressOutput) -> Iterator[None]:
    began = time.perf_counter()
    ray.init(
        address="local",  # one of its own, whatever RAY_ADDRESS or a running one would have it join
        num_cpus=required_cpus(config.data_plane) + 1,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        runtime_env={"env_vars": dict(TQ_ENVIRONMENT)},
    )
    output.say(f"Ray started in {time.perf_counter() - began:.1f} s")
    try:
        yield
    finally:
        ray.shutdown()
