"""Compaction: closed segments rewritten as few, compressed ones, and history dropped where the policy says so.

A compacted segment is built under another name, made durable, read back, and compared with what it stands for, column by
column and event by event; then one rename makes it count. What it stands for goes to trash after that, the oldest first:
a writer that was taken over long ago finds either the segment of the epoch that fenced it, or its own one gone.

Only what no one writes any more is rewritten: the newest segment never is. Nor is a segment with the place of a
checkpoint inside, which a restart compares with the log to the last bit.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa

from kinlog.lineage.base import decode_base, encode_base
from kinlog.lineage.chain import ScannedSegment
from kinlog.lineage.compacted import encode_compacted
from kinlog.lineage.fold import FOLD_VERSION, fold
from kinlog.lineage.names import (
    TEMPORARY_PREFIX,
    base_name,
    compacted_name,
    log_files,
)
from kinlog.lineage.reading import read_batches
from kinlog.lineage.replacement import clear_leavings, replace_files, same_events
from kinlog.lineage.scan import LogScan, scan_log
from kinlog.lineage.segment import COMPACTED_FEATURE, Replaced, SegmentEnd, SegmentInfo, scan_segment
from kinlog.lineage.state import Projection
from kinlog.lineage.store import Store, write_durably
from kinlog.schemas.errors import LogDamagedError
from kinlog.schemas.events import Position

__all__ = ["Compaction", "choose_groups", "compact_log", "folded_through"]

#: Events of one compacted segment at most, so that rewriting it stays a matter of a second and of little memory.
_MAX_GROUP_EVENTS = 512 * 1024
#: A segment's schema and its metadata are smaller than this.
_SCHEMA_BYTES = 64 * 1024


class Compaction(NamedTuple):
    """What a compaction did."""

    segments_replaced: int
    events_rewritten: int
    dropped_through_seq: int
    """The last event that was dropped for good; 0 when none was."""


def folded_through(scan: LogScan, through_seq: int) -> Projection:
    """Return the projection of a log as of ``through_seq``, folded event by event."""
    projection = scan.beginning()
    for record in scan.events(projection.last_seq, through_seq=through_seq):
        fold(projection, record)
    return projection


def compact_log(
    store: Store,
    directory: Path,
    *,
    epoch: int,
    checkpoints: Sequence[Position],
    drop_through_seq: int = 0,
    project: Callable[[LogScan, int], Projection] = folded_through,
) -> Compaction:
    """Compact a log that this process writes. Its writer may go on meanwhile.

    Parameters
    ----------
    epoch:
        The epoch that this process writes.
    checkpoints:
        The places of all checkpoints that there are: a segment that has one inside stays as it is.
    drop_through_seq:
        Events up to here are dropped, as far as whole segments go; 0 to drop none. No checkpoint may lie before it.
    project:
        Returns the projection of a log as of an event: for who knows a faster way.

    Raises
    ------
    WriterFencedError
        A newer writer has taken over: compaction is its business now.
    LogDamagedError
        What was read is not what was written; nothing was replaced by it.
    OSError
        The disk is full or fails; nothing is lost.
    """
    clear_leavings(store, directory, epoch)
    try:
        scan = scan_log(directory, store=store)
        dropped = _droppable(scan, drop_through_seq)
        if dropped:
            _drop(scan, dropped, project(scan, dropped[-1].end.seq), epoch)
            scan = scan_log(directory, store=store, known=scan)
        replaced, rewritten = _compact(scan, checkpoints, epoch)
        return Compaction(replaced, rewritten, dropped[-1].end.seq if dropped else 0)
    except OSError:
        # On a full disk, what is half-built takes the space that the log's writer needs.
        with suppress(OSError):
            clear_leavings(store, directory, epoch)
        raise


def _compact(scan: LogScan, checkpoints: Sequence[Position], epoch: int) -> tuple[int, int]:
    """Rewrite what can be; returns how many segments and events."""
    replaced = rewritten = 0
    for run in _runs(scan, checkpoints):
        for group in choose_groups(run):
            if len(group) > 1 or not group[0].compacted:
                _rewrite(scan, group, epoch)
                replaced += len(group)
                rewritten += sum(map(_num_events, group))
    return replaced, rewritten


# ---- choosing ---------------------------------------------------------------------------------------------------


def choose_groups(run: Sequence[ScannedSegment]) -> list[list[ScannedSegment]]:
    """Split neighbouring segments into groups, each of which is to be one compacted segment.

    A group has more than twice the events of the one after it, unless both together would have too many: so there are
    few groups, and an event is rewritten only when what it is in has grown by half.
    """
    groups: list[list[ScannedSegment]] = []
    for segment in run:
        groups.append([segment])
        while len(groups) > 1 and _belong_together(groups[-2], groups[-1]):
            newer = groups.pop()
            groups[-1] += newer
    return groups


def _belong_together(older: list[ScannedSegment], newer: list[ScannedSegment]) -> bool:
    older_events, newer_events = sum(map(_num_events, older)), sum(map(_num_events, newer))
    return older_events <= 2 * newer_events and older_events + newer_events <= _MAX_GROUP_EVENTS


def _num_events(segment: ScannedSegment) -> int:
    return segment.end.seq + 1 - segment.info.first_seq


def _runs(scan: LogScan, checkpoints: Sequence[Position]) -> Iterator[list[ScannedSegment]]:
    """Yield the runs of neighbouring segments that may be rewritten as one."""
    marks = {(mark.seq, mark.checksum) for mark in checkpoints}
    run: list[ScannedSegment] = []
    for segment in scan.segments[:-1]:
        may_be_rewritten = _is_settled(scan, segment) and not _has_inside(segment, marks)
        if run and not (may_be_rewritten and _same_layout(scan, run[-1], segment)):
            yield run
            run = []
        if may_be_rewritten:
            run.append(segment)
        if run and (segment.end.seq, segment.end.checksum) in marks:
            yield run
            run = []
    if run:
        yield run


def _droppable(scan: LogScan, through_seq: int) -> list[ScannedSegment]:
    if through_seq == 0:
        return []  # also of a log whose first life left no event
    before = takewhile(lambda segment: segment.end.seq <= through_seq, scan.segments[:-1])
    return list(takewhile(lambda segment: _is_settled(scan, segment), before))


def _is_settled(scan: LogScan, segment: ScannedSegment) -> bool:
    """Whether nothing is left to be done about a segment. What is no part of history is put aside by the next opening."""
    stray = {stray.path for stray in scan.torn + scan.fenced}
    return segment.path not in stray and segment.scan.end in (SegmentEnd.CLOSED, SegmentEnd.LIVE)


def _has_inside(segment: ScannedSegment, marks: set[tuple[int, int]]) -> bool:
    return any((frame.last_seq, frame.checksum) in marks for frame in segment.frames[:-1])


def _same_layout(scan: LogScan, one: ScannedSegment, other: ScannedSegment) -> bool:
    """Whether what a segment says of its columns and payloads is true of both: writers of other versions say otherwise."""
    layouts = []
    for segment in (one, other):
        schema = pa.ipc.read_schema(pa.py_buffer(scan.store.read_part(segment.path, 0, _SCHEMA_BYTES)))
        metadata = {key: value for key, value in schema.metadata.items() if key != b"kinlog.segment"}
        layouts.append((schema.remove_metadata(), metadata))
    return layouts[0] == layouts[1]


# ---- rewriting --------------------------------------------------------------------------------------------------


def _rewrite(scan: LogScan, segments: Sequence[ScannedSegment], epoch: int) -> None:
    """Replace neighbouring segments by one compacted segment."""
    first, last = segments[0], segments[-1]
    info = SegmentInfo(
        log_id=scan.log_id,
        run_id=scan.run_id,
        epoch=first.info.epoch,
        index=first.info.index,
        first_seq=first.info.first_seq,
        previous=first.info.previous,
        writer_version=last.info.writer_version,
        required_features=(COMPACTED_FEATURE,),
        replaces=Replaced(last_epoch=_last_name(last)[0], last_index=_last_name(last)[1], end=last.end),
    )
    expected = _table(scan, segments)
    name = compacted_name((info.epoch, info.index), _last_name(last))
    temporary = scan.directory / f"{TEMPORARY_PREFIX}{name}"
    write_durably(scan.store, temporary, bytes(encode_compacted(expected, info)))
    _prove(scan.store, temporary, info, expected)
    replace_files(scan, temporary, name, {segment.path.name for segment in segments}, epoch)


def _last_name(segment: ScannedSegment) -> tuple[int, int]:
    """Return the epoch and index of the last segment that this one is or stands for."""
    replaces = segment.info.replaces
    if replaces is msgspec.UNSET:
        return segment.info.epoch, segment.info.index
    return replaces.last_epoch, replaces.last_index


def _table(scan: LogScan, segments: Sequence[ScannedSegment]) -> pa.Table:
    """Return all events of segments of one layout, with one dictionary for each column that has them."""
    schema = pa.ipc.read_schema(pa.py_buffer(scan.store.read_part(segments[0].path, 0, _SCHEMA_BYTES)))
    batches = [batch for segment in segments for batch in scan.read_segment(segment)]
    return pa.Table.from_batches(batches, schema=schema).unify_dictionaries().combine_chunks()


def _prove(store: Store, path: Path, info: SegmentInfo, expected: pa.Table) -> None:
    """Read a compacted segment back, and compare it with what it is to stand for, to the last event."""
    data = store.read(path)
    scan = scan_segment(data)
    assert info.replaces is not msgspec.UNSET
    whole = (
        scan.info == info
        and scan.end is SegmentEnd.CLOSED
        and scan.frames[-1].last_seq == info.replaces.end.seq
    )
    found = pa.Table.from_batches(read_batches(data, scan), schema=expected.schema)
    if not whole or not same_events(found, expected):
        raise LogDamagedError(
            "a compacted segment is not what was written",
            segment=path.name,
            offset_bytes=scan.end_offset,
            seq=info.first_seq - 1,
            expected=f"the {expected.num_rows} events that it is to stand for",
            found=f"{found.num_rows} events, some of which differ",
        )


# ---- dropping ---------------------------------------------------------------------------------------------------


def _drop(scan: LogScan, segments: Sequence[ScannedSegment], projection: Projection, epoch: int) -> None:
    """Replace the log's first segments by the projection that they amount to."""
    last = segments[-1]
    data = encode_base(
        projection, log_id=scan.log_id, run_id=scan.run_id, position=last.end, fold_version=FOLD_VERSION
    )
    name = base_name(_last_name(last))
    temporary = scan.directory / f"{TEMPORARY_PREFIX}{name}"
    write_durably(scan.store, temporary, data)
    if decode_base(bytes(scan.store.read(temporary))).decode() != projection:
        raise LogDamagedError(
            "a base is not what was written",
            segment=temporary.name,
            offset_bytes=0,
            seq=last.end.seq,
            expected=f"the projection at seq {last.end.seq}",
            found="another",
        )
    # An older base is dropped with what follows it.
    older = {file.name for file in log_files(scan.store.names(scan.directory)) if file.kind == "base"}
    replace_files(scan, temporary, name, older | {segment.path.name for segment in segments}, epoch)
