"""Damage at every place of a log gives a correct prefix, or a refusal that changes nothing. Never anything else."""

import random
import shutil
from pathlib import Path

import pytest
from kinlog_builders import append_now, directory_bytes, log_settings, new_log, numbered, reopened
from kinlog_stores import MemoryStore

from kinlog.lineage import scan as scan_module
from kinlog.lineage.scan import LogScan, scan_log
from kinlog.lineage.segment import END_OF_STREAM, SegmentEnd, scan_segment, segment_name
from kinlog.schemas import events as e
from kinlog.schemas.errors import LogDamagedError, RunNotFoundError

DIRECTORY = Path("/log")
Files = dict[Path, bytes]


@pytest.fixture(scope="module")
def tiny() -> Files:
    """One closed segment, three frames."""
    store = MemoryStore({})
    log = new_log(DIRECTORY, store=store)
    for number in (1, 2, 3):
        append_now(log, numbered(number))
    log.close()
    return frozen(store)


@pytest.fixture(scope="module")
def lived() -> Files:
    """Three epochs: one that rolled over, one that was killed, one that was closed."""
    store = MemoryStore({})
    # Far below what a configuration allows: a segment of a few frames.
    log = new_log(DIRECTORY, store=store, settings=log_settings(segment_bytes=5600))
    append_now(log, numbered(1))
    append_now(log, numbered(2), numbered(3))
    append_now(log, numbered(4))
    log.close()
    killed = reopened(DIRECTORY, store=store)
    append_now(killed, numbered(5))
    append_now(killed, numbered(6))
    at_kill = frozen(store)
    killed.close()
    store = MemoryStore(at_kill)
    # Only so many of the zeros that a killed writer leaves, so that every byte can be tried.
    live = DIRECTORY / segment_name(2, 0)
    del store.files[live][len(at_kill[live].rstrip(b"\0")) + 64 :]
    last = reopened(DIRECTORY, store=store)
    append_now(last, numbered(7))
    append_now(last, numbered(8))
    last.close()
    return frozen(store)


def frozen(store: MemoryStore) -> Files:
    return {path: bytes(content) for path, content in store.files.items()}


def scanned(files: Files) -> LogScan:
    return scan_log(DIRECTORY, store=MemoryStore(files))


def told(files: Files) -> list[e.RecordedEvent]:
    return list(scanned(files).events())


class Oracle:
    """What a log holds, and what is left of each of its files, for judging damaged copies of it."""

    def __init__(self, files: Files, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        """With ``monkeypatch``, the files that a test leaves alone are scanned only once."""
        if monkeypatch is not None:
            intact = {content: scan_segment(memoryview(content)) for content in files.values()}
            monkeypatch.setattr(
                scan_module, "scan_segment", lambda data: intact.get(bytes(data)) or scan_segment(data)
            )
        self.files = files
        self.records = told(files)
        self.frames = {segment.path: segment.scan.frames for segment in scanned(files).segments}

    def judge(self, damaged: Files, *, decode: bool = True) -> int | None:
        """Events of a correct prefix, ``None`` for a refusal; anything else fails."""
        try:
            scan = scanned(damaged)
        except (LogDamagedError, RunNotFoundError):
            return None
        for segment in scan.segments:
            kept = segment.scan.frames[-1].end
            assert damaged[segment.path][:kept] == self.files[segment.path][:kept], (
                "damage was taken for history"
            )
        if decode:
            assert list(scan.events()) == self.records[: scan.end.seq]
        return scan.end.seq

    def durable_before(self, path: Path, byte: int) -> int:
        """Events of the frames that end before a byte of a segment, and of the segments before it."""
        return max(
            (
                f.last_seq
                for p, frames in self.frames.items()
                for f in frames
                if p < path or (f.end <= byte and p == path)
            ),
            default=0,
        )


def with_file(files: Files, path: Path, content: bytes) -> Files:
    return {**files, path: content}


def last_segment(files: Files) -> Path:
    return max(files)


def test_story_of_the_lived_log_is_what_it_should_be(lived):
    assert [path.name for path in sorted(lived)] == [
        segment_name(1, 0),
        segment_name(1, 1),
        segment_name(2, 0),
        segment_name(3, 0),
    ]
    assert [record.seq for record in told(lived)] == list(range(1, 9))
    assert {record.epoch for record in told(lived)} == {1, 2, 3}


def test_tiny_log_cut_at_every_byte_is_a_correct_prefix_or_refused(tiny):
    oracle = Oracle(tiny)
    (path,) = tiny
    for end in range(len(tiny[path])):
        kept = oracle.judge(with_file(tiny, path, tiny[path][:end]))
        whole = oracle.durable_before(path, end)
        # Without its opening frame a segment says nothing, and a run with nothing is refused.
        assert kept == (whole if end >= oracle.frames[path][0].end else None)


def test_lived_log_cut_at_every_byte_of_every_segment_is_a_correct_prefix_or_refused(lived, monkeypatch):
    oracle = Oracle(lived, monkeypatch)
    last = last_segment(lived)
    for path, content in lived.items():
        for end in range(len(content)):
            kept = oracle.judge(with_file(lived, path, content[:end]), decode=end % 101 == 0)
            if path == last:
                assert kept == oracle.durable_before(path, end)
            elif end < oracle.frames[path][-1].end:
                assert kept is None, "a segment that others follow lost events unnoticed"
            else:
                assert kept in (None, len(oracle.records))


def test_every_flipped_bit_of_a_tiny_log_is_a_correct_prefix_or_refused(tiny):
    oracle = Oracle(tiny)
    (path,) = tiny
    content, frames = tiny[path], oracle.frames[path]
    changed = bytearray(content)
    for bit in range(len(content) * 8):
        changed[bit // 8] ^= 1 << bit % 8
        scan = scan_segment(memoryview(changed))
        if bit // 8 < frames[-1].end:
            assert scan.end is SegmentEnd.DAMAGED, "the log was closed: nothing before its end may be missing"
        else:
            assert (scan.end, scan.frames) == (SegmentEnd.TORN, frames)
        if bit % 64 == 0:
            kept = oracle.judge({path: bytes(changed)})
            assert kept == (None if bit // 8 < frames[-1].end else 3)
        changed[bit // 8] ^= 1 << bit % 8


def test_sampled_flipped_bits_of_a_lived_log_are_a_correct_prefix_or_refused(lived, monkeypatch):
    oracle = Oracle(lived, monkeypatch)
    chance = random.Random(3)
    for path, content in lived.items():
        for bit in chance.sample(range(len(content) * 8), 2000):
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            kept = oracle.judge(with_file(lived, path, bytes(changed)), decode=bit % 31 == 0)
            if bit // 8 < oracle.frames[path][-1].end:
                assert kept is None
            else:
                assert kept in (None, len(oracle.records))


def test_flipped_bit_in_a_killed_writers_last_frame_costs_that_frame_at_most(lived, monkeypatch):
    killed = {path: content for path, content in lived.items() if path < last_segment(lived)}
    oracle = Oracle(killed, monkeypatch)
    path = last_segment(killed)
    *_, before, last = oracle.frames[path]
    for byte in range(before.offset, last.end):
        changed = bytearray(killed[path])
        changed[byte] ^= 0x10
        kept = oracle.judge(with_file(killed, path, bytes(changed)))
        assert kept == (before.last_seq if byte >= last.offset else None)


def test_zero_filled_tail_is_a_correct_prefix_or_refused(lived):
    oracle = Oracle(lived)
    path = last_segment(lived)
    content = lived[path]
    for start in range(0, len(content), 16):
        zeroed = content[:start] + bytes(len(content) - start)
        assert oracle.judge(with_file(lived, path, zeroed)) == oracle.durable_before(path, start)


def pieces(content: bytes) -> tuple[bytes, list[bytes], bytes]:
    """A segment as its beginning with the opening frame, its other frames, and its end."""
    frames = scan_segment(memoryview(content)).frames
    return (
        content[: frames[0].end],
        [content[f.offset : f.end] for f in frames[1:]],
        content[frames[-1].end :],
    )


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ("drop a middle frame", None),
        ("drop the first frame", None),
        ("repeat a frame", None),
        ("swap two frames", None),
        ("drop the last frame and the end", 2),
    ],
)
def test_frames_dropped_repeated_or_swapped_are_never_taken_for_history(tiny, change, kept):
    (path,) = tiny
    opening, (one, two, three), end = pieces(tiny[path])
    changed = {
        "drop a middle frame": [one, three, end],
        "drop the first frame": [two, three, end],
        "repeat a frame": [one, two, two, three, end],
        "swap two frames": [one, three, two, end],
        "drop the last frame and the end": [one, two],
    }[change]
    assert Oracle(tiny).judge({path: opening + b"".join(changed)}) == kept


def test_frame_of_another_log_at_the_same_offset_is_refused(tiny):
    other = MemoryStore({})
    log = new_log(DIRECTORY, store=other)
    for number in (7, 8, 9):
        append_now(log, numbered(number))
    log.close()
    (path,) = tiny
    opening, mine, end = pieces(tiny[path])
    _, theirs, _ = pieces(bytes(other.files[path]))
    assert [len(frame) for frame in mine] == [len(frame) for frame in theirs]
    assert Oracle(tiny).judge({path: opening + mine[0] + theirs[1] + mine[2] + end}) is None


SEGMENTS = [(1, 0), (1, 1), (2, 0), (3, 0)]


@pytest.mark.parametrize("dropped", SEGMENTS)
def test_dropped_segment_is_refused_unless_nothing_follows_it(lived, dropped):
    oracle = Oracle(lived)
    path = DIRECTORY / segment_name(*dropped)
    left = {p: content for p, content in lived.items() if p != path}
    kept = oracle.judge(left)
    assert kept == (oracle.durable_before(path, 0) if dropped == (3, 0) else None)


@pytest.mark.parametrize(
    ("source", "target"),
    [(source, target) for source in SEGMENTS for target in [*SEGMENTS, (1, 2), (4, 0)] if source != target],
)
def test_copied_renamed_or_replaced_segment_is_refused(lived, source, target):
    origin, other = (DIRECTORY / segment_name(*place) for place in (source, target))
    copied = with_file(lived, other, lived[origin])
    renamed = {path: content for path, content in copied.items() if path != origin}
    assert Oracle(lived).judge(copied) is None
    assert Oracle(lived).judge(renamed) is None


def test_swapped_segments_are_refused(lived):
    one, two = sorted(lived)[:2]
    assert Oracle(lived).judge({**lived, one: lived[two], two: lived[one]}) is None


def test_broken_end_of_a_segment_that_rolled_over_is_refused(lived):
    # All frames are there, but a writer that goes on in the next segment has ended this one in order.
    path = min(lived)
    assert Oracle(lived).judge(with_file(lived, path, lived[path][:-8] + b"garbage!")) is None


def test_foreign_segment_is_refused(lived, tiny):
    (foreign,) = tiny.values()
    assert Oracle(lived).judge({**lived, DIRECTORY / segment_name(1, 2): foreign}) is None


def test_log_shorter_than_a_mark_is_refused_at_every_length(tiny):
    mark = scanned(tiny).end
    (path,) = tiny
    scan_log(DIRECTORY, store=MemoryStore(tiny), marks=[mark])
    end = len(tiny[path]) - len(END_OF_STREAM)
    for size in range(0, end, 8):
        with pytest.raises((LogDamagedError, RunNotFoundError)):
            scan_log(DIRECTORY, store=MemoryStore({path: tiny[path][:size]}), marks=[mark])


def test_refusal_says_where_and_what(tiny):
    (path,) = tiny
    frame = scanned(tiny).segments[0].scan.frames[2]
    changed = bytearray(tiny[path])
    changed[frame.end - 9] ^= 1
    with pytest.raises(LogDamagedError) as refused:
        scanned({path: bytes(changed)})
    error = refused.value
    assert (error.segment, error.offset_bytes, error.seq) == (path.name, frame.offset, 1)
    assert "first seq 2" in error.expected


@pytest.mark.parametrize("change", ["flip", "drop", "rename", "empty"])
def test_opening_a_damaged_log_changes_no_byte_on_disk(lived, tmp_path, change):
    directory = tmp_path / "log"
    directory.mkdir()
    for path, content in lived.items():
        (directory / path.name).write_bytes(content)
    victim = directory / segment_name(1, 1)
    if change == "flip":
        content = bytearray(victim.read_bytes())
        content[-200] ^= 1
        victim.write_bytes(content)
    elif change == "drop":
        victim.unlink()
    elif change == "rename":
        shutil.move(victim, directory / segment_name(1, 2))
    else:
        victim.write_bytes(b"")
    before = directory_bytes(tmp_path)
    with pytest.raises(LogDamagedError):
        reopened(directory)
    with pytest.raises(LogDamagedError):
        scan_log(directory)
    assert directory_bytes(tmp_path) == before


def test_log_that_was_cut_anywhere_can_be_opened_and_goes_on(tiny):
    (path,) = tiny
    frames = scanned(tiny).segments[0].scan.frames
    records = told(tiny)
    for end in range(frames[0].end, len(tiny[path]), 41):
        store = MemoryStore({path: tiny[path][:end]})
        log = reopened(DIRECTORY, store=store)
        kept = log.scan.end.seq
        append_now(log, numbered(99))
        log.close()
        again = scan_log(DIRECTORY, store=store)
        assert [r.event for r in again.events()] == [*(r.event for r in records[:kept]), numbered(99)]
        assert not again.torn
