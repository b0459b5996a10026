"""Reading views from a log: all that are wanted in one pass, and only what their wanted columns need."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import pyarrow as pa

from kinlog.lineage.scan import LogScan
from kinlog.replay.settled import check_readable
from kinlog.replay.views.attempts import (
    ATTEMPT_PAYLOADS,
    SIBLING_EVENTS,
    SIBLING_PAYLOADS,
    Attempts,
    Siblings,
)
from kinlog.replay.views.catalogue import VIEWS
from kinlog.replay.views.events import event_batches
from kinlog.replay.views.group_history import GroupEvents, GroupHistories
from kinlog.replay.views.groups import GROUP_EVENTS, GROUP_PAYLOADS, Groups
from kinlog.replay.views.run import RUN_VIEWS, RunEvents, run_view
from kinlog.schemas import events as e

__all__ = ["dropped_note", "read_view", "read_views", "view_table"]


class _GroupView(NamedTuple):
    """A view whose rows are known as soon as all of a group is."""

    rows: Callable[[GroupEvents], Groups | Siblings | Attempts]
    events: tuple[type[e.Event], ...]
    payloads: Mapping[str, Sequence[tuple[type[e.Event], str]]]
    """Column -> what it needs decoded."""


_GROUP_VIEWS = {
    "groups": _GroupView(Groups, GROUP_EVENTS, GROUP_PAYLOADS),
    "siblings": _GroupView(Siblings, SIBLING_EVENTS, SIBLING_PAYLOADS),
    "attempts": _GroupView(Attempts, (*SIBLING_EVENTS, e.LateResultRejected), ATTEMPT_PAYLOADS),
}


def read_views(
    scan: LogScan, wanted: Mapping[str, Sequence[str] | None]
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield the rows of several views, batch by batch, each with the name of its view.

    The log is read once, backwards, and once more for ``events``, which come in the order of the log. In memory are a
    segment of it, what was alive at a time, and for ``steps``, ``step_groups``, ``checkpoints`` and ``lives`` the view.

    Parameters
    ----------
    wanted:
        View -> its columns that are wanted, ``None`` for all.

    Raises
    ------
    LogUnsupportedError
        An event was written by a newer kinlog.
    LogDamagedError
        A compacted segment is not what was written.
    """
    columns = {name: tuple(VIEWS[name].names if names is None else names) for name, names in wanted.items()}
    if set(columns) - {"events"}:
        yield from _read_backwards(scan, columns)
    if "events" in columns:
        for batch in event_batches(scan, columns["events"]):
            yield "events", batch


def read_view(scan: LogScan, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one view, batch by batch: see :func:`read_views`."""
    return (batch for _, batch in read_views(scan, {name: columns}))


def view_table(scan: LogScan, name: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Return a view as one table, for a program that has the memory for it."""
    wanted = VIEWS[name].names if columns is None else tuple(columns)
    return pa.Table.from_batches(read_view(scan, name, wanted), VIEWS[name].schema(wanted))


def dropped_note(scan: LogScan) -> str:
    """Return what the views lack of a log whose first events were dropped; empty when it has all of them."""
    if scan.base is None:
        return ""
    return (
        f"the events up to seq {scan.first_seq - 1} were dropped (log.history: drop): groups and steps that no kept "
        "checkpoint could bring back by then are in no view, and of the others only the last state is known"
    )


def _read_backwards(
    scan: LogScan, columns: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, pa.RecordBatch]]:
    of_groups = {name: names for name, names in columns.items() if name in _GROUP_VIEWS}
    of_run = [name for name in columns if name in RUN_VIEWS]
    histories = GroupHistories(_needed(of_groups)) if of_groups else None
    run = RunEvents(of_run)
    for batch in scan.batches(newest_first=True):
        check_readable(batch)
        run.add(batch)
        if histories is not None:
            for complete in histories.add(batch):
                yield from _group_batches(complete, of_groups)
    beginning = scan.beginning()
    if histories is not None:
        for complete in histories.finish(beginning):
            yield from _group_batches(complete, of_groups)
    for name in of_run:
        for batch in run_view(name, run.records, beginning).select(columns[name]).to_batches():
            yield name, batch


def _needed(of_groups: Mapping[str, Iterable[str]]) -> dict[type[e.Event], list[str]]:
    """Return the events that these columns are made of, and what is to be decoded of their payloads."""
    needed: dict[type[e.Event], list[str]] = {}
    for view, names in of_groups.items():
        _, events, payloads = _GROUP_VIEWS[view]
        for event_type in events:
            needed.setdefault(event_type, [])
        # How many siblings there are is not in any of their own columns.
        always: list[tuple[type[e.Event], str]] = (
            [(e.GroupReserved, "num_generations")] if view == "siblings" else []
        )
        for event_type, column in chain(always, *(payloads.get(name, ()) for name in names)):
            if column not in needed[event_type]:
                needed[event_type].append(column)
    return needed


def _group_batches(
    complete: GroupEvents, of_groups: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, pa.RecordBatch]]:
    for view, names in of_groups.items():
        rows = _GROUP_VIEWS[view].rows(complete)
        if rows.num_rows:
            schema = VIEWS[view].schema(names)
            arrays = [rows.column(name).cast(schema.field(name).type) for name in names]
            yield view, pa.RecordBatch.from_arrays(arrays, schema=schema)
