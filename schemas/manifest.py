"""The manifest of a checkpoint: what the directory holds, byte for byte, and which place in the log it stands for."""

from typing import Literal

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
    fold_version: int = 1
    """Version of the fold that made the projection: another one replays the log instead."""
    train_step: int
    weight_version: int
    """Step and weights that a restart goes back to: of a rollout checkpoint, its anchor's."""
    anchor: str | None = None
    """For a rollout checkpoint: the trainer checkpoint that it goes with; ``None`` is the start of the run."""
    anchor_position: Position | None = None
    """The anchor's place in the log: another checkpoint may have had its name before."""
    rows_from: Literal["data_plane", "journal"] = "data_plane"
    """Where the promised rows are: in this checkpoint's own ``data_plane/``; or, of a rollout checkpoint with the row
    journal on, in its anchor's together with its own ``journal/``."""
    dataset_fingerprint: str
    draw_cursor: int
    num_storage_units: int
    staging_rows: int
    staging_digest: str
    """Digest (hex) over key and row digest of every staged row that is promised: those of the sealed siblings of groups
    that have no promised canonical rows."""
    training_rows: int
    training_digest: str
    """The same for canonical rows: those of finalized groups. ``rows_from: journal`` promises those of the groups that
    were finalized when the anchor was taken; all later ones are finalized again, from their staged rows."""
    files: tuple[FileEntry, ...]
    """Every other file of the directory, sorted by path."""
