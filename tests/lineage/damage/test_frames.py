"""Whole frames that are lost, repeated, moved or from elsewhere are never taken for history."""

from itertools import combinations

import pytest
from kinlog_builders import append_now, new_log, numbered
from kinlog_damage_oracle import (
    DIRECTORY,
    Oracle,
    last_segment,
    pieces,
)
from kinlog_stores import MemoryStore


def test_every_frame_zeroed_is_refused(lived):
    oracle = Oracle(lived)
    for path, content in lived.items():
        for frame in oracle.frames[path]:
            zeroed = content[: frame.offset] + bytes(frame.length) + content[frame.end :]
            assert oracle.judge_one(path, zeroed) is None


def test_every_frame_dropped_is_refused_except_the_newest_that_only_a_checkpoint_can_promise(lived):
    oracle = Oracle(lived)
    for path, content in lived.items():
        for frame in oracle.frames[path]:
            dropped = content[: frame.offset] + content[frame.end :]
            newest = frame.last_seq == oracle.end.seq
            assert oracle.judge_one(path, dropped) == (frame.first_seq - 1 if newest else None)
            assert oracle.judge_one(path, dropped, marks=[oracle.end]) is None


def test_every_frame_dropped_with_everything_after_it_in_its_segment_is_a_prefix_or_refused(lived):
    oracle = Oracle(lived)
    for path, content in lived.items():
        for frame in oracle.frames[path]:
            kept = oracle.judge_one(path, content[: frame.offset])
            assert kept == (frame.first_seq - 1 if path == last_segment(lived) else None)


def test_every_frame_repeated_is_refused_unless_it_lies_past_a_take_over(lived):
    oracle = Oracle(lived)
    for path, content in lived.items():
        for frame in oracle.frames[path]:
            repeated = content[: frame.end] + content[frame.offset :]
            # What an older epoch's last segment holds past the take-over is no history, whatever it is.
            fenced = (path.name, frame.last_seq) in (
                ("segment-00000001-00000001.arrows", 4),
                ("segment-00000002-00000000.arrows", 6),
            )
            assert oracle.judge_one(path, repeated) == (len(oracle.records) if fenced else None)


def test_every_frame_at_the_place_of_every_other_is_refused(lived):
    oracle = Oracle(lived)
    every = [(path, frame) for path in lived for frame in oracle.frames[path]]
    for path, frame in every:
        for source, other in every:
            if (source, other) == (path, frame):
                continue
            content = lived[path]
            theirs = lived[source][other.offset : other.end]
            placed = content[: frame.offset] + theirs + content[frame.end :]
            assert oracle.judge_one(path, placed) is None


def test_every_two_frames_of_a_segment_swapped_are_refused(lived):
    oracle = Oracle(lived)
    for path, content in lived.items():
        for one, other in combinations(oracle.frames[path][1:], 2):
            swapped = (
                content[: one.offset]
                + content[other.offset : other.end]
                + content[one.end : other.offset]
                + content[one.offset : one.end]
                + content[other.end :]
            )
            assert oracle.judge_one(path, swapped) is None


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
