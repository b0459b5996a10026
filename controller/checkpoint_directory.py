"""The directory of a checkpoint: filled under a temporary name, made durable file by file, and committed by one rename.
What is removed goes by way of trash."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from kinlog.controller.journal_keeping import JournalKeeper
from kinlog.controller.runtime import Runtime
from kinlog.lineage.fold import FOLD_VERSION
from kinlog.lineage.log_copy import copy_log
from kinlog.lineage.scan import scan_log
from kinlog.lineage.state import Projection, projection_digest
from kinlog.lineage.store import Store, write_durably
from kinlog.replay.checkpoints import (
    JOURNAL_NAME,
    LOG_NAME,
    MANIFEST_NAME,
    TEMPORARY_PREFIX,
    file_digest,
    read_manifest,
)
from kinlog.replay.projection import SNAPSHOT_NAME, project, write_snapshot_bytes
from kinlog.replay.recovery.inventory import expected_inventory
from kinlog.replay.recovery.journal import journalled_attempts
from kinlog.schemas.config import dump_config
from kinlog.schemas.errors import CheckpointError
from kinlog.schemas.events import Position
from kinlog.schemas.manifest import FileEntry, Manifest
from kinlog.schemas.reasons import CheckpointKind
from kinlog.schemas.rows import inventory_digest

__all__ = [
    "CONFIG_NAME",
    "Anchorage",
    "CheckpointDirectories",
    "HeldFacts",
    "JournalLacksRowsError",
    "Target",
]

CONFIG_NAME = "config.yaml"


class JournalLacksRowsError(CheckpointError):
    """The row journal does not have every row that a rollout checkpoint takes from it: an earlier life kept none, or it
    is damaged. Save the data plane itself."""


class Anchorage(msgspec.Struct, frozen=True):
    """What a rollout checkpoint says of the trainer checkpoint that it goes with, or of the start of the run."""

    name: str | None = None
    position: Position | None = None
    train_step: int = 0
    weight_version: int = 0

    @property
    def seq(self) -> int:
        return self.position.seq if self.position is not None else 0


class Target(msgspec.Struct, frozen=True):
    """The checkpoint that is to be."""

    name: str
    anchorage: Anchorage | None = None
    """``None`` for a trainer checkpoint."""

    @property
    def kind(self) -> CheckpointKind:
        return CheckpointKind.TRAINER if self.anchorage is None else CheckpointKind.ROLLOUT


class HeldFacts(msgspec.Struct, frozen=True):
    """What was fixed inside the exclusive hold."""

    position: Position
    train_step: int
    weight_version: int
    draw_cursor: int
    held_s: float


class CheckpointDirectories:
    """Writes and removes a run's checkpoint directories. All of it blocks on the disk: it is for a thread.

    Parameters
    ----------
    base:
        A projection at or before the log's present end, which this object may change: the next snapshot is folded from
        it, so that taking one never copies the live projection inside the hold.
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
    ) -> None:
        self._runtime = runtime
        self._store = store
        self._base: Projection | None = base
        self._journal = journal
        self._run_id = run_id
        self._log_id = log_id
        self._version = version
        self._digests: dict[tuple[int, int, int], str] = {}
        """Digests of the last checkpoint's files by inode, size and time: most of the next one's log are the same files."""

    def temporary(self, name: str) -> Path:
        """Return the path that a checkpoint is filled under."""
        return self._runtime.directory.checkpoints / f"{TEMPORARY_PREFIX}{name}.{self._runtime.clock_us()}"

    def fill(self, temporary: Path, target: Target, facts: HeldFacts, *, by_journal: bool) -> None:
        """Write everything that follows from the place in the log, and make the whole directory durable.

        Parameters
        ----------
        by_journal:
            Take the promised rows from the row journal: the data plane is not in the directory.

        Raises
        ------
        JournalLacksRowsError
            They are not all there.
        """
        runtime, store = self._runtime, self._store
        copy_log(store, runtime.directory.log, temporary / LOG_NAME, facts.position)
        copied = scan_log(temporary / LOG_NAME, store=store, marks=[facts.position])
        # If folding fails half-way the base is spoilt: the next save folds from the beginning.
        base, self._base = self._base, None
        projection = project(copied, base, through_seq=facts.position.seq)
        self._base = projection
        if by_journal:
            self._copy_journal(temporary / JOURNAL_NAME, target, projection)
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
        manifest = self._manifest(temporary, target, facts, projection, files, by_journal=by_journal)
        content = msgspec.json.format(msgspec.json.encode(manifest))
        write_durably(store, temporary / MANIFEST_NAME, content)
        for path in [*(p for p in temporary.rglob("*") if p.is_dir()), temporary]:
            store.sync_directory(path)

    def commit(self, temporary: Path, name: str) -> None:
        """Make the checkpoint appear. A directory of the same name is a past life's, and gives way."""
        checkpoints = self._runtime.directory.checkpoints
        target = checkpoints / name
        if self._store.exists(target):
            self._trash(target)
        self._store.rename(temporary, target)
        self._store.sync_directory(checkpoints)

    def names(self) -> frozenset[str]:
        """Return what is in the directory of checkpoints."""
        return frozenset(self._store.names(self._runtime.directory.checkpoints))

    def clear_leavings(self) -> None:
        """Remove what earlier lives left half-written or half-removed."""
        trash = self._runtime.directory.trash
        self.discard(name for name in self.names() if name.startswith(TEMPORARY_PREFIX))
        for name in self._store.names(trash):
            self._store.remove_tree(trash / name)

    def prune(self, names: Iterable[str]) -> None:
        """Remove those of these checkpoints that are this log's. What is no checkpoint of this log is somebody else's."""
        for name in sorted(names):
            if name.startswith(TEMPORARY_PREFIX):
                continue
            try:
                ours = read_manifest(self._runtime.directory.checkpoints / name).log_id == self._log_id
            except CheckpointError:
                continue
            if ours:
                self.discard([name])

    def discard(self, names: Iterable[str]) -> None:
        """Remove directories, if they are there."""
        for name in list(names):
            path = self._runtime.directory.checkpoints / name
            if self._store.exists(path):
                self._trash(path)

    def _copy_journal(self, journal: Path, target: Target, projection: Projection) -> None:
        assert target.anchorage is not None
        needed = journalled_attempts(projection, target.anchorage.seq)
        lacking = self._journal.copy_needed(journal, needed)
        if lacking:
            group_id, generation, attempt = min(lacking)
            raise JournalLacksRowsError(
                f"the row journal lacks the rows of {len(lacking)} sealed attempts, such as attempt {attempt} of "
                f"{group_id}/{generation}"
            )

    def _manifest(
        self,
        temporary: Path,
        target: Target,
        facts: HeldFacts,
        projection: Projection,
        files: Iterable[Path],
        *,
        by_journal: bool,
    ) -> Manifest:
        goes_back_to = target.anchorage or facts
        anchorage = target.anchorage or Anchorage()
        promised = expected_inventory(projection, finalized_through_seq=anchorage.seq if by_journal else None)
        return Manifest(
            kind=target.kind,
            run_id=self._run_id,
            log_id=self._log_id,
            kinlog_version=self._version,
            created_us=self._runtime.clock_us(),
            position=facts.position,
            projection_digest=projection_digest(projection).hex(),
            fold_version=FOLD_VERSION,
            train_step=goes_back_to.train_step,
            weight_version=goes_back_to.weight_version,
            anchor=anchorage.name,
            anchor_position=anchorage.position,
            rows_from="journal" if by_journal else "data_plane",
            dataset_fingerprint=projection.dataset_fingerprint,
            draw_cursor=facts.draw_cursor,
            num_storage_units=self._runtime.data_plane.num_storage_units,
            staging_rows=len(promised.staging),
            staging_digest=inventory_digest(promised.staging).hex(),
            training_rows=len(promised.training),
            training_digest=inventory_digest(promised.training).hex(),
            files=self._file_entries(temporary, files),
        )

    def _file_entries(self, temporary: Path, files: Iterable[Path]) -> tuple[FileEntry, ...]:
        entries, digests = [], {}
        for path in files:
            status = path.stat()
            key = (status.st_ino, status.st_size, status.st_mtime_ns)
            # A file that log or journal share with their copy does not change any more.
            shared = status.st_nlink > 1 and path.parent.name in (LOG_NAME, JOURNAL_NAME)
            digest = (self._digests.get(key) if shared else None) or file_digest(path)
            if shared:
                digests[key] = digest
            name = path.relative_to(temporary).as_posix()
            entries.append(FileEntry(path=name, size_bytes=status.st_size, blake2b=digest))
        self._digests = digests
        return tuple(entries)

    def _trash(self, path: Path) -> None:
        """Rename away first, then remove: a half-removed directory never has a checkpoint's name."""
        trash = self._runtime.directory.trash
        self._store.make_directory(trash)
        grave = trash / f"{path.name}.{self._runtime.clock_us()}"
        self._store.rename(path, grave)
        self._store.sync_directory(path.parent)
        self._store.remove_tree(grave)
