"""A damaged log's directory as far as it is trusted: a store that shows less and less of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa

from kinlog.lineage.compacted import encode_compacted
from kinlog.lineage.names import LogFile, compacted_name, log_files
from kinlog.lineage.reading import read_batches
from kinlog.lineage.segment import SegmentInfo, SegmentScan, scan_segment, segment_name
from kinlog.lineage.store import LocalStore, Store
from kinlog.replay.integrity.left_out import Region, intact_frames
from kinlog.schemas.errors import LogDamagedError
from kinlog.schemas.events import Position

__all__ = ["SalvageSource", "SalvageView", "find_sources"]


class SalvageSource(NamedTuple):
    """A file of the log as it was found."""

    path: Path
    file: LogFile
    size_bytes: int
    scan: SegmentScan | None
    """``None`` for a base, which has no frames."""

    @property
    def info(self) -> SegmentInfo | None:
        return self.scan.info if self.scan is not None else None

    @property
    def own_name(self) -> str:
        """The name that it should have, as far as its content tells."""
        info = self.info
        if info is None:
            return self.path.name
        first = (info.epoch, info.index)
        if info.replaces is msgspec.UNSET:
            return segment_name(*first)
        return compacted_name(first, (info.replaces.last_epoch, info.replaces.last_index))

    @property
    def opening_end(self) -> int:
        """Where its opening frame ends; 0 without one."""
        return self.scan.frames[0].end if self.scan is not None and self.scan.frames else 0


def find_sources(directory: Path, store: Store) -> list[SalvageSource]:
    """Return a log's files, each verified by itself.

    Raises
    ------
    LogUnsupportedError
        One was written by a newer kinlog.
    """
    sources = []
    for file in log_files(store.names(directory)):
        data = store.read(directory / file.name)
        scan = None if file.kind == "base" else scan_segment(data)
        sources.append(SalvageSource(directory / file.name, file, len(data), scan))
    return sources


class SalvageView(LocalStore):
    """Shows each file under its own name, up to where trust in it ends. Reads only."""

    def __init__(self, store: Store, sources: Sequence[SalvageSource]) -> None:
        self._store = store
        self._sources = sources
        self._shown = _by_own_name(sources)
        self._sizes = {name: source.size_bytes for name, source in self._shown.items()}
        self._rewritten: dict[str, memoryview] = {}
        self.faults: list[LogDamagedError] = []
        """Why something was cut away, in order."""
        self.begun: list[tuple[int, int]] = []
        """Epoch and lowest seq of each segment that is not shown any more: where that epoch had begun at the latest."""

    def names(self, directory: Path) -> list[str]:
        return sorted(self._shown)

    def exists(self, path: Path) -> bool:
        return path.name in self._shown

    def read(self, path: Path) -> memoryview:
        if path.name in self._rewritten:
            return self._rewritten[path.name]
        return self._store.read(self._shown[path.name].path)[: self._sizes[path.name]]

    def read_part(self, path: Path, offset_bytes: int, size_bytes: int) -> memoryview:
        data = self.read(path)
        start = max(0, len(data) + offset_bytes) if offset_bytes < 0 else offset_bytes
        return data[start : start + size_bytes]

    def is_shown(self, source: SalvageSource) -> bool:
        """Whether this file, and no other of its name, is what is shown."""
        return self._shown.get(source.own_name, source).path == source.path

    def source_of(self, name: str) -> SalvageSource:
        """Return the file that is shown under a name."""
        return self._shown[name]

    def trusted_bytes(self, name: str) -> int:
        """Return how much of that file is trusted."""
        return self._sizes.get(name, 0)

    def source_bytes(self, name: str, size_bytes: int) -> int:
        """Return how much of that file its first ``size_bytes`` under that name stand for."""
        return self._sizes[name] if name in self._rewritten else size_bytes

    def region(self, source: SalvageSource, offset_bytes: int) -> Region:
        """Return a file's bytes from an offset on, with what is needed to decode frames in it."""
        data = self._store.read(source.path)
        return Region(data, max(offset_bytes, 0), self._prefix(source, data))

    def cut(self, error: LogDamagedError) -> None:
        """Trust nothing from where an error says on, except what follows right there."""
        self.faults.append(error)
        name = error.segment
        source = self._shown[name]
        if 0 < error.offset_bytes < self._sizes[name] and source.file.kind == "segment":
            self._sizes[name] = error.offset_bytes
        elif not (source.file.kind == "compacted" and self._shorten(name, error.offset_bytes)):
            self._hide(name)
        later = [file.name for file in log_files(self._shown) if file > source.file]
        for other in later:
            info = self._shown[other].info
            if info is not None and info.first_seq != error.seq + 1:
                self._hide(other)

    def _hide(self, name: str) -> None:
        source = self._shown.pop(name)
        if source.file.kind != "segment":
            return
        if source.info is not None:
            self.begun.append((source.info.epoch, source.info.first_seq))
            return
        epoch = source.file.first[0]
        frames = [f for f in intact_frames(self._store.read(source.path), 0) if f.epoch == epoch]
        if frames:
            self.begun.append((epoch, min(frame.first_seq for frame in frames)))

    def _shorten(self, name: str, offset_bytes: int) -> bool:
        """Show a compacted segment without what lies at or behind an offset. It cannot simply be cut: it says itself
        where it ends. Returns whether anything of it is left."""
        source = self._shown[name]
        assert source.scan is not None
        data = self._store.read(source.path)[:offset_bytes]
        scan = scan_segment(data)
        info = scan.info
        if name in self._rewritten or info is None or info.replaces is msgspec.UNSET or len(scan.frames) < 2:
            return False
        table = pa.Table.from_batches(read_batches(data, scan))
        last = scan.frames[-1]
        end = Position(table.column("epoch")[-1].as_py(), last.last_seq, last.checksum)
        replaces = msgspec.structs.replace(info.replaces, end=end)
        self._rewritten[name] = encode_compacted(table, msgspec.structs.replace(info, replaces=replaces))
        self._sizes[name] = scan.end_offset
        return True

    def _prefix(self, source: SalvageSource, data: memoryview) -> memoryview | None:
        """Return the schema and dictionaries of a file's frames: its own, or those that the same writer wrote elsewhere."""
        if source.scan is not None and source.scan.frames:
            return data[: source.scan.frames[0].offset]
        for other in self._sources:
            same = (
                other.file.kind == source.file.kind == "segment"
                and other.file.first[0] == source.file.first[0]
            )
            if same and other.scan is not None and other.scan.frames:
                return self._store.read(other.path)[: other.scan.frames[0].offset]
        return None


def _by_own_name(sources: Sequence[SalvageSource]) -> dict[str, SalvageSource]:
    """Return the files by the names that they should have: one that stands in its place goes before one that was renamed,
    and that before one that cannot say what it is."""
    placed = [s for s in sources if s.info is not None and s.own_name == s.path.name]
    renamed = [s for s in sources if s.info is not None and s.own_name != s.path.name]
    silent = [s for s in sources if s.info is None]
    chosen: dict[str, SalvageSource] = {}
    for source in placed + renamed + silent:
        chosen.setdefault(source.own_name, source)
    # From here on each is what its name says.
    files = {file.name: file for file in log_files(chosen)}
    return {name: source._replace(file=files[name]) for name, source in chosen.items()}
