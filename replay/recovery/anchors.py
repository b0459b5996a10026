"""The trainer checkpoint that a rollout checkpoint goes with: its anchor, without which it is of no use."""

from pathlib import Path
from typing import NamedTuple

from kinlog.replay.checkpoints import read_manifest, verify_files
from kinlog.schemas.errors import CheckpointError
from kinlog.schemas.manifest import Manifest
from kinlog.schemas.reasons import CheckpointKind

__all__ = ["Anchor", "verified_anchor"]


class Anchor(NamedTuple):
    """An anchor whose files are as its manifest says."""

    path: Path
    manifest: Manifest


def verified_anchor(path: Path, rollout: Manifest, *, read_archive: bool = True) -> Anchor:
    """Read and verify the directory that is to be a rollout checkpoint's anchor.

    Parameters
    ----------
    rollout:
        The manifest of the rollout checkpoint, which names its anchor.
    read_archive:
        As for :func:`kinlog.replay.checkpoints.verify_files`.

    Raises
    ------
    CheckpointError
        It is missing, not complete or not intact; or it is another checkpoint: the fields that differ are named.
    """
    name = rollout.anchor
    if not path.is_dir():
        raise CheckpointError(f"it goes with trainer checkpoint {name}, and there is no {path}")
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        raise CheckpointError(f"its anchor {name} cannot be used: {error}") from error
    differing = "; ".join(
        f"{field}: expected {expected}, found {found}"
        for field, expected, found in _compared(rollout, manifest)
        if expected != found
    )
    if differing:
        raise CheckpointError(f"its anchor {name} is not the checkpoint that it was taken after: {differing}")
    try:
        verify_files(path, manifest, read_archive=read_archive)
    except CheckpointError as error:
        raise CheckpointError(f"its anchor cannot be used: {error}") from error
    return Anchor(path, manifest)


def _compared(rollout: Manifest, anchor: Manifest) -> tuple[tuple[str, object, object], ...]:
    """Return what an anchor must be: field, expected, found."""
    return (
        ("kind", CheckpointKind.TRAINER.value, anchor.kind.value),
        ("run_id", rollout.run_id, anchor.run_id),
        ("log_id", rollout.log_id, anchor.log_id),
        ("position", rollout.anchor_position, anchor.position),
        ("train_step", rollout.train_step, anchor.train_step),
        ("weight_version", rollout.weight_version, anchor.weight_version),
        ("dataset_fingerprint", rollout.dataset_fingerprint, anchor.dataset_fingerprint),
        ("num_storage_units", rollout.num_storage_units, anchor.num_storage_units),
    )
