"""Checkpoints: a directory that restarts the run as of one place in the log, complete or absent.

Only what must agree happens inside the exclusive hold: the place in the log, and the data plane's own save. Everything
else follows outside of it. The directory is built under a temporary name, made durable file by file, and appears by one
rename.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from kinlog.controller.runtime import Runtime, clear_group_rows
from kinlog.lineage.log import scan_log
from kinlog.lineage.log_copy import copy_log
from kinlog.lineage.state import GroupPhase, GroupState, Projection, projection_digest
from kinlog.lineage.store import Store, write_durably
from kinlog.replay.checkpoints import MANIFEST_NAME, file_digest
from kinlog.replay.projection import SNAPSHOT_NAME, project, write_snapshot_bytes
from kinlog.schemas.config import dump_config
from kinlog.schemas.errors import CheckpointError, DataPlaneError, LogWriteError, WorkerLostError
from kinlog.schemas.events import CheckpointCommitted, CheckpointFailed, Position
from kinlog.schemas.manifest import FileEntry, Manifest
from kinlog.schemas.reasons import CheckpointKind, Partition, Reason
from kinlog.schemas.rows import inventory_digest

__all__ = ["Checkpointer", "DATA_PLANE_NAME", "TRAINER_NAME", "checkpoint_name"]

DATA_PLANE_NAME = "data_plane"
TRAINER_NAME = "trainer"
LOG_NAME = "log"
_TEMPORARY = ".incomplete"


def checkpoint_name(kind: CheckpointKind, train_step: int, number: int = 0) -> str:
    """Return a checkpoint's directory name."""
    if kind is CheckpointKind.TRAINER:
        return f"step_{train_step:06d}"
    return f"rollout_{train_step:06d}_{number:04d}"


class _Snapshot(msgspec.Struct, frozen=True):
    """What was fixed inside the exclusive hold."""

    position: Position
    train_step: int
    weight_version: int
    draw_cursor: int
    staging_rows: int
    staging_digest: str
    training_rows: int
    training_digest: str
    held_s: float


class Checkpointer:
    """Takes checkpoints of a running controller. One at a time: its caller is the train pump.

    Parameters
    ----------
    snapshot:
        A projection that this object may change: the starting point from which the next snapshot is folded, so that
        taking one never copies the live projection inside the hold.
    """

    def __init__(
        self,
        runtime: Runtime,
        store: Store,
        snapshot: Projection,
        *,
        run_id: str,
        log_id: str,
        version: str,
        on_saved: Callable[[str, float, float], None] = lambda name, seconds, held_s: None,
    ) -> None:
        self._runtime = runtime
        self._store = store
        self._shadow = snapshot
        self._run_id = run_id
        self._log_id = log_id
        self._version = version
        self._on_saved = on_saved

    async def save(self, kind: CheckpointKind) -> bool:
        """Take a checkpoint. A failure is recorded, and costs this checkpoint, not the run.

        Returns whether it was committed.
        """
        runtime = self._runtime
        started = time.perf_counter()
        name = checkpoint_name(kind, runtime.projection.train_step)
        temporary = runtime.directory.checkpoints / f"{_TEMPORARY}.{name}.{runtime.clock_us()}"
        try:
            async with asyncio.timeout(runtime.config.checkpointing.timeout_s * 2):
                snapshot = await self._write(temporary, kind)
                await asyncio.to_thread(self._commit_directory, temporary, name)
        except LogWriteError:
            raise
        except (DataPlaneError, CheckpointError, WorkerLostError, TimeoutError, OSError) as error:
            reason = Reason.TIMEOUT if isinstance(error, TimeoutError) else Reason.INFRASTRUCTURE_FAILURE
            detail = str(error)[:500] or "the save took too long"
            async with runtime.barrier.cut("checkpoint_failed") as cut:
                runtime.ledger.commit(cut, CheckpointFailed(name=name, reason=reason, detail=detail))
            await asyncio.to_thread(self._discard, [temporary])
            return False
        await self._record(kind, name, snapshot)
        self._on_saved(name, time.perf_counter() - started, snapshot.held_s)
        return True

    async def _write(self, temporary: Path, kind: CheckpointKind) -> _Snapshot:
        runtime = self._runtime
        self._store.make_directory(temporary)
        snapshot = await self._hold(temporary / DATA_PLANE_NAME)
        if kind is CheckpointKind.TRAINER:
            await runtime.trainer.save(temporary / TRAINER_NAME)
        await asyncio.to_thread(self._write_rest, temporary, kind, snapshot)
        return snapshot

    async def _hold(self, directory: Path) -> _Snapshot:
        """Fix the place in the log and save the data plane, with no cut open anywhere."""
        runtime = self._runtime
        async with runtime.barrier.exclusive("checkpoint"):
            entered = time.perf_counter()
            p = runtime.projection
            position = await runtime.ledger.position()
            facts = {"position_seq": position.seq, "train_step": p.train_step}
            await runtime.data_plane.save(directory, facts, timeout_s=runtime.config.checkpointing.timeout_s)
            staging = dict(await runtime.data_plane.list_rows(Partition.STAGING))
            training = dict(await runtime.data_plane.list_rows(Partition.TRAINING))
            return _Snapshot(
                position=position,
                train_step=p.train_step,
                weight_version=p.weight_version,
                draw_cursor=p.draw_cursor,
                staging_rows=len(staging),
                staging_digest=inventory_digest(staging).hex(),
                training_rows=len(training),
                training_digest=inventory_digest(training).hex(),
                held_s=time.perf_counter() - entered,
            )

    def _write_rest(self, temporary: Path, kind: CheckpointKind, snapshot: _Snapshot) -> None:
        """Write everything that follows from the place in the log. Runs in a thread."""
        runtime, store = self._runtime, self._store
        copy_log(store, runtime.directory.log, temporary / LOG_NAME, snapshot.position)
        copied = scan_log(temporary / LOG_NAME, store=store, marks=[snapshot.position])
        self._shadow = project(copied, self._shadow, through_seq=snapshot.position.seq)
        write_durably(store, temporary / SNAPSHOT_NAME, write_snapshot_bytes(self._shadow))
        write_durably(store, temporary / "config.yaml", dump_config(runtime.config).encode())
        dataloader = {"draw_cursor": snapshot.draw_cursor, "seed": runtime.config.seed}
        write_durably(store, temporary / "dataloader.json", msgspec.json.encode(dataloader))
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                file = store.open(path)  # what others wrote there is not durable yet
                try:
                    file.sync()
                finally:
                    file.close()
        manifest = Manifest(
            kind=kind,
            run_id=self._run_id,
            log_id=self._log_id,
            kinlog_version=self._version,
            created_us=runtime.clock_us(),
            position=snapshot.position,
            projection_digest=projection_digest(self._shadow).hex(),
            train_step=snapshot.train_step,
            weight_version=snapshot.weight_version,
            dataset_fingerprint=self._shadow.dataset_fingerprint,
            draw_cursor=snapshot.draw_cursor,
            num_storage_units=runtime.data_plane.num_storage_units,
            staging_rows=snapshot.staging_rows,
            staging_digest=snapshot.staging_digest,
            training_rows=snapshot.training_rows,
            training_digest=snapshot.training_digest,
            files=tuple(
                FileEntry(
                    path=path.relative_to(temporary).as_posix(),
                    size_bytes=path.stat().st_size,
                    blake2b=file_digest(path),
                )
                for path in sorted(temporary.rglob("*"))
                if path.is_file()
            ),
        )
        content = msgspec.json.format(msgspec.json.encode(manifest))
        write_durably(store, temporary / MANIFEST_NAME, content)
        for path in [*(p for p in temporary.rglob("*") if p.is_dir()), temporary]:
            store.sync_directory(path)

    def _commit_directory(self, temporary: Path, name: str) -> None:
        """Make the checkpoint appear. A directory of the same name is a past life's, and gives way."""
        checkpoints = self._runtime.directory.checkpoints
        target = checkpoints / name
        if self._store.exists(target):
            self._trash(target)
        self._store.rename(temporary, target)
        self._store.sync_directory(checkpoints)

    async def _record(self, kind: CheckpointKind, name: str, snapshot: _Snapshot) -> None:
        """Record the checkpoint, then let go of what it makes superfluous: old checkpoints, rows, forgotten groups."""
        runtime = self._runtime
        p = runtime.projection
        kept = [
            c
            for c in p.checkpoints
            if c.kind is CheckpointKind.TRAINER and c.train_step < snapshot.train_step
        ]
        kept = kept[-(runtime.config.checkpointing.keep - 1) :]
        frontier = min((c.train_step for c in kept), default=snapshot.train_step)
        if len(kept) < runtime.config.checkpointing.keep - 1:
            frontier = p.frontier_step  # the start of the run is still a place to go back to
        durable = _applied_up_to(p, snapshot.train_step) if kind is CheckpointKind.TRAINER else []
        async with runtime.barrier.cut("checkpoint_committed") as cut:
            event = CheckpointCommitted(
                name=name,
                checkpoint_kind=kind,
                train_step=snapshot.train_step,
                position=snapshot.position,
                frontier_step=max(frontier, p.frontier_step),
            )
            await runtime.ledger.commit(cut, event).durable()
            # Their step can no longer be undone by a crash: a restart begins at this checkpoint, or at an older one
            # that has these rows in its own copy of the data plane.
            await clear_group_rows(runtime, cut, durable, Reason.STEP_DURABLE)
        names = {c.name for c in runtime.projection.checkpoints}
        await asyncio.to_thread(self._prune, names)

    def _prune(self, keep: set[str]) -> None:
        checkpoints = self._runtime.directory.checkpoints
        self._discard(
            checkpoints / name
            for name in self._store.names(checkpoints)
            if name not in keep and not name.startswith(_TEMPORARY)
        )

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


def _applied_up_to(p: Projection, train_step: int) -> list[GroupState]:
    """Return the applied groups whose step a checkpoint at ``train_step`` newly makes durable."""
    durable_before = max(
        (c.train_step for c in p.checkpoints if c.kind is CheckpointKind.TRAINER), default=p.frontier_step
    )
    return [
        group
        for group in p.groups.values()
        if group.phase is GroupPhase.APPLIED and durable_before < (group.claimed_step or 0) <= train_step
    ]
