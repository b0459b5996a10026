"""Checkpoints: a directory that restarts the run as of one place in the log, complete or absent.

Only what must agree happens inside the exclusive hold: the place in the log, and the data plane's own save. Everything
else follows outside of it. The directory is built under a temporary name, made durable file by file, and appears by one
rename.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from kinlog.controller.journal_keeping import JournalKeeper
from kinlog.controller.retention import newly_durable, retain
from kinlog.controller.runtime import Runtime, clear_group_rows
from kinlog.lineage.compaction import compact_log
from kinlog.lineage.fold import FOLD_VERSION
from kinlog.lineage.log_copy import copy_log
from kinlog.lineage.scan import scan_log
from kinlog.lineage.state import Projection, projection_digest
from kinlog.lineage.store import Store, write_durably
from kinlog.replay.checkpoints import (
    LOG_NAME,
    MANIFEST_NAME,
    TEMPORARY_PREFIX,
    file_digest,
    find_checkpoints,
    read_manifest,
)
from kinlog.replay.inventory import expected_inventory
from kinlog.replay.journal import needed_attempts
from kinlog.replay.projection import SNAPSHOT_NAME, project, write_snapshot_bytes
from kinlog.schemas.config import dump_config
from kinlog.schemas.errors import CheckpointError, KinlogError, LogWriteError
from kinlog.schemas.events import CheckpointCommitted, CheckpointFailed, Position
from kinlog.schemas.manifest import FileEntry, Manifest
from kinlog.schemas.reasons import CheckpointKind, Reason
from kinlog.schemas.rows import inventory_digest

__all__ = [
    "CONFIG_NAME",
    "Checkpointer",
    "SavedCheckpoint",
    "DATA_PLANE_NAME",
    "TRAINER_NAME",
    "checkpoint_name",
]

_logger = logging.getLogger(__name__)

DATA_PLANE_NAME = "data_plane"
TRAINER_NAME = "trainer"
CONFIG_NAME = "config.yaml"


def checkpoint_name(train_step: int) -> str:
    """Return the directory name of the trainer checkpoint at a step."""
    return f"step_{train_step:06d}"


class SavedCheckpoint(msgspec.Struct, frozen=True):
    """What a save came to, for those who show progress."""

    name: str
    seconds: float
    held_s: float
    """How long no cut was open anywhere."""
    problem: str = ""
    """Why there is no checkpoint; empty when there is."""


class _HeldFacts(msgspec.Struct, frozen=True):
    """What was fixed inside the exclusive hold."""

    position: Position
    train_step: int
    weight_version: int
    draw_cursor: int
    held_s: float


class Checkpointer:
    """Takes checkpoints of a running controller, one at a time.

    Parameters
    ----------
    base:
        A projection at or before the log's present end, which this object may change: the next snapshot is folded from
        it, so that taking one never copies the live projection inside the hold.
    journal:
        The run's row journal: what a checkpoint makes durable elsewhere is let go of there.
    """

    def __init__(
        self,
        runtime: Runtime,
        store: Store,
        base: Projection,
        journal: JournalKeeper,
        *,
        run_id: str,
        log_id: str,
        version: str,
        on_saved: Callable[[SavedCheckpoint], None] = lambda saved: None,
    ) -> None:
        self._runtime = runtime
        self._store = store
        self._base: Projection | None = base
        self._journal = journal
        self._run_id = run_id
        self._log_id = log_id
        self._version = version
        self._on_saved = on_saved
        self._building: asyncio.Task[_HeldFacts] | None = None
        self._given_up: set[Path] = set()
        self.last_seconds: float | None = None
        """How long the last checkpoint that came to something took."""
        self._compacting: asyncio.Task[None] | None = None
        self._digests: dict[tuple[int, int, int], str] = {}
        """Digests of the last checkpoint's files by inode, size and time: most of the next one's log are the same files."""

    async def save(self) -> SavedCheckpoint:
        """Take a trainer checkpoint. A failure is recorded, and costs this checkpoint, not the run.

        Raises
        ------
        LogWriteError
            The log failed: the run must stop.
        """
        runtime = self._runtime
        started = time.perf_counter()
        name = checkpoint_name(runtime.projection.train_step)
        temporary = runtime.directory.checkpoints / f"{TEMPORARY_PREFIX}{name}.{runtime.clock_us()}"
        held_s = 0.0
        try:
            facts = await self._build_in_time(temporary, name)
        except LogWriteError:
            raise
        except (KinlogError, OSError) as error:
            problem = await self._record_failure(name, error)
        else:
            problem, held_s = "", facts.held_s
            await self._record(name, facts)
        saved = SavedCheckpoint(name, time.perf_counter() - started, held_s, problem)
        if not problem:
            self.last_seconds = saved.seconds
        self._on_saved(saved)
        return saved

    async def close(self) -> None:
        """Give what a save that was given up is still doing a while to end, and let go of it."""
        if self._building is not None and not self._building.done():
            await asyncio.wait({self._building}, timeout=self._runtime.config.checkpointing.timeout_s)
            self._building.cancel()
        await self._until_compacted()

    def compact(self, drop_through_seq: int = 0) -> None:
        """Begin to compact the log, beside everything else.

        Parameters
        ----------
        drop_through_seq:
            What is behind everything that can still be gone back to: dropped, where the policy says so.
        """
        self._compacting = asyncio.create_task(asyncio.to_thread(self._compact_log, drop_through_seq))

    def _compact_log(self, drop_through_seq: int) -> None:
        """Compact what can be compacted. A failure costs space, and is tried again after the next checkpoint."""
        runtime = self._runtime
        found = find_checkpoints(runtime.directory.checkpoints, log_id=self._log_id, verify=False)
        try:
            compact_log(
                self._store,
                runtime.directory.log,
                epoch=runtime.ledger.writer.epoch,
                checkpoints=[f.manifest.position for f in found if f.manifest is not None and f.usable],
                drop_through_seq=drop_through_seq if runtime.config.log.history == "drop" else 0,
                project=lambda scan, through_seq: project(scan, through_seq=through_seq),
            )
        except (KinlogError, OSError) as error:
            _logger.warning("the log could not be compacted: %s", error)

    async def _until_compacted(self) -> None:
        if self._compacting is not None:
            await asyncio.wait({self._compacting})

    async def _build_in_time(self, temporary: Path, name: str) -> _HeldFacts:
        """Build and commit the directory, or give up. Threads cannot be stopped: what was given up runs out by itself,
        cleans up after itself, and holds up the next save until then."""
        if self._building is not None and not self._building.done():
            raise CheckpointError("an earlier save, which was given up, is still running")
        limit_s = self._runtime.config.checkpointing.timeout_s
        self._building = asyncio.create_task(self._build(temporary, name))
        try:
            # The data plane has a time-out of its own, of the same length: the hold is bounded by that.
            done, _ = await asyncio.wait({self._building}, timeout=2 * limit_s)
        except asyncio.CancelledError:
            self._building.cancel()
            raise
        if not done:
            self._given_up.add(temporary)
            raise CheckpointError(f"the save took longer than {2 * limit_s:g} s")
        return self._building.result()

    async def _build(self, temporary: Path, name: str) -> _HeldFacts:
        try:
            # The log is copied further down, file by file: none of them may be replaced meanwhile.
            await self._until_compacted()
            self._store.make_directory(temporary)
            self._stop_if_given_up(temporary)
            facts = await self._hold(temporary / DATA_PLANE_NAME)
            await self._runtime.trainer.save(temporary / TRAINER_NAME)
            await asyncio.to_thread(self._write_rest, temporary, facts)
            self._stop_if_given_up(temporary)
            await asyncio.to_thread(self._commit_directory, temporary, name)
            return facts
        except BaseException:
            await asyncio.to_thread(self._discard, [temporary])
            raise
        finally:
            self._given_up.discard(temporary)

    def _stop_if_given_up(self, temporary: Path) -> None:
        if temporary in self._given_up:
            raise CheckpointError("the save was given up")

    async def _hold(self, directory: Path) -> _HeldFacts:
        """Fix the place in the log and save the data plane, with no cut open anywhere."""
        runtime = self._runtime
        async with runtime.barrier.exclusive("checkpoint"):
            entered = time.perf_counter()
            p = runtime.projection
            position = await runtime.ledger.position()
            facts = {"position_seq": position.seq, "train_step": p.train_step}
            await runtime.data_plane.save(directory, facts, timeout_s=runtime.config.checkpointing.timeout_s)
            return _HeldFacts(
                position, p.train_step, p.weight_version, p.draw_cursor, time.perf_counter() - entered
            )

    def _write_rest(self, temporary: Path, facts: _HeldFacts) -> None:
        """Write everything that follows from the place in the log. Runs in a thread."""
        runtime, store = self._runtime, self._store
        copy_log(store, runtime.directory.log, temporary / LOG_NAME, facts.position)
        copied = scan_log(temporary / LOG_NAME, store=store, marks=[facts.position])
        # If folding fails half-way the base is spoilt: the next save folds from the beginning.
        base, self._base = self._base, None
        projection = project(copied, base, through_seq=facts.position.seq)
        self._base = projection
        write_durably(store, temporary / SNAPSHOT_NAME, write_snapshot_bytes(projection))
        write_durably(store, temporary / CONFIG_NAME, dump_config(runtime.config).encode())
        dataloader = {"draw_cursor": facts.draw_cursor, "seed": runtime.config.dataset.seed}
        write_durably(store, temporary / "dataloader.json", msgspec.json.encode(dataloader))
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        for path in files:
            file = store.open(path)  # what others wrote there is not durable yet
            try:
                file.sync()
            finally:
                file.close()
        promised = expected_inventory(projection)
        manifest = Manifest(
            kind=CheckpointKind.TRAINER,
            run_id=self._run_id,
            log_id=self._log_id,
            kinlog_version=self._version,
            created_us=runtime.clock_us(),
            position=facts.position,
            projection_digest=projection_digest(projection).hex(),
            fold_version=FOLD_VERSION,
            train_step=facts.train_step,
            weight_version=facts.weight_version,
            dataset_fingerprint=projection.dataset_fingerprint,
            draw_cursor=facts.draw_cursor,
            num_storage_units=runtime.data_plane.num_storage_units,
            staging_rows=len(promised.staging),
            staging_digest=inventory_digest(promised.staging).hex(),
            training_rows=len(promised.training),
            training_digest=inventory_digest(promised.training).hex(),
            files=self._file_entries(temporary, files),
        )
        content = msgspec.json.format(msgspec.json.encode(manifest))
        write_durably(store, temporary / MANIFEST_NAME, content)
        for path in [*(p for p in temporary.rglob("*") if p.is_dir()), temporary]:
            store.sync_directory(path)

    def _file_entries(self, temporary: Path, files: Iterable[Path]) -> tuple[FileEntry, ...]:
        entries, digests = [], {}
        for path in files:
            status = path.stat()
            key = (status.st_ino, status.st_size, status.st_mtime_ns)
            # A file that the log shares with its copy does not change any more.
            shared = status.st_nlink > 1 and path.parent.name == LOG_NAME
            digest = (self._digests.get(key) if shared else None) or file_digest(path)
            if shared:
                digests[key] = digest
            name = path.relative_to(temporary).as_posix()
            entries.append(FileEntry(path=name, size_bytes=status.st_size, blake2b=digest))
        self._digests = digests
        return tuple(entries)

    def _commit_directory(self, temporary: Path, name: str) -> None:
        """Make the checkpoint appear. A directory of the same name is a past life's, and gives way."""
        checkpoints = self._runtime.directory.checkpoints
        target = checkpoints / name
        if self._store.exists(target):
            self._trash(target)
        self._store.rename(temporary, target)
        self._store.sync_directory(checkpoints)

    async def _record(self, name: str, facts: _HeldFacts) -> None:
        """Record the checkpoint, then let go of what it makes superfluous: rows, forgotten groups, old checkpoints."""
        runtime = self._runtime
        p = runtime.projection
        keep = runtime.config.checkpointing.keep
        present = frozenset(self._store.names(runtime.directory.checkpoints))
        kept = retain(p, name=name, train_step=facts.train_step, keep=keep, present=present)
        durable = newly_durable(p, facts.train_step)
        async with runtime.barrier.cut("checkpoint_committed") as cut:
            event = CheckpointCommitted(
                name=name,
                checkpoint_kind=CheckpointKind.TRAINER,
                train_step=facts.train_step,
                position=facts.position,
                frontier_step=kept.frontier_step,
            )
            await runtime.ledger.commit(cut, event).durable()
            # Their step can no longer be undone by a crash: a restart begins at this checkpoint, or at an older one
            # that has these rows in its own copy of the data plane.
            await clear_group_rows(runtime, cut, durable, Reason.STEP_DURABLE)
        try:
            await asyncio.to_thread(self._prune, kept.names)
            await asyncio.to_thread(self._journal.drop_unneeded, needed_attempts(p, kept.behind_seq))
        except OSError as error:
            _logger.warning("what a checkpoint makes superfluous could not all be removed: %s", error)
        self.compact(kept.behind_seq)

    async def _record_failure(self, name: str, error: Exception) -> str:
        problem = f"{type(error).__name__}: {error}"
        async with self._runtime.barrier.cut("checkpoint_failed") as cut:
            event = CheckpointFailed(name=name, reason=Reason.INFRASTRUCTURE_FAILURE, detail=problem[:500])
            self._runtime.ledger.commit(cut, event)
        return problem

    def clear_leavings(self) -> None:
        """Remove what earlier lives left half-written or half-removed."""
        checkpoints, trash = self._runtime.directory.checkpoints, self._runtime.directory.trash
        names = [name for name in self._store.names(checkpoints) if name.startswith(TEMPORARY_PREFIX)]
        self._discard(checkpoints / name for name in names)
        for name in self._store.names(trash):
            self._store.remove_tree(trash / name)

    def _prune(self, keep: frozenset[str]) -> None:
        """Remove this log's checkpoints that are not kept. What is no checkpoint of this log is somebody else's."""
        for name in self._store.names(self._runtime.directory.checkpoints):
            path = self._runtime.directory.checkpoints / name
            if name in keep or name.startswith(TEMPORARY_PREFIX):
                continue
            try:
                ours = read_manifest(path).log_id == self._log_id
            except CheckpointError:
                continue
            if ours:
                self._discard([path])

    def _discard(self, paths: Iterable[Path]) -> None:
        for path in list(paths):
            if self._store.exists(path):
                self._trash(path)

    def _trash(self, path: Path) -> None:
        """Rename away first, then remove: a half-removed directory never has a checkpoint's name."""
        trash = self._runtime.directory.trash
        self._store.make_directory(trash)
        grave = trash / f"{path.name}.{self._runtime.clock_us()}"
        self._store.rename(path, grave)
        self._store.sync_directory(path.parent)
        self._store.remove_tree(grave)
