"""What is in a log's files and in no history: intact frames behind a gap, past a take-over, or in a segment that does not
belong.

They verify byte by byte, but what came before them is missing: they can be shown and counted, not replayed.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec
import pyarrow as pa

from kinlog.lineage.frame import PLACEHOLDER, FrameHeader, find_header, verify_frame
from kinlog.lineage.reading import ignorable_kinds, read_events
from kinlog.replay.rendering import JsonValue, event_object
from kinlog.schemas.errors import LogUnsupportedError
from kinlog.schemas.events import PassedOver, RecordedEvent, RowsCleared, StepApplied, kind_of

__all__ = [
    "LeftOut",
    "Region",
    "UnreadEvent",
    "Why",
    "intact_frames",
    "joined_ranges",
    "left_out_object",
    "read_region",
    "tally",
]


class Why(StrEnum):
    """Why a part of a file is in no history."""

    DAMAGED = "damaged"
    """It begins with bytes that are not what was written."""
    BEHIND_GAP = "behind the gap"
    """It may be as it was written, and what came before it is missing."""
    MISFIT = "does not fit"
    """It verifies, and its events cannot follow those before them."""
    TORN = "torn"
    """A write that was cut short: it had not been acknowledged."""
    FENCED = "fenced"
    """An older writer's, past a take-over."""
    FOREIGN = "of another log"


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a file that is in no history, and what can still be read of it."""

    segment: str
    offset_bytes: int
    size_bytes: int
    """Without the zeros at its end, which are preallocated space."""
    why: Why
    frames: int
    """Frames in it that verify. All else is unreadable."""
    events: int
    seqs: tuple[tuple[int, int], ...]
    """First and last seq of each unbroken run of its events."""
    kinds: dict[str, int]
    groups: tuple[int, ...]
    """Groups that its events name."""


class UnreadEvent(NamedTuple):
    """An event whose row verifies and that this kinlog cannot decode."""

    seq: int
    epoch: int
    kind: str
    problem: str


class Region(NamedTuple):
    """A part of a segment, from an offset to its end."""

    data: memoryview
    offset: int
    prefix: memoryview | None
    """The Arrow schema and dictionaries that its frames were written with; ``None`` when they are lost."""

    @property
    def content(self) -> bytes:
        return bytes(self.data[self.offset :]).rstrip(b"\0")


def read_region(region: Region) -> tuple[list[FrameHeader], Iterator["RecordedEvent | UnreadEvent"]]:
    """Find the intact frames of a region, and decode their events, lazily."""
    frames = list(intact_frames(region.data, region.offset))
    return frames, _events(region, frames)


def intact_frames(data: memoryview, start: int) -> Iterator[FrameHeader]:
    """Yield the frames with events that verify at or after ``start``, each at the offset that it names itself."""
    at = start
    while (found := find_header(data, at)) is not None:
        position, header = found
        intact = verify_frame(data, header.offset) if at <= header.offset <= position else None
        if intact is not None and intact.num_events:
            yield intact
        at = position + len(PLACEHOLDER) if intact is None else intact.end


def _events(region: Region, frames: Sequence[FrameHeader]) -> Iterator["RecordedEvent | UnreadEvent"]:
    if region.prefix is None or not frames:
        return
    stream = bytes(region.prefix) + b"".join(bytes(region.data[f.offset : f.end]) for f in frames)
    with pa.ipc.open_stream(pa.py_buffer(stream)) as reader:
        ignorable = ignorable_kinds(reader.schema)
        for batch in reader:
            try:
                # A frame that somebody put here from elsewhere verifies too, and may refer to other dictionaries.
                batch.validate(full=True)
                yield from list(read_events(batch, ignorable))
            except pa.ArrowInvalid:
                continue
            except LogUnsupportedError:
                yield from _one_by_one(batch, ignorable)


def _one_by_one(batch: pa.RecordBatch, ignorable: frozenset[str]) -> "Iterator[RecordedEvent | UnreadEvent]":
    for place in range(batch.num_rows):
        row = batch.slice(place, 1)
        try:
            yield from read_events(row, ignorable)
        except LogUnsupportedError as error:
            seq, epoch, kind = (row.column(name)[0].as_py() for name in ("seq", "epoch", "kind"))
            yield UnreadEvent(seq, epoch, kind, str(error))


def tally(
    segment: str,
    region: Region,
    why: Why,
    frames: Sequence[FrameHeader],
    events: Iterable["RecordedEvent | UnreadEvent"],
) -> LeftOut:
    """Count what a region holds."""
    kinds: Counter[str] = Counter()
    groups: set[int] = set()
    for event in events:
        kinds[_kind(event)] += 1
        if isinstance(event, RecordedEvent):
            groups.update(_groups(event))
    return LeftOut(
        segment=segment,
        offset_bytes=region.offset,
        size_bytes=len(region.content),
        why=why,
        frames=len(frames),
        events=sum(frame.num_events for frame in frames),
        seqs=joined_ranges((frame.first_seq, frame.last_seq) for frame in frames),
        kinds=dict(sorted(kinds.items())),
        groups=tuple(sorted(groups)),
    )


def joined_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return ranges (first and last included) in order, those that touch or overlap made one."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return tuple(joined)


def left_out_object(segment: str, event: "RecordedEvent | UnreadEvent") -> dict[str, JsonValue]:
    """Return an event that is in no history as a JSON object."""
    if isinstance(event, UnreadEvent):
        return {
            "segment": segment,
            "seq": event.seq,
            "epoch": event.epoch,
            "kind": event.kind,
            "problem": event.problem,
        }
    return {"segment": segment, **event_object(event)}


def _kind(event: "RecordedEvent | UnreadEvent") -> str:
    if isinstance(event, UnreadEvent):
        return event.kind
    if isinstance(event.event, PassedOver):
        return event.event.original_kind
    return kind_of(type(event.event))


def _groups(record: RecordedEvent) -> tuple[int, ...]:
    event = record.event
    if isinstance(event, StepApplied | RowsCleared):
        return event.group_ids
    group_id = getattr(event, "group_id", None)
    return () if group_id is None else (group_id,)
