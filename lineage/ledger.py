"""The ledger: the projection of a run, and the only way to change it.

Every change is decided, folded and appended in one call that never awaits, so no two changes interleave. It takes a
``Cut``: the capability to change lineage and data plane together, which the controller's barrier hands out.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from kinlog.lineage.admission import check_append
from kinlog.lineage.fold import fold
from kinlog.lineage.state import Projection
from kinlog.lineage.writer import LogWriter, Ticket
from kinlog.schemas.codec import decode_event, encode_event
from kinlog.schemas.errors import LogWriteError
from kinlog.schemas.events import Event, Position, RecordedEvent

__all__ = ["Cut", "Ledger"]


class Cut(Protocol):
    """The capability to change lineage and data plane together. A checkpoint excludes all cuts."""

    def require(self) -> None:
        """Raise ``RuntimeError`` when the cut is over."""


class Ledger:
    """The live projection of a run, and the log behind it. Belongs to one event loop."""

    def __init__(
        self,
        projection: Projection,
        writer: LogWriter,
        clock_us: Callable[[], int],
        on_commit: Callable[[], None] = lambda: None,
        observe: Callable[[Sequence[RecordedEvent]], None] = lambda records: None,
    ) -> None:
        """Begin at the log's end.

        Parameters
        ----------
        clock_us:
            Wall clock, microseconds since 1970-01-01 UTC.
        on_commit:
            Called after each commit.
        observe:
            Shown what each commit recorded, once it is folded and on its way to the disk. It may look at the projection,
            and changes nothing.
        """
        if projection.last_seq != writer.last_seq:
            raise ValueError(
                f"the projection is at seq {projection.last_seq}, the log at seq {writer.last_seq}: fold the tail first"
            )
        self.projection = projection
        """Read it freely; change it only by :meth:`commit`."""
        self._writer = writer
        self._clock_us = clock_us
        self._on_commit = on_commit
        self._observe = observe
        self._broken: BaseException | None = None

    @property
    def writer(self) -> LogWriter:
        return self._writer

    def commit(self, cut: Cut, *events: Event) -> Ticket:
        """Record events as one unit: in the projection at once, durable when the ticket says so.

        The events are folded before they are queued, as a reader of the log will get them, so that a log never holds
        an event that cannot be replayed, and the live projection is the replayed one to the last bit.

        Raises
        ------
        EventTooLargeError, TransitionError
            An event is not acceptable. Nothing was recorded; if it was not the first of several, the ledger is broken
            and takes no more, since that is a bug of the caller.
        ValueError
            There are no events or more than one frame takes, or a field is not of its declared type or does not fit its
            column. Nothing was recorded.
        LogWriteError
            The writer failed: the run must stop.
        """
        cut.require()
        if self._broken is not None:
            raise LogWriteError(f"the ledger is broken by an earlier error: {self._broken}") from self._broken
        encoded = [encode_event(event) for event in events]
        check_append(encoded)
        time_us = self._clock_us()
        seq, epoch = self.projection.last_seq, self._writer.epoch
        records = [
            RecordedEvent(seq + 1 + place, epoch, time_us, decode_event(row))
            for place, row in enumerate(encoded)
        ]
        for place, record in enumerate(records):
            try:
                fold(self.projection, record)
            except BaseException as error:
                if place:
                    self._broken = error
                raise
        try:
            ticket = self._writer.append(encoded, time_us)
        except BaseException as error:
            self._broken = error
            raise
        self._observe(records)
        self._on_commit()
        return ticket

    async def position(self) -> Position:
        """Make everything recorded so far durable, and return its place."""
        return await self._writer.position()
