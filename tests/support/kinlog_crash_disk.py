"""A disk in memory that remembers every operation: what a crash at any of them may leave is worked out from that.

A ``Process`` is a ``Store`` on it. Several processes may use one disk; a killed one does nothing more, and what it wrote
stays in the page cache, for others to read and for a power failure to lose.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kinlog.lineage.store import FileLock, StoredFile

ROOT = 0


class Link(NamedTuple):
    """A name for a file or directory: a creation, a hard link, the arriving half of a move between directories."""

    directory: int
    name: str
    inode: int


class Unlink(NamedTuple):
    directory: int
    name: str


class Move(NamedTuple):
    """A rename in one directory: it is the old name or the new one, never both and never neither."""

    directory: int
    old: str
    new: str


class Write(NamedTuple):
    inode: int
    offset: int
    data: bytes


class Truncate(NamedTuple):
    inode: int
    size: int


class Sync(NamedTuple):
    inode: int


class SyncFailed(NamedTuple):
    """An fsync that reported an error: the pages are clean, and their content is on the disk or not."""

    inode: int


class SyncDirectory(NamedTuple):
    directory: int


Effect = Link | Unlink | Move | Write | Truncate | Sync | SyncFailed | SyncDirectory


class Image(NamedTuple):
    """What is on a disk, all of it durable."""

    directories: dict[int, dict[str, int]]
    files: dict[int, bytes]

    def paths(self, directory: int = ROOT, path: Path = Path("/")) -> Iterator[tuple[Path, int]]:
        """Yield every path with its inode, parents first."""
        for name, inode in sorted(self.directories[directory].items()):
            yield path / name, inode
            if inode in self.directories:
                yield from self.paths(inode, path / name)

    def key(self, *, closed: str | None = None) -> int:
        """Equal for images that cannot be told from each other, if nobody looks into directories of such a name."""
        return hash(
            tuple(
                (path, hash(self.files.get(inode)))
                for path, inode in self.paths()
                if closed is None or not any(part.startswith(closed) for part in path.parent.parts)
            )
        )

    def write_to(self, root: Path) -> None:
        """Lay the image out in a new real directory, hard links included."""
        root.mkdir()
        written: dict[int, Path] = {}
        for path, inode in self.paths():
            real = root / path.relative_to("/")
            if inode in self.directories:
                real.mkdir()
            elif inode in written:
                os.link(written[inode], real)
            else:
                real.write_bytes(self.files[inode])
                written[inode] = real


EMPTY = Image({ROOT: {}}, {})


class Disk:
    """What processes see now, and the effects that led there from ``start``."""

    def __init__(self, start: Image = EMPTY, effects: list[Effect] | None = None) -> None:
        self.start = start
        self.directories = {inode: dict(names) for inode, names in start.directories.items()}
        self.files = {inode: bytearray(content) for inode, content in start.files.items()}
        self.effects: list[Effect] = []
        self.locks: dict[int, Process] = {}
        self._next_inode = 1 + max([*self.directories, *self.files])
        for effect in effects or []:
            self.apply(effect)

    def apply(self, effect: Effect) -> None:
        """Do what an operation does, as everybody sees it at once, and remember it."""
        self.effects.append(effect)
        match effect:
            case Link(directory, name, inode):
                self.directories[directory][name] = inode
                if inode not in self.files:
                    self.directories.setdefault(inode, {})
                self._next_inode = max(self._next_inode, inode + 1)
            case Unlink(directory, name):
                del self.directories[directory][name]
            case Move(directory, old, new):
                self.directories[directory][new] = self.directories[directory].pop(old)
            case Write(inode, offset, data):
                content = self.files.setdefault(inode, bytearray())
                content.extend(bytes(max(0, offset + len(data) - len(content))))
                content[offset : offset + len(data)] = data
            case Truncate(inode, size):
                content = self.files.setdefault(inode, bytearray())
                del content[size:]
                content.extend(bytes(size - len(content)))

    def new_file(self, directory: int, name: str) -> int:
        inode = self._next_inode
        self.files[inode] = bytearray()
        # An empty file, said as an effect, so that a replay knows it for a file.
        self.apply(Truncate(inode, 0))
        self.apply(Link(directory, name, inode))
        return inode

    def new_directory(self, directory: int, name: str) -> None:
        self.apply(Link(directory, name, self._next_inode))

    def find(self, path: Path) -> int | None:
        """Return the inode of a path, ``None`` if there is none."""
        inode: int | None = ROOT
        for part in path.parts[1:]:
            inode = self.directories.get(inode, {}).get(part) if inode is not None else None
        return inode

    def at(self, path: Path) -> int:
        inode = self.find(path)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, "no such file or directory", str(path))
        return inode


class Process:
    """A process that uses a disk."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.alive = True
        self.fail_next_sync = False
        """Let the next fsync report an error."""

    def kill(self) -> None:
        """Let it do nothing more: each operation fails, and its locks are free."""
        self.alive = False
        self._disk.locks = {inode: owner for inode, owner in self._disk.locks.items() if owner is not self}

    def on_disk(self) -> Disk:
        if not self.alive:
            raise OSError(errno.EIO, "this process is dead")
        return self._disk

    def names(self, directory: Path) -> list[str]:
        inode = self.on_disk().find(directory)
        return sorted(self._disk.directories[inode]) if inode is not None else []

    def exists(self, path: Path) -> bool:
        return self.on_disk().find(path) is not None

    def read(self, path: Path) -> memoryview:
        disk = self.on_disk()
        return memoryview(bytes(disk.files[disk.at(path)]))

    def read_part(self, path: Path, offset_bytes: int, size_bytes: int) -> memoryview:
        content = self.read(path)
        start = max(0, len(content) + offset_bytes) if offset_bytes < 0 else offset_bytes
        return content[start : start + size_bytes]

    def create(self, path: Path) -> StoredFile:
        disk = self.on_disk()
        if disk.find(path) is not None:
            raise FileExistsError(errno.EEXIST, "file exists", str(path))
        return _OpenFile(self, disk.new_file(disk.at(path.parent), path.name))

    def open(self, path: Path) -> StoredFile:
        return _OpenFile(self, self.on_disk().at(path))

    def lock(self, path: Path) -> FileLock:
        disk = self.on_disk()
        inode = disk.find(path)
        if inode is None:
            inode = disk.new_file(disk.at(path.parent), path.name)
        if inode in disk.locks:
            raise BlockingIOError(errno.EAGAIN, "locked", str(path))
        disk.locks[inode] = self
        return _Lock(disk, inode)

    def seize_lock(self, path: Path) -> FileLock:
        own = path.with_name(f".{path.name}.seized")
        lock = self.lock(own)
        self.rename(own, path)
        return lock

    def make_directory(self, path: Path) -> None:
        disk = self.on_disk()
        missing = [path]
        while disk.find(missing[-1].parent) is None:
            missing.append(missing[-1].parent)
        self.sync_directory(missing[-1].parent.parent)
        for directory in reversed(missing):
            if disk.find(directory) is None:
                disk.new_directory(disk.at(directory.parent), directory.name)
            self.sync_directory(directory.parent)

    def rename(self, source: Path, target: Path) -> None:
        disk = self.on_disk()
        inode, directory, new_directory = disk.at(source), disk.at(source.parent), disk.at(target.parent)
        replaced = disk.find(target)
        if replaced is not None and disk.directories.get(replaced):
            raise OSError(errno.ENOTEMPTY, "directory not empty", str(target))
        if directory == new_directory:
            disk.apply(Move(directory, source.name, target.name))
        else:
            disk.apply(Link(new_directory, target.name, inode))
            disk.apply(Unlink(directory, source.name))

    def copy(self, source: Path, target: Path) -> None:
        file = self.create(target)
        file.write_at(0, self.read(source))
        file.sync()
        file.close()

    def link(self, source: Path, target: Path) -> None:
        disk = self.on_disk()
        if disk.find(target) is not None:
            raise FileExistsError(errno.EEXIST, "file exists", str(target))
        disk.apply(Link(disk.at(target.parent), target.name, disk.at(source)))

    def remove(self, path: Path) -> None:
        disk = self.on_disk()
        assert not disk.files[disk.at(path)], f"{path} is not empty"
        disk.apply(Unlink(disk.at(path.parent), path.name))

    def remove_tree(self, path: Path) -> None:
        disk = self.on_disk()
        inode = disk.find(path)
        if inode is None:
            return
        for name in list(disk.directories.get(inode, ())):
            self.remove_tree(path / name)
        disk.apply(Unlink(disk.at(path.parent), path.name))

    def sync_directory(self, path: Path) -> None:
        disk = self.on_disk()
        disk.apply(SyncDirectory(disk.at(path)))


class _OpenFile:
    def __init__(self, process: Process, inode: int) -> None:
        self._process = process
        self._inode = inode

    def write_at(self, offset_bytes: int, data: bytes | bytearray | memoryview) -> None:
        self._process.on_disk().apply(Write(self._inode, offset_bytes, bytes(data)))

    def sync(self) -> None:
        disk = self._process.on_disk()
        if self._process.fail_next_sync:
            self._process.fail_next_sync = False
            disk.apply(SyncFailed(self._inode))
            raise OSError(errno.EIO, "EIO")
        disk.apply(Sync(self._inode))

    def truncate(self, size_bytes: int) -> None:
        self._process.on_disk().apply(Truncate(self._inode, size_bytes))

    def close(self) -> None:
        return


class _Lock:
    def __init__(self, disk: Disk, inode: int) -> None:
        self._disk = disk
        self._inode = inode

    def release(self) -> None:
        self._disk.locks.pop(self._inode, None)
