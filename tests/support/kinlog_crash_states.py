"""What a power failure may leave: the durable part of a disk, and any choice among what was not synced.

The model is a POSIX file system that promises no more than it must. Of a file, everything up to its last ``fdatasync`` is
there; of what was written since, each sector may be old, new, or torn in its middle, and the size may be any that the
file has had. Of a directory, everything up to its last fsync is there; each later creation, rename and removal may be
there or not, in any combination. A rename within a directory is one step; one between directories is two.
"""

import random
from collections.abc import Iterator
from itertools import product
from math import prod

from kinlog_crash_disk import (
    ROOT,
    Effect,
    Image,
    Link,
    Move,
    Sync,
    SyncDirectory,
    SyncFailed,
    Truncate,
    Unlink,
    Write,
)

SECTOR_BYTES = 512


class _File:
    """What is durable of a file, and what each of its sectors may hold instead."""

    def __init__(self, durable: bytes = b"") -> None:
        self.durable = bytearray(durable)
        self.live = bytearray(durable)
        self.sectors: dict[int, list[bytes]] = {}
        self.sizes: list[int] = []
        self._dirty: set[int] = set()
        self._size_dirty = False

    def write(self, offset: int, data: bytes) -> None:
        self.live.extend(bytes(max(0, offset + len(data) - len(self.live))))
        self.live[offset : offset + len(data)] = data
        self._touch(offset, offset + len(data))
        self._resize()

    def truncate(self, size: int) -> None:
        cut = size < len(self.live)
        del self.live[size:]
        self.live.extend(bytes(size - len(self.live)))
        if cut and size % SECTOR_BYTES:
            self._touch(size, size + 1)
        self._resize()

    def _touch(self, start: int, end: int) -> None:
        for sector in range(start // SECTOR_BYTES, -(-end // SECTOR_BYTES)):
            new, old = _sector(self.live, sector), _sector(self.durable, sector)
            self._dirty.add(sector)
            half = SECTOR_BYTES // 2
            # The newest first: the first option of everything is what processes see.
            options = dict.fromkeys((new, new[:half] + old[half:], *self.sectors.get(sector, ())))
            options.pop(old, None)
            if options:
                self.sectors[sector] = list(options)

    def _resize(self) -> None:
        self._size_dirty = True
        sizes = dict.fromkeys((len(self.live), *self.sizes))
        sizes.pop(len(self.durable), None)
        self.sizes = list(sizes)

    def sync(self) -> None:
        if self._size_dirty:
            del self.durable[len(self.live) :]
            self.durable.extend(bytes(len(self.live) - len(self.durable)))
            self.sizes.clear()
        for sector in self._dirty:
            start = sector * SECTOR_BYTES
            end = min(start + SECTOR_BYTES, len(self.durable))
            if start < end:
                self.durable[start:end] = self.live[start:end]
            self.sectors.pop(sector, None)
        self.sync_failed()

    def sync_failed(self) -> None:
        """The pages are clean: no later sync makes durable what this one did not."""
        self._dirty.clear()
        self._size_dirty = False

    def choose(self, sectors: dict[int, int], size: int) -> bytes:
        """Return the content for a choice: 0 is what is durable, n the n-th of what may be there instead."""
        chosen = {s: self.sectors[s][option - 1] for s, option in sectors.items() if option}
        length = self.sizes[size - 1] if size else len(self.durable)
        if not chosen and length == len(self.durable):
            return bytes(self.durable)
        content = self.durable[:length]
        content.extend(bytes(length - len(content)))
        for sector, data in chosen.items():
            start = sector * SECTOR_BYTES
            content[start : start + SECTOR_BYTES] = data[: max(0, length - start)]
        return bytes(content[:length])


def _sector(content: bytearray, sector: int) -> bytes:
    data = bytes(content[sector * SECTOR_BYTES : (sector + 1) * SECTOR_BYTES])
    return data + bytes(SECTOR_BYTES - len(data))


class _Directory:
    def __init__(self, names: dict[str, int] | None = None) -> None:
        self.durable = dict(names or {})
        self.pending: list[Link | Unlink | Move] = []

    def choose(self, choices: list[int]) -> dict[str, int]:
        names = dict(self.durable)
        for effect, chosen in zip(self.pending, choices, strict=True):
            if chosen:
                _change(names, effect)
        return names

    def sync(self) -> None:
        self.durable = self.choose([1] * len(self.pending))
        self.pending.clear()


def _change(names: dict[str, int], effect: Link | Unlink | Move) -> None:
    match effect:
        case Link(_, name, inode):
            names[name] = inode
        case Unlink(_, name):
            names.pop(name, None)
        case Move(_, old, new):
            if old in names:
                names[new] = names.pop(old)


class CrashStates:
    """Follows the effects, one by one, and says what a power failure would leave after each."""

    def __init__(self, start: Image) -> None:
        self._files = {inode: _File(content) for inode, content in start.files.items()}
        self._directories = {inode: _Directory(names) for inode, names in start.directories.items()}

    def follow(self, effect: Effect) -> None:
        match effect:
            case Link(directory, _, inode):
                if inode not in self._files:
                    self._directories.setdefault(inode, _Directory())
                self._directories[directory].pending.append(effect)
            case Unlink(directory) | Move(directory):
                self._directories[directory].pending.append(effect)
            case Write(inode, offset, data):
                self._files.setdefault(inode, _File()).write(offset, data)
            case Truncate(inode, size):
                self._files.setdefault(inode, _File()).truncate(size)
            case Sync(inode):
                self._files[inode].sync()
            case SyncFailed(inode):
                self._files[inode].sync_failed()
            case SyncDirectory(directory):
                self._directories[directory].sync()

    def images(self, limit: int, chance: random.Random) -> Iterator[Image]:
        """Yield what may be left: every combination while they are few, else chosen ones and a sample.

        Beyond the limit, as many creations, renames and removals again are tried as the only one that is lost or there:
        their order is what goes wrong most often.
        """
        dimensions = self._dimensions()
        names = sum(what == "name" for _, (what, _, _) in dimensions)
        for choice in _choices([count for count, _ in dimensions], names, limit, chance):
            yield self._image(choice)

    def _dimensions(self) -> list[tuple[int, tuple[str, int, int]]]:
        """How many ways there are for each thing that is not durable, and what it is."""
        found = []
        for inode, directory in self._directories.items():
            found += [(2, ("name", inode, place)) for place in range(len(directory.pending))]
        for inode, file in self._files.items():
            if file.sizes:
                found.append((1 + len(file.sizes), ("size", inode, 0)))
            found += [(1 + len(options), ("sector", inode, s)) for s, options in file.sectors.items()]
        return found

    def _image(self, choice: tuple[int, ...]) -> Image:
        names = {inode: [0] * len(directory.pending) for inode, directory in self._directories.items()}
        sizes = dict.fromkeys(self._files, 0)
        sectors: dict[int, dict[int, int]] = {inode: {} for inode in self._files}
        for (_, (what, inode, place)), option in zip(self._dimensions(), choice, strict=True):
            if what == "name":
                names[inode][place] = option
            elif what == "size":
                sizes[inode] = option
            else:
                sectors[inode][place] = option
        directories = {
            inode: directory.choose(names[inode]) for inode, directory in self._directories.items()
        }
        reached, left = {ROOT}, [ROOT]
        while left:
            for inode in directories.get(left.pop(), {}).values():
                if inode not in reached:
                    reached.add(inode)
                    left.append(inode)
        return Image(
            {inode: found for inode, found in directories.items() if inode in reached},
            {i: file.choose(sectors[i], sizes[i]) for i, file in self._files.items() if i in reached},
        )


def _choices(counts: list[int], names: int, limit: int, chance: random.Random) -> Iterator[tuple[int, ...]]:
    """Yield choices among so many options each, of which the first ``names`` are about names."""
    if prod(counts) <= limit:
        yield from product(*(range(count) for count in counts))
        return
    nothing, everything = (0,) * len(counts), tuple(1 for _ in counts)
    alone: list[tuple[int, ...]] = []
    telling: list[tuple[int, ...]] = []
    for place, count in enumerate(counts):
        lost = (*everything[:place], 0, *everything[place + 1 :])
        there = [(*nothing[:place], option, *nothing[place + 1 :]) for option in range(1, count)]
        (alone if place < names else telling).extend([lost, *there])
        telling.append((*everything[:place], *nothing[place:]))  # lost from here on
    telling += [tuple(chance.randrange(count) for count in counts) for _ in range(limit)]
    chance.shuffle(telling)
    chance.shuffle(alone)
    for choices, most in (([nothing, everything, *telling], limit), (alone, limit)):
        yield from list(dict.fromkeys(choices))[:most]
