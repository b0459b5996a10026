"""Whole segments that are lost, copied, renamed, replaced or foreign are refused, unless nothing is missing."""

from itertools import permutations

import pytest
from kinlog_damage_oracle import (
    SEGMENTS,
    Oracle,
    segment_path,
    tiny_log,
    with_file,
)


@pytest.mark.parametrize("dropped", SEGMENTS)
def test_dropped_segment_is_refused_unless_nothing_follows_it(lived, dropped):
    oracle = Oracle(lived)
    path = segment_path(*dropped)
    left = {p: content for p, content in lived.items() if p != path}
    kept = oracle.judge(left)
    assert kept == (oracle.durable_before(path, 0) if dropped == (3, 0) else None)


def test_segments_dropped_in_every_combination_are_a_prefix_or_refused(lived):
    oracle = Oracle(lived)
    for left in range(1 << len(SEGMENTS)):
        names = [place for bit, place in enumerate(SEGMENTS) if left >> bit & 1]
        kept = oracle.judge({segment_path(*place): lived[segment_path(*place)] for place in names})
        is_prefix = bool(names) and names == SEGMENTS[: len(names)]
        assert kept == (oracle.durable_before(segment_path(*names[-1]), 1 << 30) if is_prefix else None)


@pytest.mark.parametrize(
    ("source", "target"),
    [(source, target) for source in SEGMENTS for target in [*SEGMENTS, (1, 2), (4, 0)] if source != target],
)
def test_copied_renamed_or_replaced_segment_is_refused(lived, source, target):
    origin, other = segment_path(*source), segment_path(*target)
    copied = with_file(lived, other, lived[origin])
    renamed = {path: content for path, content in copied.items() if path != origin}
    assert Oracle(lived).judge(copied) is None
    assert Oracle(lived).judge(renamed) is None


def test_segments_in_every_other_order_are_refused(lived):
    oracle = Oracle(lived)
    paths = sorted(lived)
    for order in permutations(paths):
        kept = oracle.judge({path: lived[source] for path, source in zip(paths, order, strict=True)})
        assert kept == (len(oracle.records) if list(order) == paths else None)


@pytest.mark.parametrize("place", SEGMENTS)
@pytest.mark.parametrize("content", [b"", bytes(4096), b"not a segment", bytes(range(256)) * 32])
def test_segment_replaced_by_something_else_is_refused_unless_it_is_the_last(lived, place, content):
    oracle = Oracle(lived)
    path = segment_path(*place)
    kept = oracle.judge(with_file(lived, path, content))
    # The newest may be as a crash leaves one that was just being begun. What had been in it is then gone unnoticed, unless
    # a checkpoint promises it.
    assert kept == (oracle.durable_before(path, 0) if place == (3, 0) else None)
    assert oracle.judge(with_file(lived, path, content), marks=[oracle.end]) is None


def test_broken_end_of_a_segment_that_rolled_over_is_refused(lived):
    # All frames are there, but a writer that goes on in the next segment has ended this one in order.
    path = min(lived)
    assert Oracle(lived).judge(with_file(lived, path, lived[path][:-8] + b"garbage!")) is None


def test_foreign_segment_is_refused(lived):
    (foreign,) = tiny_log().values()
    for place in [*SEGMENTS, (1, 2), (4, 0)]:
        assert Oracle(lived).judge({**lived, segment_path(*place): foreign}) is None
