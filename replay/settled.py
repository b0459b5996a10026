"""Replay by columns: of groups that are settled by the end of a log, only the numbers that they leave behind are read.

A group is settled once it was dropped, or applied and let go of by a checkpoint: the projection has forgotten it, and
what is left of it is counted. Nearly all groups of a long run are. Their events are never decoded; those of all other
groups, and those of the run itself, are folded one by one, by the one transition function.

The log is read backwards, a segment at a time, because what settles a group comes after all else that is recorded of it.

Whether the events of a settled group told a possible story is not looked at: the writer folded each of them before it was
appended. ``replay`` looks at every event, and so does ``kinlog log verify``.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from kinlog.lineage.fold import changes_state, fold
from kinlog.lineage.reading import ignorable_kinds, read_events
from kinlog.lineage.state import Projection
from kinlog.replay.payload_columns import payload_columns
from kinlog.schemas import events as e
from kinlog.schemas.errors import TransitionError
from kinlog.schemas.reasons import Reason

__all__ = ["SealedTokens", "check_readable", "count_reasons", "is_of", "replay_newest_first"]


class SealedTokens(NamedTuple):
    """Completion tokens of some seals, and how many of them earlier attempts had generated."""

    completion: int
    resumed: int

    @classmethod
    def summed(cls, completion_tokens: pa.Array, resumed_tokens: pa.Array) -> "SealedTokens":
        return cls(pc.sum(completion_tokens).as_py() or 0, pc.sum(resumed_tokens).as_py() or 0)


def replay_newest_first(
    batches: Iterable[pa.RecordBatch],
    projection: Projection,
    *,
    sealed_tokens: Callable[[pa.RecordBatch], SealedTokens] | None = None,
) -> Projection:
    """Bring ``projection`` (in place) to the end of the events that follow it.

    Parameters
    ----------
    batches:
        All of these events, as record batches of the log. The newest batch comes first; inside of a batch the oldest
        event does.
    sealed_tokens:
        Returns the sums over some of the last batch's seals: for who has decoded them anyway.

    Raises
    ------
    TransitionError
        The events do not follow the projection, or those that are not of settled groups tell an impossible story.
    LogUnsupportedError
        An event was written by a newer kinlog.
    """
    settled = _Settled(projection, sealed_tokens or _sealed_tokens)
    kept = [settled.take(batch) for batch in batches]
    settled.check_whole(projection)
    for batch in reversed(kept):
        for record in read_events(batch, ignorable_kinds(batch.schema)):
            _fold_kept(projection, record, settled.group_ids)
    settled.leave_numbers(projection)
    return projection


def _fold_kept(p: Projection, record: e.RecordedEvent, settled: set[int]) -> None:
    """Fold an event as if the settled groups had never been, but for the numbers that they took."""
    event = record.event
    if isinstance(event, e.GroupReserved):
        p.next_group_id, p.draw_cursor = event.group_id, event.draw_cursor - 1
    elif isinstance(event, e.StepApplied):
        group_ids = tuple(group_id for group_id in event.group_ids if group_id not in settled)
        record = e.RecordedEvent(
            record.seq, record.epoch, record.time_us, msgspec.structs.replace(event, group_ids=group_ids)
        )
    p.last_seq = record.seq - 1
    fold(p, record)


class _Settled:
    """The groups that were reserved after ``start`` and are settled, and what is counted of them."""

    def __init__(self, start: Projection, sealed_tokens: Callable[[pa.RecordBatch], SealedTokens]) -> None:
        self._sum_sealed_tokens = sealed_tokens
        self.group_ids: set[int] = set()
        # Groups of the projection that is gone on from are folded, whatever becomes of them.
        self._first_group = start.next_group_id
        self._frontier_step = start.frontier_step
        self._frontier_seq = 0
        self._steps: set[int] = set()
        self._last_reserved: e.GroupReserved | None = None
        self._first_seq: int | None = None
        self._end: tuple[int, int] | None = None
        self._applied = self._sealed = self._sealed_tokens = self._resumed_tokens = self._late = 0
        self._places: Counter[int] = Counter()
        self._dropped: Counter[Reason] = Counter()
        self._superseded: Counter[Reason] = Counter()

    def take(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Count the events of settled groups in the next older batch, and return those that are to be folded."""
        check_readable(batch)
        first, last = batch.column("seq")[0].as_py(), batch.column("seq")[-1].as_py()
        if self._end is None:
            self._end = last, batch.column("epoch")[-1].as_py()
        elif last + 1 != self._first_seq:
            raise TransitionError(f"event seq {self._first_seq} does not follow seq {last}")
        self._first_seq = first
        self._settle(batch)
        # Null for events of no group, which are of no settled one either.
        here = set(pc.unique(batch.column("group_id")).to_pylist())
        settled = pa.array(here & self.group_ids, pa.int64())
        of_settled = pc.is_in(batch.column("group_id"), value_set=settled)
        self._count(batch.filter(pc.and_(of_settled, is_of(batch, *_COUNTED))))
        to_fold = pc.and_(is_of(batch, *_FOLDED), pc.invert(of_settled))
        return batch.filter(to_fold)

    def check_whole(self, start: Projection) -> None:
        """Compare where the oldest batch begins with where the projection stands."""
        if self._first_seq not in (None, start.last_seq + 1):
            raise TransitionError(f"event seq {self._first_seq} does not follow seq {start.last_seq}")

    def _settle(self, batch: pa.RecordBatch) -> None:
        """Find the groups that events of this batch settle, given those of all newer batches."""
        dropped = batch.filter(is_of(batch, e.GroupDropped)).column("group_id").to_pylist()
        self.group_ids.update(group_id for group_id in dropped if group_id >= self._first_group)
        steps_and_frontiers = batch.filter(is_of(batch, e.StepApplied, e.CheckpointCommitted))
        for record in reversed(list(read_events(steps_and_frontiers))):
            event = record.event
            if isinstance(event, e.CheckpointCommitted) and not self._frontier_seq:
                # It only ever moves on, so the newest checkpoint's is the one that counts.
                self._frontier_step, self._frontier_seq = event.frontier_step, record.seq
            elif isinstance(event, e.StepApplied) and event.train_step not in self._steps:
                # Only the last of several times that a step was applied was not undone.
                self._steps.add(event.train_step)
                if event.train_step <= self._frontier_step:
                    applied = {group_id for group_id in event.group_ids if group_id >= self._first_group}
                    self.group_ids |= applied
                    self._applied += len(applied)
        if self._last_reserved is None:
            reserved = batch.filter(is_of(batch, e.GroupReserved))
            for record in read_events(reserved.slice(max(0, reserved.num_rows - 1))):
                assert isinstance(record.event, e.GroupReserved)
                self._last_reserved = record.event

    def _count(self, rows: pa.RecordBatch) -> None:
        sealed = rows.filter(is_of(rows, e.SiblingSealed))
        self._sealed += sealed.num_rows
        tokens = self._sum_sealed_tokens(sealed)
        self._sealed_tokens += tokens.completion
        self._resumed_tokens += tokens.resumed
        self._late += pc.sum(is_of(rows, e.LateResultRejected)).as_py() or 0
        self._dropped.update(count_reasons(rows.filter(is_of(rows, e.GroupDropped))))
        self._superseded.update(count_reasons(rows.filter(is_of(rows, e.AttemptSuperseded))))
        reserved = rows.filter(is_of(rows, e.GroupReserved))
        steps, seqs = reserved.column("train_step").to_pylist(), reserved.column("seq").to_pylist()
        self._places.update(
            step
            for step, seq in zip(steps, seqs, strict=True)
            if step is not None and (step > self._frontier_step or seq > self._frontier_seq)
        )

    def leave_numbers(self, p: Projection) -> None:
        """Add what the settled groups leave behind to a projection into which all else was folded."""
        if self._end is None:
            return
        p.last_seq, p.last_epoch = self._end
        if self._last_reserved is not None:
            p.next_group_id = self._last_reserved.group_id + 1
            p.draw_cursor = self._last_reserved.draw_cursor
        p.applied_forgotten += self._applied
        p.sealed_total += self._sealed
        p.sealed_tokens_total += self._sealed_tokens
        p.resumed_tokens_total += self._resumed_tokens
        p.late_rejected += self._late
        p.places = dict(Counter(p.places) + self._places)
        p.dropped = dict(Counter(p.dropped) + self._dropped)
        p.superseded = dict(Counter(p.superseded) + self._superseded)


#: What leaves a number behind.
_COUNTED = (
    e.SiblingSealed,
    e.LateResultRejected,
    e.GroupDropped,
    e.AttemptSuperseded,
    e.GroupReserved,
)
_FOLDED = tuple(event_type for event_type in e.EVENT_TYPES.values() if changes_state(event_type))


def is_of(rows: pa.RecordBatch, *event_types: type[e.Event]) -> pa.Array:
    """Return for each row whether its event is of one of these types."""
    kinds = rows.column("kind")
    wanted = {e.kind_of(event_type) for event_type in event_types}
    codes = [code for code, name in enumerate(kinds.dictionary.to_pylist()) if name in wanted]
    return pc.is_in(kinds.indices, value_set=pa.array(codes, kinds.indices.type))


def count_reasons(rows: pa.RecordBatch) -> dict[Reason, int]:
    """Return how many of the rows have each reason."""
    counted = pc.value_counts(rows.column("reason").cast(pa.utf8()))
    return {Reason(one["values"]): one["counts"] for one in counted.to_pylist()}


def _sealed_tokens(sealed: pa.RecordBatch) -> SealedTokens:
    columns = payload_columns(e.SiblingSealed, sealed, ("completion_tokens", "resumed_tokens"))
    return SealedTokens.summed(columns["completion_tokens"], columns["resumed_tokens"])


def check_readable(batch: pa.RecordBatch) -> None:
    """Refuse what decoding every event would refuse, kinds, versions and reasons of a newer kinlog, by decoding one of
    each."""
    kinds, reasons = batch.column("kind").indices, batch.column("reason").indices
    sorts = pc.add(pc.multiply(kinds.cast(pa.int64()), 256), batch.column("version").cast(pa.int64()))
    sorts = pc.add(pc.multiply(sorts, 256), reasons.fill_null(-1).cast(pa.int64()))
    places = [pc.index(sorts, sort).as_py() for sort in pc.unique(sorts)]
    for _ in read_events(batch.take(pa.array(places, pa.int64())), ignorable_kinds(batch.schema)):
        pass
