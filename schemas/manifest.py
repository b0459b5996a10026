"""The manifest of a checkpoint: what the directory holds, byte for byte, and which place in the log it stands for."""

import msgspec

from kinlog.schemas.events import Position
from kinlog.schemas.reasons import CheckpointKind

__all__ = ["MANIFEST_FORMAT", "FileEntry", "Manifest"]

MANIFEST_FORMAT = 1


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the checkpoint."""

    path: str
    """Relative to the checkpoint directory, with forward slashes."""
    size_bytes: int
    blake2b: str
    """BLAKE2b-128 of the content, hex."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Written last: a directory without it is no checkpoint."""

    format: int = MANIFEST_FORMAT
    kind: CheckpointKind
    run_id: str
    log_id: str
    kinlog_version: str
    created_us: int
    """Wall clock, microseconds since 1970-01-01 UTC."""
    position: Position
    """Everything up to here is in the checkpoint, and the log may never be shorter."""
    projection_digest: str
    train_step: int
    weight_version: int
    anchor: str | None = None
    """For a rollout checkpoint: the trainer checkpoint that it goes with; ``None`` is the start of the run."""
    dataset_fingerprint: str
    draw_cursor: int
    num_storage_units: int
    staging_rows: int
    staging_digest: str
    """Digest (hex) over key and row digest of every visible row of the staging partition."""
    training_rows: int
    training_digest: str
    """The same for the training partition."""
    files: tuple[FileEntry, ...]
    """Every other file of the directory, sorted by path."""
