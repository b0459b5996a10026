"""Stores that stand in for the disk: in memory, or failing, blocking and counting on purpose."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path

from kinlog.lineage.store import FileLock, LocalStore, StoredFile


class FaultyStore(LocalStore):
    """The local disk, with a hook before each operation: it may count, block or raise."""

    def __init__(self) -> None:
        self.before: Callable[[str, Path], None] = lambda operation, path: None
        self.short_write_bytes: int | None = None
        """When set, every write stops after this many bytes, as on a full device."""
        self.syncs: list[str] = []

    def create(self, path: Path) -> StoredFile:
        self.before("create", path)
        return _FaultyFile(self, path, super().create(path))

    def open(self, path: Path) -> StoredFile:
        return _FaultyFile(self, path, super().open(path))


class _FaultyFile:
    def __init__(self, store: FaultyStore, path: Path, inner: StoredFile) -> None:
        self._store = store
        self._path = path
        self._inner = inner

    def write_at(self, offset_bytes: int, data: bytes | bytearray | memoryview) -> None:
        self._store.before("write", self._path)
        short = self._store.short_write_bytes
        if short is not None:
            self._inner.write_at(offset_bytes, bytes(data)[:short])
            raise OSError(errno.ENOSPC, f"short write: {short} of {len(data)} bytes")
        self._inner.write_at(offset_bytes, data)

    def sync(self) -> None:
        self._store.before("sync", self._path)
        self._inner.sync()
        self._store.syncs.append(self._path.name)

    def truncate(self, size_bytes: int) -> None:
        self._store.before("truncate", self._path)
        self._inner.truncate(size_bytes)

    def close(self) -> None:
        self._inner.close()


class Gate:
    """Holds the writer's thread at the ``nth`` sync from now until opened, and says when it got there.

    With an ``error`` it raises it then.
    """

    def __init__(self, *, nth: int = 1, error: OSError | None = None) -> None:
        self._left = nth
        self._error = error
        self._free = threading.Event()
        self.reached = threading.Event()

    def __call__(self, operation: str, path: Path) -> None:
        if operation != "sync":
            return
        self._left -= 1
        if self._left != 0:
            return
        self.reached.set()
        if not self._free.wait(20):
            raise TimeoutError("the test never opened the gate")
        if self._error is not None:
            raise self._error

    def open(self) -> None:
        self._free.set()


class Failing:
    """Raises an ``OSError`` at the chosen operation, from the ``nth`` time on."""

    def __init__(self, operation: str, code: int, nth: int = 1) -> None:
        self._operation = operation
        self._code = code
        self._left = nth
        self.raised = 0

    def __call__(self, operation: str, path: Path) -> None:
        if operation != self._operation:
            return
        self._left -= 1
        if self._left <= 0:
            self.raised += 1
            raise OSError(self._code, errno.errorcode[self._code])


class MemoryStore:
    """A directory of files in memory: for tests that damage a log at every place."""

    def __init__(self, files: dict[Path, bytes]) -> None:
        self.files = {path: bytearray(content) for path, content in files.items()}

    def names(self, directory: Path) -> list[str]:
        return sorted(
            {path.relative_to(directory).parts[0] for path in self.files if path.is_relative_to(directory)}
        )

    def exists(self, path: Path) -> bool:
        return path in self.files

    def read(self, path: Path) -> memoryview:
        return memoryview(bytes(self.files[path]))

    def read_part(self, path: Path, offset_bytes: int, size_bytes: int) -> memoryview:
        start = max(0, len(self.files[path]) + offset_bytes) if offset_bytes < 0 else offset_bytes
        return self.read(path)[start : start + size_bytes]

    def create(self, path: Path) -> StoredFile:
        if path in self.files:
            raise FileExistsError(path)
        self.files[path] = bytearray()
        return _MemoryFile(self.files[path])

    def open(self, path: Path) -> StoredFile:
        return _MemoryFile(self.files[path])

    def lock(self, path: Path) -> FileLock:
        return _MemoryLock()

    def seize_lock(self, path: Path) -> FileLock:
        return _MemoryLock()

    def make_directory(self, path: Path) -> None:
        return

    def copy(self, source: Path, target: Path) -> None:
        self.create(target).write_at(0, self.read(source))

    def remove(self, path: Path) -> None:
        del self.files[path]

    def rename(self, source: Path, target: Path) -> None:
        self.files[target] = self.files.pop(source)

    def link(self, source: Path, target: Path) -> None:
        self.files[target] = self.files[source]

    def remove_tree(self, path: Path) -> None:
        for name in [name for name in self.files if name.is_relative_to(path)]:
            del self.files[name]

    def sync_directory(self, path: Path) -> None:
        return


class _MemoryFile:
    def __init__(self, content: bytearray) -> None:
        self._content = content

    def write_at(self, offset_bytes: int, data: bytes | bytearray | memoryview) -> None:
        self._content.extend(bytes(max(0, offset_bytes + len(data) - len(self._content))))
        self._content[offset_bytes : offset_bytes + len(data)] = data

    def sync(self) -> None:
        return

    def truncate(self, size_bytes: int) -> None:
        del self._content[size_bytes:]
        self._content.extend(bytes(size_bytes - len(self._content)))

    def close(self) -> None:
        return


class _MemoryLock:
    def release(self) -> None:
        return
