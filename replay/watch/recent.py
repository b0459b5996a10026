"""What a projection does not say of a live run: when what is in flight was sent, how fast it goes, who writes it."""

from collections.abc import Iterable
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kinlog.lineage.reading import ignorable_kinds, read_events
from kinlog.lineage.scan import LogScan
from kinlog.lineage.state import Projection
from kinlog.replay.watch.rates import StepPace, TokenRate
from kinlog.schemas import events as e
from kinlog.schemas.events import RecordedEvent, kind_of

__all__ = ["Dispatched", "Recent", "SavedAt", "recent_of"]

#: The kinds that :meth:`Recent.add` looks at.
_KINDS = tuple(
    kind_of(event_type)
    for event_type in (
        e.WriterOpened,
        e.SiblingDispatched,
        e.SiblingSealed,
        e.StepApplied,
        e.RunRestored,
        e.CheckpointCommitted,
        e.CheckpointFailed,
    )
)
_BACK_US = 60_000_000
#: Looked at for what happened lately: of a run this fast, less than a minute.
_MOST_EVENTS = 100_000
_STEPS_BACK = 3


class Dispatched(NamedTuple):
    """How an attempt was sent."""

    attempt: int
    worker: str
    time_us: int


class SavedAt(NamedTuple):
    """The last checkpoint that was committed."""

    time_us: int
    event: e.CheckpointCommitted


class Recent:
    """Collects it from the events of a log, in order."""

    def __init__(self) -> None:
        self.dispatched: dict[tuple[int, int], Dispatched] = {}
        """Group and generation -> the last attempt."""
        self.tokens = TokenRate()
        self.tokens_since_us = 0
        """From when on they are known."""
        self.pace = StepPace()
        self.saved: SavedAt | None = None
        self.failed_checkpoints = 0
        """Since the last one that was committed."""
        self.host = ""
        self.pid = 0
        self.epoch = 0
        self.began_us = 0
        """When the newest life began."""
        self.last_us = 0
        """Of the newest event."""

    def add(self, record: RecordedEvent) -> None:
        """Take the next event into account."""
        event, self.last_us = record.event, record.time_us
        if record.epoch != self.epoch:
            self.epoch, self.began_us = record.epoch, record.time_us
            self.tokens, self.pace = TokenRate(), StepPace()
        match event:
            case e.WriterOpened():
                self.host, self.pid = event.host, event.pid
            case e.SiblingDispatched():
                sent = Dispatched(event.attempt, event.worker, record.time_us)
                self.dispatched[event.group_id, event.generation] = sent
            case e.SiblingSealed():
                self.dispatched.pop((event.group_id, event.generation), None)
                self.tokens.add(record.time_us, event.completion_tokens)
            case e.StepApplied():
                self.pace.add(event.train_step, record.time_us)
            case e.CheckpointCommitted():
                self.saved, self.failed_checkpoints = SavedAt(record.time_us, event), 0
            case e.CheckpointFailed():
                self.failed_checkpoints += 1

    def forget(self, projection: Projection) -> None:
        """Let go of attempts that are not in flight any more."""
        running = set(running_siblings(projection))
        self.dispatched = {key: sent for key, sent in self.dispatched.items() if key in running}


def running_siblings(projection: Projection) -> Iterable[tuple[int, int]]:
    """Yield group and generation of every sibling in flight."""
    return (
        (group.group_id, generation)
        for group in projection.live_groups()
        for generation, sibling in group.siblings.items()
        if sibling.running
    )


def recent_of(scan: LogScan, projection: Projection) -> Recent:
    """Collect it from a log's end backwards, as far as need be: not from its beginning.

    Parameters
    ----------
    projection:
        As of the log's end.
    """
    wanted = _Wanted(projection)
    records: list[RecordedEvent] = []
    newest_us: int | None = None
    since_us = num_events = 0
    for batch in scan.batches(newest_first=True):
        times = batch.column("time").cast(pa.int64())
        newest_us = times[-1].as_py() if newest_us is None else newest_us
        lately = times[-1].as_py() > newest_us - _BACK_US and num_events < _MOST_EVENTS
        kinds = (
            _KINDS if lately else wanted.kinds(own_life=batch.column("epoch")[-1].as_py() == scan.end.epoch)
        )
        if not kinds:
            break
        chosen = batch.filter(pc.is_in(batch.column("kind").dictionary_decode(), pa.array(kinds)))
        found = list(read_events(chosen, ignorable_kinds(batch.schema)))
        records = [*(found if lately else filter(wanted.is_wanted, found)), *records]
        for record in found:
            wanted.note(record.event)
        if lately:
            since_us = times[0].as_py()
        num_events += batch.num_rows
    recent = Recent()
    for record in records:
        recent.add(record)
    recent.last_us, recent.tokens_since_us = newest_us or 0, since_us
    _find_writer(scan, recent)
    recent.forget(projection)
    return recent


class _Wanted:
    """What is still to be found in the log, further back than the last minute."""

    def __init__(self, projection: Projection) -> None:
        self._running = set(running_siblings(projection))
        self._checkpoint = bool(projection.checkpoints)
        self._steps = _STEPS_BACK

    def kinds(self, *, own_life: bool) -> tuple[str, ...]:
        """Return the kinds of events that are still wanted. The pace of an earlier life is of no interest."""
        kinds = (
            (e.SiblingDispatched, bool(self._running)),
            (e.CheckpointCommitted, self._checkpoint),
            (e.StepApplied, self._steps > 0 and own_life),
        )
        return tuple(kind_of(event_type) for event_type, wanted in kinds if wanted)

    def is_wanted(self, record: RecordedEvent) -> bool:
        event = record.event
        return (
            not isinstance(event, e.SiblingDispatched) or (event.group_id, event.generation) in self._running
        )

    def note(self, event: e.Event) -> None:
        """Note what was found."""
        match event:
            case e.SiblingDispatched():
                self._running.discard((event.group_id, event.generation))
            case e.CheckpointCommitted():
                self._checkpoint = False
            case e.StepApplied():
                self._steps -= 1


def _find_writer(scan: LogScan, recent: Recent) -> None:
    """Find how the newest life began, without reading all of it: with the first segment of its epoch, wherever that is."""
    opened = kind_of(e.WriterOpened)
    for segment in reversed(scan.segments):
        if segment.info.index > 0 and not segment.compacted:
            continue
        for batch in reversed(list(scan.read_segment(segment))):
            chosen = batch.filter(pc.equal(batch.column("kind").dictionary_decode(), opened))
            for record in reversed(list(read_events(chosen, ignorable_kinds(batch.schema)))):
                assert isinstance(record.event, e.WriterOpened)
                recent.host, recent.pid = record.event.host, record.event.pid
                recent.epoch, recent.began_us = record.epoch, record.time_us
                return
