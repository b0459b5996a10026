"""Crash points of a run's directory: checkpoints, pruning and restarts, by the controller's own code on real files.

What the store does to the real directory is done to a disk that remembers too. Files that others write, the data plane and the
trainer, are noticed when the store is asked to make them durable: until then nothing is promised of them.
"""

import asyncio
import random
import shutil
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from kinlog_bench import Bench
from kinlog_builders import FreeCut, new_log, reopened
from kinlog_crash_disk import Disk, Image, Process
from kinlog_crash_states import CrashStates
from kinlog_fake_parts import FakeDataPlane
from kinlog_lives import run_config

from kinlog.controller.checkpoint import Checkpointer, SavedCheckpoint
from kinlog.controller.journal_keeping import JournalKeeper
from kinlog.lineage.journal import PROGRESS
from kinlog.lineage.log import OpenedLog
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.state import Projection
from kinlog.lineage.store import FileLock, LocalStore, StoredFile
from kinlog.replay.checkpoints import TEMPORARY_PREFIX, find_checkpoints
from kinlog.replay.recovery.restore import RestorePoint, restore_points, restored_event, verify_run
from kinlog.schemas.config import RunConfig
from kinlog.schemas.errors import LogWriteError, RunNotFoundError


class MirroredStore(LocalStore):
    """The local disk below ``root``, and the same on a disk in memory that remembers."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self._root = root
        self._local = LocalStore()
        self._disk = disk
        self._process = Process(disk)
        self._one_at_a_time = threading.RLock()

    def kill(self) -> None:
        """Let the process do nothing more."""
        with self._one_at_a_time:
            self._process.kill()

    def _noticed(self, path: Path) -> Path:
        """Return the path on the remembering disk, where everything above it that others made is now made as well."""
        mirrored = Path("/")
        real = self._root
        for part in path.relative_to(self._root).parts:
            real, mirrored = real / part, mirrored / part
            if self._disk.find(mirrored) is None and real.is_dir():
                self._disk.new_directory(self._disk.at(mirrored.parent), part)
            elif self._disk.find(mirrored) is None and real.exists():
                file = self._process.create(mirrored)
                file.write_at(0, real.read_bytes())
        self._process.on_disk()
        return mirrored

    def create(self, path: Path) -> StoredFile:
        with self._one_at_a_time:
            mirrored = self._noticed(path)
            return _MirroredFile(self, self._local.create(path), self._process.create(mirrored))

    def open(self, path: Path) -> StoredFile:
        with self._one_at_a_time:
            mirrored = self._noticed(path)
            return _MirroredFile(self, self._local.open(path), self._process.open(mirrored))

    def lock(self, path: Path) -> FileLock:
        with self._one_at_a_time:
            self._noticed(path)
            lock = self._local.lock(path)
            self._noticed(path)
            return lock

    def make_directory(self, path: Path) -> None:
        with self._one_at_a_time:
            self._process.make_directory(self._noticed(path))
            self._local.make_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        with self._one_at_a_time:
            self._process.rename(self._noticed(source), self._noticed(target))
            self._local.rename(source, target)

    def copy(self, source: Path, target: Path) -> None:
        with self._one_at_a_time:
            self._process.copy(self._noticed(source), self._noticed(target))
            self._local.copy(source, target)

    def link(self, source: Path, target: Path) -> None:
        with self._one_at_a_time:
            self._process.link(self._noticed(source), self._noticed(target))
            self._local.link(source, target)

    def remove(self, path: Path) -> None:
        with self._one_at_a_time:
            self._process.remove(self._noticed(path))
            self._local.remove(path)

    def remove_tree(self, path: Path) -> None:
        with self._one_at_a_time:
            self._process.remove_tree(self._noticed(path))
            self._local.remove_tree(path)

    def sync_directory(self, path: Path) -> None:
        with self._one_at_a_time:
            for child in path.iterdir():
                self._noticed(child)
            self._process.sync_directory(self._noticed(path))
            self._local.sync_directory(path)


class _MirroredFile:
    def __init__(self, store: MirroredStore, real: StoredFile, mirrored: StoredFile) -> None:
        self._store = store
        self._both = (mirrored, real)

    def write_at(self, offset_bytes: int, data: bytes | bytearray | memoryview) -> None:
        with self._store._one_at_a_time:
            for file in self._both:
                file.write_at(offset_bytes, data)

    def sync(self) -> None:
        with self._store._one_at_a_time:
            for file in self._both:
                file.sync()

    def truncate(self, size_bytes: int) -> None:
        with self._store._one_at_a_time:
            for file in self._both:
                file.truncate(size_bytes)

    def close(self) -> None:
        self._both[1].close()


class RunPromise(NamedTuple):
    """What holds from some point of a recorded run on."""

    durable_seq: int
    train_step: int
    """Of the newest checkpoint that was recorded as committed and was not gone back behind; 0 without one."""


@dataclass
class RecordedRun:
    """Lives of a controller that takes checkpoints, with a small data plane and trainer in the place of real ones."""

    root: Path
    config: RunConfig = field(default_factory=lambda: run_config(checkpointing__keep=2))

    def __post_init__(self) -> None:
        self.disk = Disk()
        self.directory = RunDirectory(self.root / "run")
        self.promises: list[tuple[int, RunPromise]] = [(0, RunPromise(0, 0))]

    def promise_now(self, promise: RunPromise) -> None:
        self.promises.append((len(self.disk.effects), promise))

    def promise_at(self, effects: int) -> RunPromise:
        return next(promise for since, promise in reversed(self.promises) if since <= effects)

    def start(self) -> "RecordedLife":
        store = MirroredStore(self.root, self.disk)
        opened = new_log(self.directory.log, settings=self.config.log, store=store)
        store.make_directory(self.directory.checkpoints)
        return RecordedLife(self, store, opened, Projection(), Projection())

    def resume(self, *, wanted: str | None = None) -> "RecordedLife":
        """Begin the next life where the last one ended, or from an explicit checkpoint."""
        store = MirroredStore(self.root, self.disk)
        point = next(restore_points(self.directory, verify_run(self.directory), wanted=wanted))
        opened = reopened(self.directory.log, settings=self.config.log, store=store)
        life = RecordedLife(self, store, opened, point.at_end, point.at_checkpoint)
        life.checkpointer.clear_leavings()
        # The log's end was decided by the opening; going back is, once this event is there.
        step = point.manifest.train_step if point.manifest is not None else 0
        self.promise_now(RunPromise(opened.scan.end.seq, step))
        life.commit_restored(point)
        return life


class RecordedLife:
    """One life of a recorded run."""

    def __init__(
        self, run: RecordedRun, store: MirroredStore, opened: OpenedLog, live: Projection, base: Projection
    ) -> None:
        self._run = run
        # What is shared between tasks belongs to one event loop.
        self._loop = asyncio.Runner()
        self.store = store
        self.opened = opened
        self.bench = Bench(run.config, writer=opened.writer, projection=live, data_plane=FakeDataPlane())
        self.runtime = replace(self.bench.runtime, directory=run.directory)
        self.checkpointer = Checkpointer(
            self.runtime,
            store,
            base,
            JournalKeeper(store, run.directory.journal, run.directory.trash),
            JournalKeeper(store, run.directory.progress, run.directory.trash, PROGRESS),
            run_id=opened.scan.run_id,
            log_id=opened.scan.log_id,
            version="test",
        )

    def commit_restored(self, point: RestorePoint) -> None:
        self.runtime.ledger.commit(FreeCut(), restored_event(point)).wait(20)

    def train(self) -> None:
        """Apply one step."""
        self.bench.story.train(self.bench.story.finalized(siblings=1))
        self._loop.run(self.runtime.ledger.position())

    def save(self) -> None:
        """Take a checkpoint, which is promised from then on."""
        saved = self._loop.run(self._saved())
        assert not saved.problem, saved.problem
        step = self.bench.p.train_step
        self._run.promise_now(RunPromise(self.opened.writer.acknowledged_seq, step))

    async def _saved(self) -> SavedCheckpoint:
        saved = await self.checkpointer.save()
        await self.checkpointer.close()  # the log is compacted beside everything else: wait for it
        return saved

    def close(self) -> None:
        self.opened.close()
        self._loop.close()

    def kill(self) -> None:
        self.store.kill()
        with suppress(LogWriteError):
            self.opened.close()
        self._loop.close()


class RunExplorer:
    """Tries the power failures of a recorded run, each in a real directory below ``scratch``."""

    def __init__(self, scratch: Path, *, states: int, go_on_every: int, seed: int = 0) -> None:
        self._scratch = scratch
        self._states = states
        self._go_on_every = go_on_every
        """After so many restores, the run is taken up again and takes a checkpoint."""
        self._chance = random.Random(seed)
        self.states = self.judged = self.restarted = self.operations = 0

    def __str__(self) -> str:
        return (
            f"{self.states} crash states of {self.operations} operations, {self.judged} restores, "
            f"{self.restarted} of them gone on from; committed and lost: 0"
        )

    def explore(self, run: RecordedRun) -> None:
        self.operations = len(run.disk.effects)
        crash = CrashStates(run.disk.start)
        judged = set()
        for done, effect in enumerate([None, *run.disk.effects]):
            if effect is not None:
                crash.follow(effect)
            promise = run.promise_at(done)
            for image in crash.images(self._states, self._chance):
                self.states += 1
                known = (image.key(closed=TEMPORARY_PREFIX), promise)
                if known not in judged:
                    judged.add(known)
                    self._judge(image, promise, run.config)

    def _judge(self, image: Image, promise: RunPromise, config: RunConfig) -> None:
        self.judged += 1
        root = self._scratch / "crashed"
        try:
            image.write_to(root)
            directory = RunDirectory(root / "run")
            try:
                scan = verify_run(directory)
            except RunNotFoundError:
                assert promise.durable_seq == 0
                return
            assert scan.end.seq >= promise.durable_seq
            found = {c.path.name: c for c in find_checkpoints(directory.checkpoints, log_id=scan.log_id)}
            for name, checkpoint in found.items():
                assert checkpoint.usable or name.startswith(TEMPORARY_PREFIX), checkpoint.problem
            point = next(restore_points(directory, scan))
            step = point.manifest.train_step if point.manifest is not None else 0
            assert step >= promise.train_step, (
                f"lost: checkpoint at {promise.train_step}, {step} is the newest"
            )
            if self.judged % self._go_on_every == 0:
                self.restarted += 1
                _go_on(root, config)
        finally:
            shutil.rmtree(root)


def _go_on(root: Path, config: RunConfig) -> None:
    """Take a run up again as a restart does, train a step and save it: it must be the newest then."""
    run = RecordedRun(root, config)
    life = run.resume()
    life.train()
    life.save()
    life.close()
    again = next(restore_points(run.directory, verify_run(run.directory)))
    assert again.manifest is not None
    assert again.manifest.train_step == life.bench.p.train_step
    assert not life.store.names(run.directory.trash), "what was pruned is still there"
