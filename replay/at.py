"""The projection at any point of a run's history: which event is meant, and what the log amounts to there."""

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from kinlog.lineage.fold import FOLD_VERSION
from kinlog.lineage.reading import Choice, read_events
from kinlog.lineage.run_directory import RunDirectory
from kinlog.lineage.scan import LogScan, holds_mark
from kinlog.lineage.state import Projection
from kinlog.replay.checkpoints import find_checkpoints
from kinlog.replay.plain_text import format_count, format_time
from kinlog.replay.projection import SNAPSHOT_NAME, project, read_snapshot
from kinlog.replay.settled import is_of
from kinlog.schemas import events as e
from kinlog.schemas.errors import CheckpointError, NotInRunError

__all__ = ["Moment", "find_seq", "find_step", "find_time", "project_at", "surviving_step"]


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """A place in a log, just after an event."""

    seq: int
    epoch: int
    time_us: int
    """The event's wall clock, microseconds since 1970-01-01 UTC."""
    note: str = ""
    """What one should know about how it was found."""


def find_seq(scan: LogScan, seq: int) -> Moment:
    """Return the place just after an event.

    Raises
    ------
    NotInRunError
        The log does not have it, or not any more.
    """
    if seq > scan.end.seq:
        raise NotInRunError(f"there is no event {seq}: the log ends at seq {scan.end.seq}")
    if seq < scan.first_seq:
        raise NotInRunError(
            f"event {seq} was dropped (log.history: drop): the oldest event that is left is seq {scan.first_seq}"
        )
    for batch in scan.batches(seq - 1, through_seq=seq):
        return _moment(batch)
    raise NotInRunError(f"there is no event {seq}")


def find_step(scan: LogScan, step: int) -> Moment:
    """Return the place just after an optimizer step was applied, on the surviving history.

    Raises
    ------
    NotInRunError
        It was not applied, or a restart has undone it.
    """
    record = surviving_step(scan, step)
    return Moment(seq=record.seq, epoch=record.epoch, time_us=record.time_us)


def surviving_step(scan: LogScan, step: int) -> e.RecordedEvent:
    """Return the event that applied an optimizer step, of the times that it was applied the one that stands.

    Raises
    ------
    NotInRunError
        It was not applied, or a restart has undone it.
    """

    def rows(batch: pa.RecordBatch) -> pa.Array:
        applied = pc.and_(is_of(batch, e.StepApplied), pc.equal(batch.column("train_step"), step))
        return pc.fill_null(pc.or_(applied, is_of(batch, e.RunRestored)), fill_value=False)

    dropped = (
        f": the first {format_count(scan.first_seq - 1, 'event')} of its log were dropped"
        if scan.base
        else ""
    )
    for batch in scan.batches(newest_first=True, choice=Choice(("kind", "train_step"), rows)):
        for record in reversed(list(read_events(batch))):
            event = record.event
            if isinstance(event, e.StepApplied):
                return record
            if isinstance(event, e.RunRestored) and event.train_step < step:
                raise NotInRunError(
                    f"the run has no step {step} on its surviving history: it was not applied after the restart at seq "
                    f"{record.seq}, which went back to step {event.train_step}"
                )
    raise NotInRunError(f"the run has no step {step} on its surviving history{dropped}")


def find_time(scan: LogScan, time_us: int) -> Moment:
    """Return the place just after the last event that was recorded at a time or before it.

    Order is by seq only, and clocks may go backwards: it is the newest event with such a time. Those before it all
    count, also where their clock was ahead; the note says how many these are.

    Raises
    ------
    NotInRunError
        Nothing was recorded by then, or nothing that is left.
    """
    found = False
    ahead = 0

    def rows(batch: pa.RecordBatch) -> pa.Array:
        nonlocal found, ahead
        later = pc.greater(batch.column("time").cast(pa.int64()), time_us)
        by_then = pc.indices_nonzero(pc.invert(later))
        if found or not len(by_then):
            ahead += later.true_count if found else 0
            return pa.repeat(pa.scalar(value=False), batch.num_rows)
        found, last = True, by_then[-1].as_py()
        ahead += later.slice(0, last).true_count
        return pa.array([place == last for place in range(batch.num_rows)], pa.bool_())

    moments = [_moment(batch) for batch in scan.batches(newest_first=True, choice=Choice(("time",), rows))]
    if not moments:
        first = find_seq(scan, scan.first_seq)
        kind = "the oldest event that is left" if scan.base is not None else "the first event"
        raise NotInRunError(
            f"nothing was recorded by then: {kind}, seq {first.seq}, is of {format_time(first.time_us)}"
        )
    if not ahead:
        return moments[0]
    note = (
        f"{format_count(ahead, 'event')} before it were recorded by a clock that was ahead: order is by seq"
    )
    return msgspec.structs.replace(moments[0], note=note)


def _moment(batch: pa.RecordBatch) -> Moment:
    return Moment(
        seq=batch.column("seq")[0].as_py(),
        epoch=batch.column("epoch")[0].as_py(),
        time_us=batch.column("time").cast(pa.int64())[0].as_py(),
    )


def project_at(run: RunDirectory, scan: LogScan, seq: int) -> tuple[Projection, str | None]:
    """Return the projection of a log as of an event, and the checkpoint that it was gone on from, if any.

    The nearest checkpoint before the event saves reading what is before it. Only one whose place the log holds, and whose
    snapshot is what its manifest promises, is gone on from: the projection is what a replay from the beginning gives.

    Raises
    ------
    TransitionError
        The events tell an impossible story, as far as that is looked at: see ``kinlog.replay.settled``.
    """
    for checkpoint in find_checkpoints(run.checkpoints, log_id=scan.log_id, verify=False):
        manifest = checkpoint.manifest
        if manifest is None or checkpoint.problem or manifest.fold_version != FOLD_VERSION:
            continue
        if not (scan.first_seq - 1 <= manifest.position.seq <= seq and holds_mark(scan, manifest.position)):
            continue
        try:
            snapshot = read_snapshot(checkpoint.path / SNAPSHOT_NAME, manifest.projection_digest)
        except CheckpointError:
            continue  # an older one, or the beginning, gives the same
        return project(scan, snapshot, through_seq=seq), checkpoint.path.name
    return project(scan, through_seq=seq), None
