"""The single controller: puts a run together, fresh or restored, and runs its pumps until training is done."""

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version as package_version
from typing import TypeVar

from kinlog.controller.barrier import Barrier, BarrierCut
from kinlog.controller.changes import Changes
from kinlog.controller.checkpoint import Checkpointer, SavedCheckpoint
from kinlog.controller.group_driver import GroupDriver
from kinlog.controller.journal_keeping import JournalKeeper
from kinlog.controller.log_opening import begin_log, go_on_with_log
from kinlog.controller.metrics_run import RunMetrics
from kinlog.controller.overrides import refuse_unknown_overrides
from kinlog.controller.preemption import ask_to_stop, end_when_asked
from kinlog.controller.prompt_source import prompts_of
from kinlog.controller.protocols import DataPlane, Parts, Workers
from kinlog.controller.recovery import PhaseTimes, Restored, carry_out, restore_data_plane
from kinlog.controller.rollout_checkpoints import RolloutCheckpoints
from kinlog.controller.rollout_pump import RolloutPump
from kinlog.controller.run_status import RunStatus, status_of
from kinlog.controller.runtime import Runtime
from kinlog.controller.samplers import build_sampler
from kinlog.controller.supervise import probe_health, supervise, watch_progress
from kinlog.controller.train_pump import TrainPump
from kinlog.controller.worker_budget import WorkerBudget
from kinlog.lineage.journal import PROGRESS
from kinlog.lineage.ledger import Ledger
from kinlog.lineage.log import OpenedLog, lock_log
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.state import Projection
from kinlog.lineage.store import LocalStore, replace_durably
from kinlog.replay.recovery.report import RecoveryReport, build_report
from kinlog.replay.recovery.restore import restored_event, verify_run
from kinlog.schemas.config import RunConfig, config_digest, dump_config
from kinlog.schemas.errors import RunNotFoundError, StalledError
from kinlog.schemas.events import CheckpointCommitted, Event, RunOpened, WriterClosed, WriterOpened
from kinlog.schemas.orders import TrainMetrics

__all__ = ["SingleController"]

T = TypeVar("T")


class SingleController:
    """One life of a run. ``start`` or ``resume`` once, then ``run`` once, then ``close``.

    Parameters
    ----------
    config:
        The run's configuration.
    directory:
        Where it lives.
    parts:
        Makes data plane and workers.
    on_step, on_checkpoint:
        Told of each step, and of what each save of a checkpoint came to.

    Raises
    ------
    ConfigError, DatasetError
        The configuration does not fit the dataset, or the sampler cannot be made. Nothing was started.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        parts: Parts,
        *,
        on_step: Callable[[TrainMetrics], None] = lambda metrics: None,
        on_checkpoint: Callable[[SavedCheckpoint], None] = lambda saved: None,
    ) -> None:
        self._config = config
        self._directory = directory
        self._parts = parts
        self._on_step = on_step
        self._on_checkpoint = on_checkpoint
        self._store = LocalStore()
        self._version = package_version("kinlog")
        self._barrier = Barrier()
        self._changes = Changes()
        self._prompts = prompts_of(
            parts.dataset, seed=config.dataset.seed, max_epochs=config.dataset.max_epochs
        )
        refuse_unknown_overrides(config.rollout_recovery, parts.dataset)
        self._sampler = build_sampler(config.sampler, groups_per_step=config.trainer.groups_per_step)
        self._journal = JournalKeeper(self._store, directory.journal, directory.trash)
        self._progress = JournalKeeper(self._store, directory.progress, directory.trash, PROGRESS)
        self._opened: OpenedLog | None = None
        self._data_plane: DataPlane | None = None
        self._runtime: Runtime | None = None
        self._checkpointer: Checkpointer | None = None
        self._rollout_checkpoints: RolloutCheckpoints | None = None
        self.metrics = RunMetrics(config.metrics, directory)

    async def start(self) -> None:
        """Begin a new run.

        Raises
        ------
        RunExistsError
            The directory already holds one.
        ConfigError, MissingExtraError
            Metrics cannot be given out as configured.
        StalledError
            A phase of the start took too long.
        """
        self.metrics.open()
        # The log comes last: what fails before it leaves no run behind.
        self._data_plane = await self._start_data_plane()
        workers = await self._start_phase("attaching the workers", self._parts.start_workers())
        await self._start_phase("publishing the first weights", workers.trainer.publish(0))
        opened = begin_log(self._directory.log, self._config.log, version=self._version, store=self._store)
        self._opened = opened
        self._store.make_directory(self._directory.checkpoints)
        self._write_config()
        runtime = self._assemble(opened, workers, Projection(), Projection())
        async with self._barrier.exclusive("start") as cut:
            run_opened = RunOpened(
                run_id=opened.scan.run_id,
                kinlog_version=self._version,
                config_digest=config_digest(self._config),
                dataset_fingerprint=self._parts.dataset.fingerprint,
                seed=self._config.seed,
            )
            await runtime.ledger.commit(cut, run_opened, _writer_opened(), *opened.repaired).durable()

    async def _start_data_plane(self) -> DataPlane:
        return await self._start_phase("starting the data plane", self._parts.start_data_plane())

    async def _start_phase(self, phase: str, work: Awaitable[T]) -> T:
        """Wait for a part of the start, but not for ever: no watchdog runs yet."""
        limit_s = self._config.supervision.start_timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await work
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise StalledError(
                f"{phase} took longer than supervision.start_timeout_s ({limit_s:g} s). Nothing of the run was changed. "
                "Look at the logs of Ray and of the data plane, then try again."
            ) from error

    def _write_config(self) -> None:
        """Keep the configuration beside the log: ``kinlog plan`` makes its choices by it."""
        replace_durably(self._store, self._directory.config, dump_config(self._config).encode())
        self._store.sync_directory(self._directory.path)

    async def resume(
        self, *, checkpoint: str | None = None, discard_rollouts: bool = False
    ) -> RecoveryReport:
        """Go on from wherever the run died, and say what that meant.

        Parameters
        ----------
        checkpoint:
            An explicit checkpoint to go back to, or ``start``; by default the newest usable one.
        discard_rollouts:
            Keep every prompt, and have what was generated and not trained on generated again by the restored weights.

        Raises
        ------
        RunNotFoundError, RunLockedError, LogDamagedError, CheckpointError, RowsMissingError, ConfigError, DatasetError,
        MissingExtraError
            The run cannot be resumed. Nothing of it was changed.
        StalledError
            A phase of the restart took too long. Nothing of the run was changed.
        """
        self.metrics.open()
        times = PhaseTimes()
        if not self._directory.log.is_dir():
            raise RunNotFoundError(f"{self._directory.path} holds no run")
        lock = lock_log(self._directory.log, store=self._store)
        try:
            with times.phase("verify log"):
                scan = verify_run(self._directory)
            if scan.end.seq == 0:
                raise RunNotFoundError(
                    f"the run in {self._directory.path} was never begun: start it, do not resume it"
                )
            restored = await restore_data_plane(
                self._config,
                self._directory,
                scan,
                wanted=checkpoint,
                discard_rollouts=discard_rollouts,
                start_data_plane=self._start_data_plane,
                prompts=self._prompts,
                sampler=self._sampler,
                dataset_fingerprint=self._parts.dataset.fingerprint,
                times=times,
            )
            point = restored.point
            step_before = point.at_end.train_step
            self._data_plane = restored.data_plane
            with times.phase("start workers"):
                workers = await self._start_phase("attaching the workers", self._parts.start_workers())
                if point.trainer is not None:
                    load = workers.trainer.load(point.trainer)
                    await self._start_phase("loading the trainer", load)
                publish = workers.trainer.publish(restored.plan.weight_version)
                await self._start_phase("publishing the restored weights", publish)
        except BaseException:
            lock.release()
            raise
        # From here on the run is written to.
        self._opened = go_on_with_log(
            self._directory.log,
            self._config.log,
            version=self._version,
            store=self._store,
            lock=lock,
            scan=scan,
        )
        runtime = self._assemble(self._opened, workers, point.at_end, point.at_checkpoint)
        assert self._checkpointer is not None
        with times.phase("write plan"):
            await asyncio.to_thread(self._checkpointer.clear_leavings)
            if discard_rollouts:
                # Of unfinished ones, too: nothing may be gone on from.
                await asyncio.to_thread(self._progress.drop_all)
            self._write_config()
            async with self._barrier.exclusive("restore") as cut:
                await self._write_restart(runtime, cut, restored)
        # A run that is killed again and again, before it gets to a checkpoint, must not leave more files each time.
        self._checkpointer.compact()
        self.metrics.recovered(times.seconds)
        manifest = point.manifest
        return build_report(
            restored.plan,
            restored.rolled_back,
            executed=True,
            checkpoint_position=manifest.position if manifest is not None else None,
            skipped=point.skipped,
            log_end=scan.end,
            step_before=step_before,
            quarantined_bytes=sum(event.quarantined_bytes for event in self._opened.repaired),
            rows_put_back=restored.put_back.num_rows,
            resumed=restored.resumed,
            seconds=times.seconds,
        )

    async def _write_restart(self, runtime: Runtime, cut: BarrierCut, restored: Restored) -> None:
        assert self._opened is not None
        events: list[Event] = [_writer_opened(), *self._opened.repaired, restored_event(restored.point)]
        point, p = restored.point, runtime.projection
        if (
            point.path is not None
            and point.manifest is not None
            and point.name not in {c.name for c in p.checkpoints}
        ):
            # It was committed by a rename whose event a kill cut off, or restored alone: the log has yet to hear of it.
            unrecorded = CheckpointCommitted(
                name=point.path.name,
                checkpoint_kind=point.manifest.kind,
                train_step=point.manifest.train_step,
                position=point.manifest.position,
                frontier_step=p.frontier_step,
            )
            events.append(unrecorded)
        runtime.ledger.commit(cut, *events)
        await carry_out(runtime, cut, restored.plan)

    def _assemble(
        self, opened: OpenedLog, workers: Workers, projection: Projection, base: Projection
    ) -> Runtime:
        assert self._data_plane is not None
        runtime = Runtime(
            config=self._config,
            directory=self._directory,
            ledger=Ledger(
                projection, opened.writer, _clock_us, self._changes.notify, observe=self.metrics.observe
            ),
            barrier=self._barrier,
            changes=self._changes,
            budget=WorkerBudget(self._config.rollout.max_inflight_siblings),
            prompts=self._prompts,
            sampler=self._sampler,
            data_plane=self._data_plane,
            pool=workers.pool,
            finalizer=workers.finalizer,
            trainer=workers.trainer,
            clock_us=_clock_us,
        )
        self._runtime = runtime
        self.metrics.attach(runtime, run_id=opened.scan.run_id, version=self._version)
        self._checkpointer = Checkpointer(
            runtime,
            self._store,
            base,
            self._journal,
            self._progress,
            run_id=opened.scan.run_id,
            log_id=opened.scan.log_id,
            version=self._version,
            on_saved=self._on_checkpoint,
        )
        self._rollout_checkpoints = RolloutCheckpoints(runtime, self._checkpointer)
        return runtime

    async def run(self) -> None:
        """Train to the end. Raises the first failure of the tasks that it consists of, in a fixed order.

        Raises
        ------
        PreemptedError
            It was told to stop (:meth:`preempt`), and has come to rest: close it cleanly.
        """
        assert self._runtime is not None, "start() or resume() comes first"
        assert self._checkpointer is not None
        assert self._rollout_checkpoints is not None
        runtime, settings = self._runtime, self._config.supervision
        driver = GroupDriver(runtime)
        health = probe_health(
            [
                ("data plane", runtime.data_plane.ping),
                ("generation workers", runtime.pool.probe),
                ("finalizer", runtime.finalizer.probe),
                ("trainer", runtime.trainer.probe),
            ],
            interval_s=settings.probe_interval_s,
            timeout_s=settings.probe_timeout_s,
            max_failed=settings.max_failed_probes,
            sleep=runtime.sleep,
        )
        preemption = end_when_asked(runtime, self._checkpointer, grace_s=settings.preemption_grace_s)
        given_out = [("metrics", self.metrics.run())] if self.metrics.enabled else []
        try:
            await supervise(
                [
                    ("preemption", preemption),
                    ("health probe", health),
                    ("watchdog", watch_progress(runtime, stall_timeout_s=settings.stall_timeout_s)),
                    ("rollout", RolloutPump(runtime, driver).run()),
                    ("train", TrainPump(runtime, self._checkpointer, self._stepped).run()),
                    ("rollout checkpoints", self._rollout_checkpoints.run()),
                    *given_out,
                ],
                until="train",
            )
        finally:
            self._rollout_checkpoints.close()
            await driver.close()
            await self._checkpointer.close()

    def _stepped(self, metrics: TrainMetrics) -> None:
        self.metrics.stepped(metrics)
        self._on_step(metrics)

    async def checkpoint(self) -> SavedCheckpoint:
        """Take a rollout checkpoint as soon as possible, and return what it came to.

        Raises
        ------
        CheckpointError
            The run has ended, or ends, or takes no checkpoints.
        """
        assert self._rollout_checkpoints is not None, "start() or resume() comes first"
        return await self._rollout_checkpoints.take()

    def preempt(self) -> None:
        """Tell the run to stop within ``supervision.preemption_grace_s``: nothing new is begun from now on."""
        assert self._runtime is not None, "start() or resume() comes first"
        ask_to_stop(self._runtime)

    def status(self) -> RunStatus:
        """Return a glance at the run."""
        assert self._runtime is not None, "start() or resume() comes first"
        return status_of(self._runtime, self.metrics)

    async def close(self, *, cleanly: bool) -> None:
        """Close log and data plane. ``cleanly``: the run ended, and the log says so."""
        try:
            if self._checkpointer is not None:
                await self._checkpointer.close()
            if self._opened is not None:
                if cleanly and self._runtime is not None:
                    async with self._barrier.exclusive("close") as cut:
                        self._runtime.ledger.commit(cut, WriterClosed())
                await asyncio.to_thread(self._opened.close)
        finally:
            await asyncio.to_thread(self.metrics.close)
            if self._data_plane is not None:
                await self._data_plane.close()


def _writer_opened() -> WriterOpened:
    return WriterOpened(host=socket.gethostname(), pid=os.getpid())


def _clock_us() -> int:
    return time.time_ns() // 1000
