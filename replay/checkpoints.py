"""Finding and checking checkpoints: complete and intact, or skipped with the reason."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from kinlog.schemas.errors import CheckpointError
from kinlog.schemas.manifest import MANIFEST_FORMAT, FileEntry, Manifest
from kinlog.schemas.prompts import DIGEST_BYTES

__all__ = [
    "DATA_PLANE_NAME",
    "JOURNAL_NAME",
    "LOG_NAME",
    "MANIFEST_NAME",
    "TEMPORARY_PREFIX",
    "TRAINER_NAME",
    "FoundCheckpoint",
    "file_digest",
    "read_manifest",
    "verify_files",
    "find_checkpoints",
]

MANIFEST_NAME = "manifest.json"
LOG_NAME = "log"
DATA_PLANE_NAME = "data_plane"
TRAINER_NAME = "trainer"
JOURNAL_NAME = "journal"

#: A checkpoint is built under such a name; the rename to its own is what commits it.
TEMPORARY_PREFIX = ".incomplete."


class FoundCheckpoint(NamedTuple):
    """A directory under ``checkpoints/``, and whether it can be used."""

    path: Path
    manifest: Manifest | None
    """``None`` when it is not complete."""
    problem: str
    """Why it is skipped; empty for a usable one."""

    @property
    def usable(self) -> bool:
        return self.manifest is not None and not self.problem


def file_digest(path: Path) -> str:
    """Return the BLAKE2b-128 digest of a file's content, hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).hexdigest()


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises
    ------
    CheckpointError
        There is none, or it cannot be read by this kinlog.
    """
    path = checkpoint / MANIFEST_NAME
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise CheckpointError(f"{checkpoint} is incomplete: it has no {MANIFEST_NAME}") from error
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if manifest.format > MANIFEST_FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.format}, this kinlog reads up to {MANIFEST_FORMAT}: upgrade kinlog"
        )
    return manifest


def verify_files(checkpoint: Path, manifest: Manifest, *, read_archive: bool = True) -> None:
    """Compare every file with the manifest, size first.

    Parameters
    ----------
    read_archive:
        Read compacted segments as well. They grow with the length of the run, and a restart in place has no use for
        this copy of them; without, only their sizes are compared.

    Raises
    ------
    CheckpointError
        A file is missing, cannot be read, or differs.
    """
    for entry in manifest.files:
        archived = entry.path.startswith(f"{LOG_NAME}/compacted-")
        _verify_file(checkpoint, entry, read=read_archive or not archived)


def _verify_file(checkpoint: Path, entry: FileEntry, *, read: bool) -> None:
    path = checkpoint / entry.path
    if not path.is_file():
        raise CheckpointError(f"{checkpoint.name}: {entry.path} is missing")
    try:
        size, digest = path.stat().st_size, entry.blake2b
        if read and size == entry.size_bytes:
            digest = file_digest(path)
    except OSError as error:
        raise CheckpointError(f"{checkpoint.name}: {entry.path} cannot be read: {error}") from error
    if size != entry.size_bytes:
        raise CheckpointError(
            f"{checkpoint.name}: {entry.path}: expected {entry.size_bytes} bytes, found {size}"
        )
    if digest != entry.blake2b:
        raise CheckpointError(
            f"{checkpoint.name}: {entry.path}: expected digest {entry.blake2b}, found {digest}"
        )


def find_checkpoints(
    directory: Path, *, log_id: str, verify: bool = True, read_archive: bool = True
) -> Iterator[FoundCheckpoint]:
    """Yield what is under ``checkpoints/``, newest position first, incomplete directories before all others.

    Parameters
    ----------
    directory:
        A run's ``checkpoints/`` directory. It may not exist.
    log_id:
        The log that a usable checkpoint belongs to.
    verify:
        Compare every file's digest. Evaluated lazily: taking only the first usable one reads only that one.
    read_archive:
        As for :func:`verify_files`.
    """
    complete: list[tuple[Path, Manifest]] = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if not path.is_dir():
            continue
        if path.name.startswith(TEMPORARY_PREFIX):
            yield FoundCheckpoint(
                path, None, f"{path.name} was never committed: the run died while it was written"
            )
            continue
        try:
            complete.append((path, read_manifest(path)))
        except CheckpointError as error:
            yield FoundCheckpoint(path, None, str(error))
    complete.sort(key=lambda item: (item[1].position.seq, item[1].train_step), reverse=True)
    for path, manifest in complete:
        problem = ""
        if manifest.log_id != log_id:
            problem = f"{path.name} belongs to log {manifest.log_id}, not to {log_id}"
        elif verify:
            try:
                verify_files(path, manifest, read_archive=read_archive)
            except CheckpointError as error:
                problem = str(error)
        yield FoundCheckpoint(path, manifest, problem)
