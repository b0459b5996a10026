"""A new run from a checkpoint directory alone: as of its place in the log, wherever it was copied from."""

import shutil
from pathlib import Path

from kinlog.controller.checkpoint import CONFIG_NAME, LOG_NAME, checkpoint_name
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.store import LocalStore
from kinlog.replay.checkpoints import read_manifest, verify_files
from kinlog.schemas.errors import RunExistsError

__all__ = ["adopt_checkpoint"]


def adopt_checkpoint(checkpoint: Path, run: RunDirectory) -> str:
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
    store = LocalStore()
    name = checkpoint_name(manifest.train_step)
    temporary = run.path.with_name(f".{run.path.name}.restoring")
    shutil.rmtree(temporary, ignore_errors=True)
    # Contents only: a backup may be read-only, and a run is not.
    copied = RunDirectory(temporary)
    shutil.copytree(checkpoint, copied.checkpoints / name, copy_function=shutil.copyfile)
    shutil.copytree(checkpoint / LOG_NAME, copied.log, copy_function=shutil.copyfile)
    shutil.copyfile(checkpoint / CONFIG_NAME, copied.config)
    for path in [temporary, *sorted(temporary.rglob("*"))]:
        if path.is_dir():
            store.sync_directory(path)
            continue
        file = store.open(path)
        try:
            file.sync()
        finally:
            file.close()
    if run.path.exists():
        run.path.rmdir()
    store.rename(temporary, run.path)
    store.sync_directory(run.path.parent)
    return name
