"""The lives of a run: each time a controller took the log over, how it began and how it ended."""

from enum import StrEnum

import msgspec

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
        self._lives: list[Life] = []

    def add(self, record: RecordedEvent) -> None:
        """Count the next event."""
        if not self._lives or record.epoch != self._lives[-1].epoch:
            self._begin(record)
        event, life = record.event, self._lives[-1]
        changes: dict[str, object] = {"last_seq": record.seq, "ended_us": record.time_us}
        if isinstance(event, WriterOpened):
            changes |= {"host": event.host, "pid": event.pid}
        elif isinstance(event, WriterClosed):
            changes |= {"end": LifeEnd.CLOSED}
        elif isinstance(event, TailTruncated):
            changes |= {"quarantined_bytes": life.quarantined_bytes + event.quarantined_bytes}
        elif isinstance(event, RunRestored):
            changes |= {
                "restored": True,
                "restored_checkpoint": event.checkpoint,
                "restored_step": event.train_step,
            }
        self._lives[-1] = msgspec.structs.replace(life, **changes)

    def _begin(self, record: RecordedEvent) -> None:
        if self._lives and self._lives[-1].end is LifeEnd.OPEN:
            self._lives[-1] = msgspec.structs.replace(self._lives[-1], end=LifeEnd.KILLED)
        self._lives.append(
            Life(
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
        )

    def lives(self) -> tuple[Life, ...]:
        """Return the lives so far, oldest first."""
        return tuple(self._lives)
