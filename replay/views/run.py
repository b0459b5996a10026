"""The views of what concerns the whole run: its steps, checkpoints, and lives."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter

import pyarrow as pa
import pyarrow.compute as pc

from kinlog.lineage.reading import ignorable_kinds, read_events
from kinlog.lineage.state import Projection
from kinlog.replay.lives import LivesTally
from kinlog.replay.settled import is_of
from kinlog.replay.views.catalogue import VIEWS
from kinlog.schemas import events as e

__all__ = ["RUN_VIEWS", "RunEvents", "run_view"]

_LIFE = (e.WriterOpened, e.WriterClosed, e.TailTruncated, e.RunRestored)
_NEEDED: dict[str, tuple[type[e.Event], ...]] = {
    "steps": (e.StepApplied, e.StepShrunk, e.RunRestored),
    "step_groups": (e.StepApplied, e.RunRestored),
    "checkpoints": (e.CheckpointCommitted, e.CheckpointFailed, e.RunRestored),
    "lives": _LIFE,
}


class RunEvents:
    """Gathers what these views are made of from the batches of a log, the newest batch first."""

    def __init__(self, names: Iterable[str]) -> None:
        names = set(names)
        self._types = tuple({event_type for name in names for event_type in _NEEDED[name]})
        self._edges = "lives" in names
        self._newest_first: list[e.RecordedEvent] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Take the next older batch."""
        wanted = is_of(batch, *self._types)
        if self._edges:
            wanted = pc.or_(wanted, _edges(batch.column("epoch")))
        records = list(read_events(batch.filter(wanted), ignorable_kinds(batch.schema)))
        self._newest_first += reversed(records)

    @property
    def records(self) -> list[e.RecordedEvent]:
        return self._newest_first[::-1]


def _edges(epochs: pa.Array) -> pa.Array:
    """Return for each row whether a life begins or ends with it, or the batch does."""
    changes = pc.not_equal(epochs[1:], epochs[:-1])
    edge = pa.array([True])
    begins, ends = pa.concat_arrays([edge, changes]), pa.concat_arrays([changes, edge])
    return pc.or_(begins, ends)


def run_view(name: str, records: Sequence[e.RecordedEvent], beginning: Projection) -> pa.Table:
    """Return a whole view, all columns of it.

    Parameters
    ----------
    records:
        What :class:`RunEvents` gathered for it, oldest first.
    beginning:
        What the log begins at: of dropped history, what a restart could still need is known.
    """
    schema = VIEWS[name].schema()
    columns = list(zip(*RUN_VIEWS[name](records, beginning), strict=True)) or [()] * len(schema)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


_Row = tuple[object, ...]


def _undone_by(records: Sequence[e.RecordedEvent]) -> Callable[[int, int], int | None]:
    """Return what finds the first restart after a seq that went back behind a step."""
    restarts = [(r.seq, r.event.train_step) for r in records if isinstance(r.event, e.RunRestored)]

    def undone_by(seq: int, step: int) -> int | None:
        later = restarts[bisect_right(restarts, seq, key=itemgetter(0)) :]
        return next((at for at, restored in later if restored < step), None)

    return undone_by


def _steps(records: Sequence[e.RecordedEvent], beginning: Projection) -> Iterator[_Row]:
    undone_by = _undone_by(records)
    for step, group_ids in sorted(beginning.steps.items()):
        undone = undone_by(0, step)
        yield step, undone is None, undone, None, None, None, len(group_ids), None, None
    shrunk: dict[int, e.StepShrunk] = {}
    for record in records:
        event = record.event
        if isinstance(event, e.StepShrunk):
            shrunk[event.train_step] = event
        elif isinstance(event, e.StepApplied):
            undone = undone_by(record.seq, event.train_step)
            less = shrunk.pop(event.train_step, None)
            yield (
                event.train_step,
                undone is None,
                undone,
                record.epoch,
                record.seq,
                record.time_us,
                len(event.group_ids),
                less.expected_groups if less is not None else None,
                less.reason.value if less is not None else None,
            )


def _step_groups(records: Sequence[e.RecordedEvent], beginning: Projection) -> Iterator[_Row]:
    undone_by = _undone_by(records)
    for step, group_ids in sorted(beginning.steps.items()):
        surviving = undone_by(0, step) is None
        for place, group_id in enumerate(group_ids):
            yield step, place, group_id, surviving, None
    for record in records:
        event = record.event
        if isinstance(event, e.StepApplied):
            surviving = undone_by(record.seq, event.train_step) is None
            for place, group_id in enumerate(event.group_ids):
                yield event.train_step, place, group_id, surviving, record.seq


def _checkpoints(records: Sequence[e.RecordedEvent], beginning: Projection) -> Iterator[_Row]:
    undone_by = _undone_by(records)
    for state in beginning.checkpoints:
        surviving = undone_by(0, state.train_step) is None
        yield (
            *(state.name, "committed", state.kind.value, state.train_step, surviving),
            *(None, None, None, state.position.seq, None, None, None),
        )
    for record in records:
        event = record.event
        place = (record.seq, record.time_us, record.epoch)
        if isinstance(event, e.CheckpointCommitted):
            surviving = undone_by(record.seq, event.train_step) is None
            yield (
                *(event.name, "committed", event.checkpoint_kind.value, event.train_step, surviving),
                *(*place, event.position.seq, event.frontier_step, None, None),
            )
        elif isinstance(event, e.CheckpointFailed):
            yield (
                *(event.name, "failed", None, None, None),
                *(*place, None, None, event.reason.value, event.detail),
            )


def _lives(records: Sequence[e.RecordedEvent], beginning: Projection) -> Iterator[_Row]:
    tally = LivesTally()
    for record in records:
        tally.add(record)
    for life in tally.lives():
        yield (
            life.epoch,
            life.host,
            life.pid,
            life.first_seq,
            life.last_seq,
            life.began_us,
            life.ended_us,
            life.end.value,
            life.restored_checkpoint,
            life.restored_step,
            life.quarantined_bytes,
        )


#: View -> what makes its rows, in the order of the view's columns.
RUN_VIEWS: dict[str, Callable[[Sequence[e.RecordedEvent], Projection], Iterator[_Row]]] = {
    "steps": _steps,
    "step_groups": _step_groups,
    "checkpoints": _checkpoints,
    "lives": _lives,
}
