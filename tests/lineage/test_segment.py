"""A segment is an ordinary Arrow stream, live or closed, and says exactly how its valid frames end."""

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinlog_builders import numbered
from kinlog_strategies import any_events

from kinlog.lineage import column_buffers
from kinlog.lineage import encoder as encoder_module
from kinlog.lineage.encoder import FrameEncoder
from kinlog.lineage.fold import fold
from kinlog.lineage.reading import read_batches, read_events
from kinlog.lineage.segment import (
    END_OF_STREAM,
    FORMAT_VERSION,
    SegmentEnd,
    SegmentInfo,
    parse_segment_name,
    scan_segment,
    segment_name,
)
from kinlog.lineage.state import Projection
from kinlog.schemas import events as e
from kinlog.schemas.codec import encode_event
from kinlog.schemas.errors import LogUnsupportedError


def info_of(**changed: object) -> SegmentInfo:
    facts = {"log_id": "l", "run_id": "r", "epoch": 1, "index": 0, "first_seq": 1, "previous": 0}
    return SegmentInfo(**{**facts, "writer_version": "test", **changed})  # type: ignore[arg-type]


def segment_of(*frames: list[e.Event], info: SegmentInfo | None = None) -> bytes:
    """A segment of these frames, each durable before the next was written, without an end."""
    info = info or info_of()
    encoder = FrameEncoder(info)
    content = bytes(encoder.opening(info.first_seq - 1))
    seq = info.first_seq
    for events in frames:
        data, _ = encoder.frame([encode_event(event) for event in events], [7] * len(events), seq, seq - 1)
        content += bytes(data)
        seq += len(events)
    return content


FRAMES = [[numbered(1), numbered(2)], [numbered(3)], [numbered(4)]]
OPEN = segment_of(*FRAMES)
ENDS = {
    "bare": (OPEN, SegmentEnd.LIVE),
    "preallocated": (OPEN + bytes(4096), SegmentEnd.LIVE),
    "closed": (OPEN + END_OF_STREAM, SegmentEnd.CLOSED),
    "closed, not yet cut": (OPEN + END_OF_STREAM + bytes(4096), SegmentEnd.CLOSED),
}


def events_in(data: bytes) -> list[e.Event]:
    view = memoryview(data)
    return [record.event for batch in read_batches(view, scan_segment(view)) for record in read_events(batch)]


@pytest.mark.parametrize("name", ENDS)
def test_scan_finds_every_frame_and_how_the_segment_ends(name):
    data, end = ENDS[name]
    scan = scan_segment(memoryview(data))
    assert scan.end is end
    assert [frame.num_events for frame in scan.frames] == [0, 2, 1, 1]
    assert scan.end_offset == len(OPEN)
    assert scan.info == info_of()
    assert events_in(data) == [event for frame in FRAMES for event in frame]


@pytest.mark.parametrize("name", ENDS)
def test_any_arrow_reader_opens_it(name, tmp_path):
    path = tmp_path / "segment.arrows"
    path.write_bytes(ENDS[name][0])
    table = pa.ipc.open_stream(path).read_all()
    assert table.column("seq").to_pylist() == [1, 2, 3, 4]
    assert table.column("kind").to_pylist() == ["weights_published"] * 4
    assert table.column("weight_version").to_pylist() == [1, 2, 3, 4]
    fields = msgspec.json.decode(table.schema.metadata[b"kinlog.payload_fields"])
    assert fields["writer_opened"] == ["host", "pid"]


@settings(max_examples=30)
@given(st.lists(st.lists(any_events(), min_size=1, max_size=6), max_size=4))
def test_any_events_come_back_in_order_with_their_places(frames):
    data = memoryview(segment_of(*frames, info=info_of(epoch=5, first_seq=10)))
    records = [r for batch in read_batches(data, scan_segment(data)) for r in read_events(batch)]
    assert [record.event for record in records] == [event for frame in frames for event in frame]
    assert [record.seq for record in records] == list(range(10, 10 + len(records)))
    assert {(record.epoch, record.time_us) for record in records} <= {(5, 7)}


def test_frame_cut_short_is_a_torn_end():
    for lost in (1, 100, 400):
        scan = scan_segment(memoryview(OPEN[:-lost]))
        assert scan.end is SegmentEnd.TORN
        assert scan.frames[-1].last_seq == 3
        assert "first seq 4" in scan.expected


def test_broken_frame_before_a_durable_one_is_damage():
    second = scan_segment(memoryview(OPEN)).frames[2]
    broken = bytearray(OPEN)
    broken[second.end - 20] ^= 4
    scan = scan_segment(memoryview(broken))
    assert (scan.end, scan.end_offset, scan.frames[-1].last_seq) == (SegmentEnd.DAMAGED, second.offset, 2)
    assert "had been durable" in scan.found


def test_broken_last_frame_of_a_closed_segment_is_damage():
    # The end-of-stream mark is written only after everything before it was made durable.
    last = scan_segment(memoryview(OPEN)).frames[-1]
    broken = bytearray(OPEN + END_OF_STREAM)
    broken[last.end - 20] ^= 4
    assert scan_segment(memoryview(broken)).end is SegmentEnd.DAMAGED


def test_unsynced_frames_after_a_broken_one_are_a_torn_end():
    encoder = FrameEncoder(info_of())
    content = bytes(encoder.opening(0))
    for seq in (1, 2):
        content += bytes(encoder.frame([encode_event(numbered(seq))], [7], seq, 0)[0])
    first = scan_segment(memoryview(content)).frames[1]
    broken = bytearray(content)
    broken[first.end - 20] ^= 4
    assert scan_segment(memoryview(broken)).end is SegmentEnd.TORN


@pytest.mark.parametrize("order", [(0, 2, 1), (0, 0, 1, 2), (0, 2), (1, 2)])
def test_frames_out_of_their_place_are_damage(order):
    scan = scan_segment(memoryview(OPEN))
    pieces = [OPEN[frame.offset : frame.end] for frame in scan.frames[1:]]
    moved = OPEN[: scan.frames[0].end] + b"".join(pieces[place] for place in order)
    found = scan_segment(memoryview(moved))
    assert found.end is SegmentEnd.DAMAGED or len(found.frames) - 1 < len(order)
    assert events_in(moved) == [event for frame in FRAMES[: len(found.frames) - 1] for event in frame]


def test_nothing_and_zeros_are_a_segment_that_never_began():
    for data in (b"", bytes(4096)):
        scan = scan_segment(memoryview(data))
        assert (scan.info, scan.frames, scan.end) == (None, [], SegmentEnd.TORN)


def test_broken_opening_of_a_segment_with_durable_events_is_damage():
    broken = bytearray(OPEN)
    broken[100] ^= 1
    scan = scan_segment(memoryview(broken))
    assert (scan.info, scan.end) == (None, SegmentEnd.DAMAGED)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"format_version": FORMAT_VERSION + 1}, f"format version {FORMAT_VERSION + 1}"),
        ({"required_features": ("braids",)}, "braids"),
    ],
)
def test_segment_of_a_newer_format_is_refused_by_name(changed, named):
    with pytest.raises(LogUnsupportedError, match=f"{named}.*upgrade"):
        scan_segment(memoryview(segment_of([numbered(1)], info=info_of(**changed))))


def segment_of_a_newer_writer(monkeypatch: pytest.MonkeyPatch, *, ignorable: bool) -> bytes:
    """A segment whose second event is of a kind that this version does not know."""
    names = [*e.EVENT_TYPES, "weather_observed"]
    with monkeypatch.context() as newer:
        newer.setattr(encoder_module, "KIND_NAMES", names)
        newer.setitem(column_buffers._KIND_CODE, "weather_observed", len(names) - 1)
        if ignorable:
            fake = type("Weather", (), {"IGNORABLE": True})
            newer.setattr(encoder_module, "EVENT_TYPES", {**e.EVENT_TYPES, "weather_observed": fake})
        encoder = FrameEncoder(info_of())
        known = [encode_event(numbered(1)), encode_event(numbered(2))]
        strange = encode_event(e.GroupAdmitted(group_id=4))._replace(kind="weather_observed")
        content = bytes(encoder.opening(0))
        return content + bytes(encoder.frame([known[0], strange, known[1]], [7] * 3, 1, 0)[0])


def test_unknown_kind_that_its_writer_marked_ignorable_is_passed_and_keeps_its_place(monkeypatch):
    data = memoryview(segment_of_a_newer_writer(monkeypatch, ignorable=True))
    projection = Projection()
    passed = []
    for batch in read_batches(data, scan_segment(data)):
        ignorable = frozenset(msgspec.json.decode(batch.schema.metadata[b"kinlog.ignorable_kinds"]))
        for record in read_events(batch, ignorable):
            fold(projection, record)
            passed += [record.event] if isinstance(record.event, e.PassedOver) else []
    assert (projection.last_seq, projection.weight_version) == (3, 2)
    assert passed == [e.PassedOver(original_kind="weather_observed")]


def test_unknown_kind_that_is_not_ignorable_is_refused(monkeypatch):
    data = memoryview(segment_of_a_newer_writer(monkeypatch, ignorable=False))
    with pytest.raises(LogUnsupportedError, match="weather_observed"):
        [list(read_events(batch)) for batch in read_batches(data, scan_segment(data))]


@given(st.integers(1, 99_999_999), st.integers(0, 99_999_999))
def test_segment_names_round_trip_and_sort_by_epoch_and_index(epoch, index):
    assert parse_segment_name(segment_name(epoch, index)) == (epoch, index)
    assert segment_name(epoch, index) < segment_name(epoch, 99_999_999) or index == 99_999_999


@pytest.mark.parametrize(
    "name",
    [
        "writer.lock",
        "segment-1-0.arrows",
        "segment-00000001-00000000.arrows.tmp",
        "segment-0000000²-00000000.arrows",
    ],
)
def test_other_names_are_no_segments(name):
    assert parse_segment_name(name) is None
