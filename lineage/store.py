"""The one seam for file operations: everything that kinlog writes goes through a ``Store``.

A store that records or breaks operations on purpose stands in for the disk in tests; the code under test is the same.
"""

import errno
import fcntl
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

__all__ = ["Store", "StoredFile", "FileLock", "LocalStore", "write_durably", "replace_durably"]

_COPY_BYTES = 4 * 1024 * 1024


class StoredFile(Protocol):
    """A file open for writing at explicit offsets."""

    def write_at(self, offset_bytes: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of ``data``, or raise ``OSError``: a short write is an error."""

    def sync(self) -> None:
        """Make everything written so far durable (``fdatasync``)."""

    def truncate(self, size_bytes: int) -> None:
        """Cut the file off."""

    def close(self) -> None: ...


class FileLock(Protocol):
    """An advisory lock that is held until released, or until the process ends."""

    def release(self) -> None: ...


class Store(Protocol):
    """What kinlog asks of a file system."""

    def names(self, directory: Path) -> list[str]:
        """Return the names in a directory, sorted; empty when it does not exist."""

    def exists(self, path: Path) -> bool: ...

    def read(self, path: Path) -> memoryview:
        """Return the whole content, as it is now."""

    def read_part(self, path: Path, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return up to ``size_bytes`` of the content; a negative offset counts from the end."""

    def create(self, path: Path) -> StoredFile:
        """Create a file that must not exist: ``FileExistsError`` if it does."""

    def open(self, path: Path) -> StoredFile:
        """Open an existing file for writing."""

    def lock(self, path: Path) -> FileLock:
        """Take an exclusive advisory lock: ``BlockingIOError`` if another process holds it."""

    def seize_lock(self, path: Path) -> FileLock:
        """Take the lock away from whoever holds it: who asks for it from now on meets this one."""

    def make_directory(self, path: Path) -> None:
        """Create a directory and its parents, durably; it may exist."""

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or directory another name; an existing file, or empty directory, of that name is replaced."""

    def copy(self, source: Path, target: Path) -> None:
        """Copy a file's content to a file that must not exist, durably. The directory is left to the caller."""

    def link(self, source: Path, target: Path) -> None:
        """Hard-link a file, or copy it where the file system has no links. The directory is left to the caller."""

    def remove(self, path: Path) -> None:
        """Remove a file that holds nothing."""

    def remove_tree(self, path: Path) -> None:
        """Remove a directory that was renamed to trash. What cannot be removed stays there."""

    def sync_directory(self, path: Path) -> None:
        """Make creations, renames and removals in a directory durable."""


class _LocalFile:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write_at(self, offset_bytes: int, data: bytes | bytearray | memoryview) -> None:
        written = os.pwrite(self._descriptor, data, offset_bytes)
        if written != len(data):
            # A short write on a local file means that the device is full: what follows would not fit either.
            raise OSError(errno.ENOSPC, f"short write: {written} of {len(data)} bytes")

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def truncate(self, size_bytes: int) -> None:
        os.ftruncate(self._descriptor, size_bytes)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _LocalLock:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def is_at(self, path: Path) -> bool:
        """Whether the locked file is the one that has this name."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def _locked(path: Path) -> _LocalLock:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return _LocalLock(descriptor)


class LocalStore:
    """The local file system, or a network one that looks like it."""

    def names(self, directory: Path) -> list[str]:
        try:
            return sorted(os.listdir(directory))
        except FileNotFoundError:
            return []

    def exists(self, path: Path) -> bool:
        return path.exists()

    def read(self, path: Path) -> memoryview:
        # A copy, not a mapping: a live segment may be cut off by its writer, and a mapped page that is gone kills the
        # process.
        return memoryview(path.read_bytes())

    def read_part(self, path: Path, offset_bytes: int, size_bytes: int) -> memoryview:
        with open(path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end + offset_bytes) if offset_bytes < 0 else offset_bytes)
            return memoryview(file.read(size_bytes))

    def create(self, path: Path) -> StoredFile:
        return _LocalFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))

    def open(self, path: Path) -> StoredFile:
        return _LocalFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def lock(self, path: Path) -> FileLock:
        while True:
            lock = _locked(path)
            if lock.is_at(path):
                return lock
            # Between opening the file and locking it, a take-over has put its own in this place.
            lock.release()

    def seize_lock(self, path: Path) -> FileLock:
        # Whoever held the old file holds a lock on a file that has no name any more.
        own = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        lock = _locked(own)
        os.rename(own, path)
        return lock

    def make_directory(self, path: Path) -> None:
        missing = [path]
        while not missing[-1].parent.is_dir():
            missing.append(missing[-1].parent)
        # What exists may have been made by a process that was killed before its name was durable.
        self._sync_if_readable(missing[-1].parent.parent)
        for directory in reversed(missing):
            directory.mkdir(exist_ok=True)
            self._sync_if_readable(directory.parent)

    def _sync_if_readable(self, directory: Path) -> None:
        # In a directory that it may not list, no process of this user has made one.
        with suppress(PermissionError):
            self.sync_directory(directory)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def copy(self, source: Path, target: Path) -> None:
        # Content only: the source may be read-only, and what kinlog writes is not.
        with open(source, "rb") as content, open(target, "xb") as file:
            shutil.copyfileobj(content, file, _COPY_BYTES)
            file.flush()
            os.fdatasync(file.fileno())

    def link(self, source: Path, target: Path) -> None:
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                raise
            self.copy(source, target)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_durably(store: Store, path: Path, data: bytes) -> None:
    """Create ``path`` with ``data`` and make the content durable. The directory is left to the caller."""
    file = store.create(path)
    try:
        file.write_at(0, data)
        file.sync()
    finally:
        file.close()


def replace_durably(store: Store, path: Path, data: bytes) -> None:
    """Write ``path`` anew, by one rename: it is the old file or the new one. The directory is left to the caller."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    write_durably(store, temporary, data)
    store.rename(temporary, path)
