"""A new run from a checkpoint directory alone: as of its place in the log, wherever it was copied from."""

from pathlib import Path

from kinlog.controller.checkpoint import CONFIG_NAME, checkpoint_name
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.store import LocalStore, Store
from kinlog.replay.checkpoints import LOG_NAME, read_manifest, verify_files
from kinlog.schemas.errors import RunExistsError

__all__ = ["adopt_checkpoint"]


def adopt_checkpoint(checkpoint: Path, run: RunDirectory, *, store: Store | None = None) -> str:
    """Make a run directory that a restart goes on from as of a checkpoint. Returns the checkpoint's name in it.

    Everything is copied: the checkpoint and the run that it came from stay as they are.

    Raises
    ------
    CheckpointError
        The checkpoint is not complete, or a file of it differs from its manifest.
    RunExistsError
        The run's directory is not empty.
    """
    manifest = read_manifest(checkpoint)
    verify_files(checkpoint, manifest)
    if run.path.exists() and any(run.path.iterdir()):
        raise RunExistsError(f"{run.path} is not empty: a checkpoint is restored into a directory of its own")
    store = store or LocalStore()
    name = checkpoint_name(manifest.train_step)
    temporary = run.path.with_name(f".{run.path.name}.restoring")
    store.remove_tree(temporary)
    copied = RunDirectory(temporary)
    _copy_tree(store, checkpoint, copied.checkpoints / name)
    _copy_tree(store, checkpoint / LOG_NAME, copied.log)
    store.copy(checkpoint / CONFIG_NAME, copied.config)
    store.sync_directory(temporary)
    store.rename(temporary, run.path)
    store.sync_directory(run.path.parent)
    return name


def _copy_tree(store: Store, source: Path, target: Path) -> None:
    store.make_directory(target)
    for path in sorted(source.iterdir()):
        if path.is_dir():
            _copy_tree(store, path, target / path.name)
        else:
            store.copy(path, target / path.name)
    store.sync_directory(target)
