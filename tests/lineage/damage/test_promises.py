"""What a checkpoint or a clean close promised is there, or the log is refused."""

import pytest
from kinlog_damage_oracle import (
    DIRECTORY,
    Oracle,
    flipped_bits,
    last_segment,
    scanned,
    segment_path,
)
from kinlog_stores import MemoryStore

from kinlog.lineage.scan import scan_log
from kinlog.lineage.segment import END_OF_STREAM
from kinlog.schemas.errors import LogDamagedError, RunNotFoundError


def test_log_shorter_than_a_mark_is_refused_at_every_length(tiny):
    mark = scanned(tiny).end
    (path,) = tiny
    scan_log(DIRECTORY, store=MemoryStore(tiny), marks=[mark])
    end = len(tiny[path]) - len(END_OF_STREAM)
    for size in range(0, end, 8):
        with pytest.raises((LogDamagedError, RunNotFoundError)):
            scan_log(DIRECTORY, store=MemoryStore({path: tiny[path][:size]}), marks=[mark])


def test_frames_missing_from_the_tail_are_refused_when_a_checkpoint_promises_them(killed):
    """Cut at the end of every frame, the log looks like one whose writer was killed earlier. The mark tells."""
    oracle = Oracle(killed)
    path = last_segment(killed)
    whole = scanned(killed)
    for frame in oracle.frames[path][:-1]:
        cut = {**killed, path: killed[path][: frame.end]}
        assert oracle.judge(cut) == frame.last_seq
        assert oracle.judge(cut, marks=[whole.end]) is None
        with pytest.raises(LogDamagedError) as refused:
            scanned(cut, [whole.end])
        assert f"seq {whole.end.seq} with checksum {whole.end.checksum:08x}" in refused.value.expected
        assert f"seq {frame.last_seq} with checksum {frame.checksum:08x}" in refused.value.found


def test_dropped_newest_segment_is_refused_when_a_checkpoint_promises_it(lived):
    left = {path: content for path, content in lived.items() if path != segment_path(3, 0)}
    assert Oracle(lived).judge(left) == 6
    assert Oracle(lived).judge(left, marks=[scanned(lived).end]) is None


def test_cut_at_every_byte_never_leaves_less_than_a_checkpoint_promises(killed, monkeypatch):
    oracle = Oracle(killed, monkeypatch)
    for path, content in killed.items():
        for end in range(len(content)):
            kept = oracle.judge_one(path, content[:end], marks=[oracle.mark])
            assert kept is None or kept >= oracle.mark.seq


def test_flipped_bit_in_the_last_frame_is_refused_when_a_checkpoint_promises_it(killed, monkeypatch):
    oracle = Oracle(killed, monkeypatch)
    path = last_segment(killed)
    last = oracle.frames[path][-1]
    bits = range(last.offset * 8, last.end * 8, 7)
    for _, changed in flipped_bits(killed[path], bits):
        assert oracle.judge_one(path, changed, marks=[oracle.end]) is None


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
