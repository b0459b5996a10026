"""All events of a group together, for group after group, in one reading of a log.

The log is read backwards, a batch at a time. What is recorded of a group is kept until its reservation is met, the first
event of every group: then it is complete, and handed over with all other groups that began in the same batch. So what is
in memory follows what was alive at a time, not the length of the run.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from kinlog.lineage.reading import read_events
from kinlog.lineage.state import GroupPhase, GroupState, Projection, SiblingState
from kinlog.replay.payload_columns import payload_columns
from kinlog.replay.settled import is_of
from kinlog.schemas import events as e
from kinlog.schemas.codec import encode_event
from kinlog.schemas.columns import ENVELOPE_FIELDS, log_schema

__all__ = ["UNKNOWN_SEQ", "AppliedGroup", "GroupEvents", "GroupHistories"]

#: The events of some groups, by type, each in the order of the log. Those of ``StepApplied`` are one row for each group.
GroupEvents: TypeAlias = Mapping[type[e.Event], pa.Table]

#: Stands for the seq of what happened in dropped history.
UNKNOWN_SEQ = 0


class AppliedGroup(NamedTuple):
    """A group in an optimizer step."""

    seq: int
    time_us: int | None
    group_id: int
    train_step: int
    place: int
    surviving: bool


_APPLIED = pa.schema(
    [
        ("seq", pa.int64()),
        ("time", pa.timestamp("us", tz="UTC")),
        ("group_id", pa.int64()),
        ("train_step", pa.int64()),
        ("place", pa.int64()),
        ("surviving", pa.bool_()),
    ]
)


class GroupHistories:
    """Gathers the events of groups from the batches of a log, the newest batch first.

    Parameters
    ----------
    wanted:
        Type of the events that are gathered -> the columns of its payload that are wanted. Reservations are among them.
    """

    def __init__(self, wanted: Mapping[type[e.Event], Sequence[str]]) -> None:
        self._wanted = wanted
        self._kept = {event_type: _no_rows(event_type, names) for event_type, names in wanted.items()}
        self._by_step = bool({e.StepApplied, e.GroupClaimed} & set(wanted))
        self._restored_seq = -1
        self._restored_step: int | None = None

    def add(self, batch: pa.RecordBatch) -> Iterator[GroupEvents]:
        """Take the next older batch, and yield the groups that begin in it."""
        # Which steps survive is not looked for where nothing depends on it.
        applied = self._applied(batch) if self._by_step else _applied_table(iter(()))
        found = {
            event_type: applied if event_type is e.StepApplied else _of_type(batch, event_type, names)
            for event_type, names in self._wanted.items()
        }
        yield from self._complete(found)

    def finish(self, beginning: Projection) -> Iterator[GroupEvents]:
        """Yield the groups that were drawn in dropped history, as far as they are still known."""
        records = [event for _, group in sorted(beginning.groups.items()) for event in _told(group)]
        found = {}
        for event_type, names in self._wanted.items():
            of_type = [(seq, event) for seq, event in records if isinstance(event, event_type)]
            rows = _rows(event_type, _batch(of_type), names)
            # Nobody knows when it was.
            times = pa.nulls(rows.num_rows, rows.schema.field("time").type)
            found[event_type] = rows.set_column(rows.schema.get_field_index("time"), "time", times)
        if e.StepApplied in found:
            found[e.StepApplied] = _applied_table(
                AppliedGroup(UNKNOWN_SEQ, None, group_id, step, place, self._survives(step))
                for step, group_ids in sorted(beginning.steps.items())
                for place, group_id in enumerate(group_ids)
            )
        yield from self._complete(found)

    def _complete(self, found: GroupEvents) -> Iterator[GroupEvents]:
        reserved = found[e.GroupReserved].column("group_id").combine_chunks()
        complete = {}
        for event_type, rows in found.items():
            if event_type is e.GroupClaimed:
                # A restart takes every claim back.
                rows = rows.filter(pc.greater(rows.column("seq"), self._restored_seq))
            both = pa.concat_tables([rows, self._kept[event_type]]).combine_chunks()
            begun = pc.is_in(both.column("group_id"), value_set=reserved)
            complete[event_type] = both.filter(begun)
            self._kept[event_type] = both.filter(pc.invert(begun))
        if len(reserved):
            yield complete

    def _applied(self, batch: pa.RecordBatch) -> pa.Table:
        """Return the groups of the steps of this batch, given the restarts in all newer ones."""
        rows: list[AppliedGroup] = []
        for record in reversed(list(read_events(batch.filter(is_of(batch, e.StepApplied, e.RunRestored))))):
            event = record.event
            if isinstance(event, e.RunRestored):
                self._restored_seq = max(self._restored_seq, record.seq)
                before = event.train_step if self._restored_step is None else self._restored_step
                self._restored_step = min(before, event.train_step)
            elif isinstance(event, e.StepApplied):
                step, surviving = event.train_step, self._survives(event.train_step)
                rows += [
                    AppliedGroup(record.seq, record.time_us, group_id, step, place, surviving)
                    for place, group_id in reversed(list(enumerate(event.group_ids)))
                ]
        return _applied_table(reversed(rows))

    def _survives(self, train_step: int) -> bool:
        return self._restored_step is None or train_step <= self._restored_step


def _columns_of(event_type: type[e.Event]) -> list[str]:
    own = event_type.__struct_fields__
    return ["seq", "epoch", "time", *(name for name in ENVELOPE_FIELDS if name in own)]


def _applied_table(rows: "Iterator[AppliedGroup]") -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(_APPLIED)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, _APPLIED, strict=True)]
    return pa.Table.from_arrays(arrays, schema=_APPLIED)


def _of_type(batch: pa.RecordBatch, event_type: type[e.Event], wanted: Sequence[str]) -> pa.Table:
    # Choosing rows takes time for every column of them.
    needed = batch if wanted else batch.select(_columns_of(event_type))
    return _rows(event_type, needed.filter(is_of(batch, event_type)), wanted)


def _rows(event_type: type[e.Event], rows: pa.RecordBatch, wanted: Sequence[str]) -> pa.Table:
    """Return the columns of events of one type: their place, the fields that are columns of the log, and those wanted."""
    columns = {name: rows.column(name) for name in _columns_of(event_type)}
    columns |= {name: columns[name].cast(pa.int64()) for name in ("seq", "epoch")}
    if "reason" in columns:
        columns["reason"] = columns["reason"].cast(pa.utf8())
    return pa.table(columns | payload_columns(event_type, rows, wanted))


def _no_rows(event_type: type[e.Event], wanted: Sequence[str]) -> pa.Table:
    if event_type is e.StepApplied:
        return _applied_table(iter(()))
    return _rows(event_type, _batch([]), wanted)


# ---- dropped history ---------------------------------------------------------------------------------------------


def _batch(events: Sequence[tuple[int, e.Event]]) -> pa.RecordBatch:
    schema = log_schema()
    rows = [(seq, 0, 0, *encode_event(event)) for seq, event in events]
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _told(group: GroupState) -> Iterator[tuple[int, e.Event]]:
    """Tell a group of dropped history as events: no more of them than its state proves."""
    group_id, unknown = group.group_id, UNKNOWN_SEQ
    reserved = e.GroupReserved(
        group_id=group_id,
        prompt=group.prompt,
        num_generations=group.num_generations,
        granularity=group.granularity,
        retry_budget=group.retry_budget,
        weight_version=group.weight_version,
        train_step=group.train_step,
        draw_cursor=group.prompt.draw_index + 1,
    )
    yield unknown, reserved
    if group.phase is not GroupPhase.RESERVED:
        yield unknown, e.GroupAdmitted(group_id=group_id)
    for _, sibling in sorted(group.siblings.items()):
        yield from _told_sibling(group, sibling)
    match group.phase:
        case GroupPhase.FINALIZING:
            yield unknown, e.FinalizeStarted(group_id=group_id)
        case GroupPhase.PARKED:
            assert group.parked_reason is not None
            yield unknown, e.GroupParked(group_id=group_id, reason=group.parked_reason)
    if group.rows:
        finalized = e.GroupFinalized(group_id=group_id, rows=group.rows, valid_fraction=group.valid_fraction)
        yield group.finalized_seq, finalized
    if group.phase is GroupPhase.CLAIMED and group.claimed_step is not None:
        yield unknown, e.GroupClaimed(group_id=group_id, train_step=group.claimed_step)


def _told_sibling(group: GroupState, sibling: SiblingState) -> Iterator[tuple[int, e.Event]]:
    if not sibling.attempt:
        return
    group_id, generation, attempt = group.group_id, sibling.generation, sibling.attempt
    # Who ran it, with which weights, is gone.
    yield (
        UNKNOWN_SEQ,
        e.SiblingDispatched(
            group_id=group_id, generation=generation, attempt=attempt, weight_version=-1, worker="", seed=-1
        ),
    )
    if sibling.sealed is not None:
        yield sibling.sealed_seq, sibling.sealed
    elif sibling.waiting and group.phase is not GroupPhase.PARKED and sibling.last_reason is not None:
        yield (
            UNKNOWN_SEQ,
            e.AttemptSuperseded(
                group_id=group_id, generation=generation, attempt=attempt, reason=sibling.last_reason
            ),
        )
