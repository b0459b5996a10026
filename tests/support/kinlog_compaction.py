"""Logs of several lives, compacted on the way, and a store that dies after a number of operations."""

from collections.abc import Callable, Sequence
from pathlib import Path

from kinlog_builders import Story, new_log, reopened, story
from kinlog_stores import MemoryStore

from kinlog.lineage.compaction import Compaction, compact_log
from kinlog.lineage.ledger import Ledger
from kinlog.lineage.log import OpenedLog
from kinlog.lineage.scan import LogScan, scan_log
from kinlog.lineage.state import Projection
from kinlog.lineage.store import Store, StoredFile
from kinlog.replay.projection import replay
from kinlog.schemas.events import Position, RecordedEvent, WriterOpened
from kinlog.schemas.settings import LogSettings

LOG = Path("run/log")


class Killed(BaseException):
    """The process is gone: nothing catches it."""


class MortalStore(MemoryStore):
    """A directory in memory, of a process that is killed before its ``lives_for``-th change of it."""

    def __init__(self, files: dict[Path, bytes] | None = None, lives_for: int | None = None) -> None:
        super().__init__(files or {})
        self.left = lives_for

    def _spend(self) -> None:
        if self.left is not None:
            if self.left == 0:
                raise Killed
            self.left -= 1

    def read(self, path: Path) -> memoryview:
        if path not in self.files:
            raise FileNotFoundError(path)
        return super().read(path)

    def create(self, path: Path) -> StoredFile:
        self._spend()
        return _MortalFile(self, super().create(path))

    def open(self, path: Path) -> StoredFile:
        return _MortalFile(self, super().open(path))

    def rename(self, source: Path, target: Path) -> None:
        self._spend()
        super().rename(source, target)

    def remove_tree(self, path: Path) -> None:
        self._spend()
        super().remove_tree(path)

    def copy_of_files(self) -> dict[Path, bytes]:
        return {path: bytes(content) for path, content in self.files.items()}


class _MortalFile:
    def __init__(self, store: MortalStore, inner: StoredFile) -> None:
        self._store = store
        self._inner = inner

    def write_at(self, offset_bytes: int, data: bytes | bytearray | memoryview) -> None:
        self._store._spend()
        self._inner.write_at(offset_bytes, data)

    def sync(self) -> None:
        self._store._spend()

    def truncate(self, size_bytes: int) -> None:
        self._store._spend()
        self._inner.truncate(size_bytes)

    def close(self) -> None:
        return


def live(
    store: Store,
    tell: Callable[[Ledger], object],
    *,
    directory: Path = LOG,
    segment_bytes: int = 65_536,
    cleanly: bool = True,
) -> OpenedLog:
    """One life of a log, told by ``tell``: created if there is none. Closed at the end, or left as a kill leaves it."""
    settings = LogSettings(durability="os", segment_bytes=segment_bytes)
    exists = any(name.endswith(".arrows") for name in store.names(directory))
    begin = reopened if exists else new_log
    opened = begin(directory, settings=settings, store=store)
    projection = replay(opened.scan.events(opened.scan.first_seq - 1), opened.scan.beginning())
    tell(Ledger(projection, opened.writer, lambda: 1_000_000))
    if cleanly:
        opened.close()
    else:
        end_unclosed(opened)
    return opened


def end_unclosed(opened: OpenedLog) -> None:
    """End a life as a kill does: everything is written, and nothing says that it is over."""
    opened.writer._end_segment = lambda: None  # type: ignore[method-assign]
    opened.close()


def small_life(ledger: Ledger) -> None:
    """What a life that is killed early leaves: one event or two."""
    ledger.commit(_Cut(), WriterOpened(host="here", pid=ledger.writer.epoch))


def told_life(seed: int, *, groups: int = 6) -> Callable[[Ledger], Story]:
    return lambda ledger: story(seed, groups=groups, ledger=ledger)


def framed_life(ledger: Ledger) -> None:
    """A life of several frames."""
    for number in range(6):
        ledger.commit(_Cut(), WriterOpened(host="here", pid=number)).wait(20)


class _Cut:
    def require(self) -> None:
        return


def compacted(
    store: Store, *, directory: Path = LOG, checkpoints: Sequence[Position] = (), drop_through_seq: int = 0
) -> Compaction:
    """Compact a log as its newest writer would."""
    scan = scan_log(directory, store=store)
    epoch = scan.segments[-1].info.epoch
    return compact_log(
        store, directory, epoch=epoch, checkpoints=checkpoints, drop_through_seq=drop_through_seq
    )


def events_of(scan: LogScan) -> list[RecordedEvent]:
    return list(scan.events())


def folded(scan: LogScan) -> Projection:
    """The projection of a log, folded event by event."""
    return replay(scan.events(), scan.beginning())
