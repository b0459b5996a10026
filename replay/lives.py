"""The lives of a run: each time a controller took the log over, how it began and how it ended."""

from enum import StrEnum

import msgspec
from msgspec.structs import replace

from kinlog.schemas.events import RecordedEvent, RunRestored, TailTruncated, WriterClosed, WriterOpened

__all__ = ["Life", "LifeEnd", "LivesTally"]


class LifeEnd(StrEnum):
    """How a life ended, as far as the log can tell."""

    CLOSED = "closed"
    """In order."""
    KILLED = "killed"
    """Without a word: the next life found the log not closed."""
    OPEN = "open"
    """The newest, not closed: it is running, or was killed and not resumed yet."""


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """One writer epoch of the log."""

    epoch: int
    host: str
    pid: int
    first_seq: int
    last_seq: int
    began_us: int
    """Wall clock of its first event, microseconds since 1970-01-01 UTC."""
    ended_us: int
    """Wall clock of its last event."""
    end: LifeEnd
    restored: bool
    """Whether it restored trainer and data plane. Not the first life, nor one that ended before it got so far."""
    restored_checkpoint: str | None
    """``None`` although restored: from the start of the run."""
    restored_step: int | None
    quarantined_bytes: int
    """What its repairs of torn tails copied aside."""


class LivesTally:
    """Collects lives from a log's events, in order."""

    def __init__(self) -> None:
        self._ended: list[Life] = []
        self._current: Life | None = None
        self._last: RecordedEvent | None = None

    def add(self, record: RecordedEvent) -> None:
        """Count the next event."""
        life = self._current
        if life is None or record.epoch != life.epoch:
            life = self._begin(record)
        self._last = record
        event = record.event
        if isinstance(event, WriterOpened):
            self._current = replace(life, host=event.host, pid=event.pid)
        elif isinstance(event, WriterClosed):
            self._current = replace(life, end=LifeEnd.CLOSED)
        elif isinstance(event, TailTruncated):
            size_bytes = life.quarantined_bytes + event.quarantined_bytes
            self._current = replace(life, quarantined_bytes=size_bytes)
        elif isinstance(event, RunRestored):
            self._current = replace(
                life, restored=True, restored_checkpoint=event.checkpoint, restored_step=event.train_step
            )

    def lives(self) -> tuple[Life, ...]:
        """Return the lives so far, oldest first."""
        if self._current is None or self._last is None:
            return ()
        newest = replace(self._current, last_seq=self._last.seq, ended_us=self._last.time_us)
        return (*self._ended, newest)

    def _begin(self, record: RecordedEvent) -> Life:
        if self._current is not None:
            *_, before = self.lives()
            if before.end is LifeEnd.OPEN:
                before = replace(before, end=LifeEnd.KILLED)
            self._ended.append(before)
        self._current = Life(
            epoch=record.epoch,
            host="",
            pid=0,
            first_seq=record.seq,
            last_seq=record.seq,
            began_us=record.time_us,
            ended_us=record.time_us,
            end=LifeEnd.OPEN,
            restored=False,
            restored_checkpoint=None,
            restored_step=None,
            quarantined_bytes=0,
        )
        return self._current
