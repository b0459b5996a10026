"""A new run from a checkpoint directory alone: as of its place in the log, wherever it was copied from."""

from pathlib import Path

from kinlog.controller.checkpoint import checkpoint_name, rollout_checkpoint_name
from kinlog.controller.checkpoint_directory import CONFIG_NAME
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.store import LocalStore, Store
from kinlog.replay.checkpoints import JOURNAL_NAME, LOG_NAME, read_manifest, verify_files
from kinlog.replay.recovery.anchors import verified_anchor
from kinlog.schemas.errors import CheckpointError, RunExistsError
from kinlog.schemas.manifest import Manifest
from kinlog.schemas.reasons import CheckpointKind

__all__ = ["adopt_checkpoint"]


def adopt_checkpoint(
    checkpoint: Path, run: RunDirectory, *, anchor: Path | None = None, store: Store | None = None
) -> str:
    """Make a run directory that a restart goes on from as of a checkpoint. Returns the checkpoint's name in it.

    Everything is copied: the checkpoint and the run that it came from stay as they are.

    Parameters
    ----------
    anchor:
        For a rollout checkpoint: the directory of the trainer checkpoint that it goes with.

    Raises
    ------
    CheckpointError
        The checkpoint is not complete, or a file of it differs from its manifest; or the anchor is missing, or not the
        one that the checkpoint goes with.
    RunExistsError
        The run's directory is not empty.
    """
    manifest = read_manifest(checkpoint)
    _refuse_wrong_anchor(checkpoint, manifest, anchor)
    verify_files(checkpoint, manifest)
    if run.path.exists() and any(run.path.iterdir()):
        raise RunExistsError(f"{run.path} is not empty: a checkpoint is restored into a directory of its own")
    store = store or LocalStore()
    rollout = manifest.kind is CheckpointKind.ROLLOUT
    name = (
        rollout_checkpoint_name(manifest.train_step, 1) if rollout else checkpoint_name(manifest.train_step)
    )
    temporary = run.path.with_name(f".{run.path.name}.restoring")
    store.remove_tree(temporary)
    copied = RunDirectory(temporary)
    if anchor is not None and manifest.anchor is not None:
        _copy_tree(store, anchor, copied.checkpoints / manifest.anchor)
    _copy_tree(store, checkpoint, copied.checkpoints / name)
    _copy_tree(store, checkpoint / LOG_NAME, copied.log)
    if (checkpoint / JOURNAL_NAME).is_dir():
        # For the checkpoints to come, as well: they take from the run's journal what their anchor lacks.
        _copy_tree(store, checkpoint / JOURNAL_NAME, copied.journal)
    store.copy(checkpoint / CONFIG_NAME, copied.config)
    store.sync_directory(temporary)
    store.rename(temporary, run.path)
    store.sync_directory(run.path.parent)
    return name


def _refuse_wrong_anchor(checkpoint: Path, manifest: Manifest, anchor: Path | None) -> None:
    if manifest.anchor is not None and anchor is None:
        raise CheckpointError(
            f"{checkpoint} is a rollout checkpoint, and has no trainer: it goes with trainer checkpoint {manifest.anchor} of "
            f"the same run. Give that directory as well: --anchor DIRECTORY. Or restore {manifest.anchor} alone."
        )
    if manifest.anchor is None and anchor is not None:
        raise CheckpointError(f"{checkpoint} goes with no other checkpoint: leave --anchor out")
    if anchor is not None:
        try:
            verified_anchor(anchor, manifest)
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint} cannot be restored: {error}") from error


def _copy_tree(store: Store, source: Path, target: Path) -> None:
    store.make_directory(target)
    for path in sorted(source.iterdir()):
        if path.is_dir():
            _copy_tree(store, path, target / path.name)
        else:
            store.copy(path, target / path.name)
    store.sync_directory(target)
