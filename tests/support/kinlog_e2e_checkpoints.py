"""Checkpoints that tests tamper with in a way that their manifest does not give away."""

from pathlib import Path

import msgspec
from kinlog_e2e import blake2b

from kinlog.replay.checkpoints import MANIFEST_NAME, read_manifest
from kinlog.schemas.manifest import FileEntry


def sign_again(checkpoint: Path) -> None:
    """Make the manifest vouch for the checkpoint's files as they are now."""
    manifest = read_manifest(checkpoint)
    files = tuple(
        FileEntry(
            path=path.relative_to(checkpoint).as_posix(),
            size_bytes=path.stat().st_size,
            blake2b=blake2b(path),
        )
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != MANIFEST_NAME
    )
    signed = msgspec.structs.replace(manifest, files=files)
    (checkpoint / MANIFEST_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(signed)))
