"""Selecting events: by Arrow columns first, so that only what is asked for is decoded."""

from collections.abc import Iterator
from functools import reduce

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from kinlog.lineage.reading import Choice, ignorable_kinds, read_events
from kinlog.lineage.scan import LogScan
from kinlog.lineage.state import Projection
from kinlog.replay.payload_columns import payload_columns
from kinlog.replay.settled import is_of
from kinlog.schemas.codec import decode_field
from kinlog.schemas.columns import log_schema
from kinlog.schemas.events import Event, GroupReserved, RecordedEvent, RowsCleared, StepApplied, kind_of
from kinlog.schemas.reasons import Reason

__all__ = ["EventFilter", "Selector", "may_list", "select_events"]

#: Kinds that name their groups in the payload: the story of a group is not whole without them.
_GROUP_LISTING_TYPES = (StepApplied, RowsCleared)


class EventFilter(msgspec.Struct, frozen=True, kw_only=True):
    """What to select: an event must fit every criterion that is given."""

    kinds: frozenset[str] = frozenset()
    group_id: int | None = None
    """Also selects applied steps and cleared rows that list the group."""
    sample_id: str | None = None
    """The groups that were drawn from this sample, as if each had been asked for."""
    generation: int | None = None
    train_step: int | None = None
    reasons: frozenset[Reason] = frozenset()
    epoch: int | None = None
    first_seq: int = 1
    last_seq: int | None = None
    since_us: int | None = None
    """Wall clock of the writer, microseconds since 1970-01-01 UTC: at or after it."""
    until_us: int | None = None
    """At or before it."""

    @property
    def of_groups(self) -> bool:
        """Whether the events of some groups only are wanted."""
        return self.group_id is not None or self.sample_id is not None

    @property
    def lists_groups(self) -> bool:
        """Whether events that list a group in their payload are wanted as well."""
        wanted = {kind_of(event_type) for event_type in _GROUP_LISTING_TYPES}
        return self.of_groups and self.generation is None and (not self.kinds or bool(self.kinds & wanted))

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the log that decide."""
        if self.sample_id is not None:
            return tuple(log_schema().names)  # reservations are decoded
        names = {
            "kind": self.kinds or self.lists_groups,
            "version": self.lists_groups,
            "group_id": self.of_groups,
            "payload": self.lists_groups,
            "generation": self.generation is not None,
            "train_step": self.train_step is not None,
            "reason": self.reasons,
            "epoch": self.epoch is not None,
            "time": self.since_us is not None or self.until_us is not None,
        }
        return tuple(name for name, wanted in names.items() if wanted)


def select_events(scan: LogScan, selection: EventFilter) -> Iterator[RecordedEvent]:
    """Yield the events that fit, in order.

    Raises
    ------
    LogUnsupportedError
        A selected event was written by a newer kinlog.
    """
    return Selector(selection, scan.beginning()).events(scan)


class Selector:
    """Selects events of a log that may be read in several goes, each from where the one before it ended.

    Parameters
    ----------
    beginning:
        What the log begins at: groups that were reserved before it are known from there.
    """

    def __init__(self, selection: EventFilter, beginning: Projection) -> None:
        self._selection = selection
        self._groups: set[int] = set()
        """Those that events are wanted of; the ones of a sample as they are found."""
        if selection.sample_id is not None:
            states = beginning.groups.values()
            self._groups = {g.group_id for g in states if g.prompt.sample_id == selection.sample_id}
        elif selection.group_id is not None:
            self._groups = {selection.group_id}
        self._met = selection.group_id is not None and selection.group_id < beginning.next_group_id
        """Whether the reservation of one of them may have passed: before it, nothing lists them."""

    def events(self, scan: LogScan, after_seq: int = 0) -> Iterator[RecordedEvent]:
        """Yield the events past ``after_seq`` that fit, in order."""
        wanted = self._selection
        # Which groups were drawn from a sample is known from their reservations only, wherever those are.
        first_seq = wanted.first_seq if wanted.sample_id is None else 1
        self._met |= after_seq > 0 or first_seq > 1
        choice = Choice(wanted.columns, self._fits) if wanted.columns else None
        batches = scan.batches(max(after_seq, first_seq - 1), through_seq=wanted.last_seq, choice=choice)
        for batch in batches:
            yield from self._read(batch)

    def events_of(self, batch: pa.RecordBatch) -> Iterator[RecordedEvent]:
        """Yield the events of a batch that fit. It goes on from where what was read before ended."""
        wanted = self._selection
        fits = pc.greater_equal(batch.column("seq"), wanted.first_seq)
        if wanted.last_seq is not None:
            fits = pc.and_(fits, pc.less_equal(batch.column("seq"), wanted.last_seq))
        if wanted.columns:
            fits = pc.and_(fits, self._fits(batch))
        yield from self._read(batch.filter(fits))

    def _read(self, batch: pa.RecordBatch) -> Iterator[RecordedEvent]:
        for record in read_events(batch, ignorable_kinds(batch.schema)):
            if not self._selection.lists_groups or _lists(record.event, self._groups):
                yield record

    def _fits(self, batch: pa.RecordBatch) -> pa.Array:
        wanted = self._selection
        masks = []
        if wanted.sample_id is not None:
            drawn = _drawn_from(batch, wanted.sample_id)
            self._groups |= drawn if wanted.group_id is None else drawn & {wanted.group_id}
            masks.append(pc.greater_equal(batch.column("seq"), wanted.first_seq))
        if wanted.of_groups:
            masks.append(self._is_of_groups(batch))
        for name, names in (("kind", wanted.kinds), ("reason", {reason.value for reason in wanted.reasons})):
            if names:
                masks.append(_is_named(batch.column(name), names))
        for name, number in (
            ("generation", wanted.generation),
            ("train_step", wanted.train_step),
            ("epoch", wanted.epoch),
        ):
            if number is not None:
                masks.append(pc.equal(batch.column(name), number))
        if wanted.since_us is not None:
            masks.append(pc.greater_equal(batch.column("time").cast(pa.int64()), wanted.since_us))
        if wanted.until_us is not None:
            masks.append(pc.less_equal(batch.column("time").cast(pa.int64()), wanted.until_us))
        # A null means that the event has no such field: it does not fit.
        return pc.fill_null(reduce(pc.and_kleene, masks), fill_value=False)

    def _is_of_groups(self, batch: pa.RecordBatch) -> pa.Array:
        fits = pc.is_in(batch.column("group_id"), pa.array(sorted(self._groups), pa.int64()))
        self._met |= fits.true_count > 0
        if self._selection.lists_groups and self._met:
            for event_type in _GROUP_LISTING_TYPES:
                fits = pc.or_(fits, may_list(batch, event_type, self._groups))
        return fits


def may_list(batch: pa.RecordBatch, event_type: type[Event], group_ids: set[int]) -> pa.Array:
    """Return for each row whether it is an event of this type that lists one of the groups in its payload, or may do so:
    it was written by an older kinlog.

    The batch has at least the columns ``kind``, ``version`` and ``payload``.
    """
    of_type = is_of(batch, event_type)
    present = pc.and_(of_type, pc.equal(batch.column("version"), event_type.VERSION))
    payloads = batch.column("payload").filter(present).to_pylist()
    listed = decode_field(event_type, "group_ids", payloads)
    found = pa.array([not group_ids.isdisjoint(ids) for ids in listed], pa.bool_())
    return pc.replace_with_mask(of_type, present, found)


def _lists(event: Event, group_ids: set[int]) -> bool:
    return not isinstance(event, _GROUP_LISTING_TYPES) or not group_ids.isdisjoint(event.group_ids)


def _drawn_from(batch: pa.RecordBatch, sample_id: str) -> set[int]:
    """Return the groups that are reserved in a batch for a sample."""
    reserved = batch.filter(is_of(batch, GroupReserved))
    samples = payload_columns(GroupReserved, reserved, ("sample_id",))["sample_id"]
    return set(reserved.column("group_id").filter(pc.equal(samples, sample_id)).to_pylist())


def _is_named(column: pa.DictionaryArray, names: set[str] | frozenset[str]) -> pa.Array:
    codes = [code for code, name in enumerate(column.dictionary.to_pylist()) if name in names]
    return pc.is_in(column.indices, pa.array(codes, column.indices.type))
