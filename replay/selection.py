"""Selecting events: by Arrow columns first, so that only what is asked for is decoded."""

from collections.abc import Iterator
from functools import reduce

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from kinlog.lineage.reading import ignorable_kinds, read_events
from kinlog.lineage.scan import LogScan
from kinlog.schemas.events import RecordedEvent, RowsCleared, StepApplied, kind_of
from kinlog.schemas.reasons import Reason

__all__ = ["EventFilter", "select_events"]

#: Kinds that name their groups in the payload: the story of a group is not whole without them.
_GROUP_LISTING_KINDS = (kind_of(StepApplied), kind_of(RowsCleared))


class EventFilter(msgspec.Struct, frozen=True, kw_only=True):
    """What to select: an event must fit every criterion that is given."""

    kinds: frozenset[str] = frozenset()
    group_id: int | None = None
    """Also selects applied steps and cleared rows that list the group."""
    generation: int | None = None
    train_step: int | None = None
    reasons: frozenset[Reason] = frozenset()
    epoch: int | None = None
    first_seq: int = 1
    last_seq: int | None = None

    @property
    def lists_groups(self) -> bool:
        """Whether events that list the group in their payload are wanted as well."""
        return self.group_id is not None and self.generation is None


def select_events(scan: LogScan, selection: EventFilter) -> Iterator[RecordedEvent]:
    """Yield the events that fit, in order.

    Raises
    ------
    LogUnsupportedError
        A selected event was written by a newer kinlog.
    """
    for batch in scan.batches(after_seq=selection.first_seq - 1):
        if selection.last_seq is not None and batch.column("seq")[0].as_py() > selection.last_seq:
            return
        for record in read_events(_filter(batch, selection), ignorable_kinds(batch.schema)):
            event = record.event
            if (
                selection.lists_groups
                and isinstance(event, StepApplied | RowsCleared)
                and selection.group_id not in event.group_ids
            ):
                continue
            yield record


def _filter(batch: pa.RecordBatch, selection: EventFilter) -> pa.RecordBatch:
    kinds = batch.column("kind").cast(pa.utf8())
    masks = []
    if selection.kinds:
        masks.append(pc.is_in(kinds, pa.array(sorted(selection.kinds), pa.utf8())))
    if selection.group_id is not None:
        of_group = pc.equal(batch.column("group_id"), selection.group_id)
        if selection.lists_groups:
            of_group = pc.or_kleene(of_group, pc.is_in(kinds, pa.array(_GROUP_LISTING_KINDS, pa.utf8())))
        masks.append(of_group)
    if selection.reasons:
        reasons = batch.column("reason").cast(pa.utf8())
        masks.append(pc.is_in(reasons, pa.array(sorted(selection.reasons), pa.utf8())))
    for name, wanted in (
        ("generation", selection.generation),
        ("train_step", selection.train_step),
        ("epoch", selection.epoch),
    ):
        if wanted is not None:
            masks.append(pc.equal(batch.column(name), wanted))
    if selection.last_seq is not None:
        masks.append(pc.less_equal(batch.column("seq"), selection.last_seq))
    if not masks:
        return batch
    # All masks are as long as the whole batch. A null means that the event has no such field: it does not fit.
    return batch.filter(reduce(pc.and_kleene, masks), null_selection_behavior="drop")
