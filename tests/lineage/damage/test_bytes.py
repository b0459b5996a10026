"""Bytes that are lost, changed or zeroed, at every place: a correct prefix, or a refusal. Never anything else.

Every byte of the logs is a place to cut, and every bit of them is flipped: 25 KB, in four segments of three epochs.
"""

import pytest
from kinlog_damage_oracle import (
    Oracle,
    flipped_bits,
    last_segment,
    segment_path,
)

from kinlog.lineage.segment import SegmentEnd, scan_segment, segment_name


def test_story_of_the_lived_log_is_what_it_should_be(lived):
    assert [path.name for path in sorted(lived)] == [
        segment_name(1, 0),
        segment_name(1, 1),
        segment_name(2, 0),
        segment_name(3, 0),
    ]
    oracle = Oracle(lived)
    assert [record.seq for record in oracle.records] == list(range(1, 9))
    assert {record.epoch for record in oracle.records} == {1, 2, 3}
    assert oracle.mark.seq == 3


def test_tiny_log_cut_at_every_byte_is_a_correct_prefix_or_refused(tiny):
    oracle = Oracle(tiny)
    (path,) = tiny
    for end in range(len(tiny[path])):
        kept = oracle.judge_one(path, tiny[path][:end])
        whole = oracle.durable_before(path, end)
        # Without its opening frame a segment says nothing, and a run with nothing is refused.
        assert kept == (whole if end >= oracle.frames[path][0].end else None)


def test_lived_log_cut_at_every_byte_of_every_segment_is_a_correct_prefix_or_refused(lived, monkeypatch):
    oracle = Oracle(lived, monkeypatch)
    last = last_segment(lived)
    for path, content in lived.items():
        for end in range(len(content)):
            kept = oracle.judge_one(path, content[:end])
            if path == last:
                assert kept == oracle.durable_before(path, end)
            elif end < oracle.frames[path][-1].end:
                assert kept is None, "a segment that others follow lost events unnoticed"
            else:
                assert kept in (None, len(oracle.records))


@pytest.mark.parametrize("place", [(1, 0), (1, 1), (2, 0), (3, 0)])
def test_every_flipped_bit_of_a_lived_log_is_refused_or_changes_nothing(lived, monkeypatch, place):
    oracle = Oracle(lived, monkeypatch)
    path = segment_path(*place)
    end = oracle.frames[path][-1].end
    for bit, changed in flipped_bits(lived[path], range(len(lived[path]) * 8)):
        kept = oracle.judge_one(path, changed)
        if bit // 8 < end:
            assert kept is None
        else:
            assert kept in (None, len(oracle.records))


def test_flipped_bit_in_a_killed_writers_last_frame_costs_that_frame_at_most(killed, monkeypatch):
    oracle = Oracle(killed, monkeypatch)
    path = last_segment(killed)
    *_, before, last = oracle.frames[path]
    bits = range(before.offset * 8, last.end * 8)
    for bit, changed in flipped_bits(killed[path], bits):
        kept = oracle.judge_one(path, changed)
        assert kept == (before.last_seq if bit // 8 >= last.offset else None)


def test_zero_filled_tail_from_every_byte_is_a_correct_prefix_or_refused(lived, monkeypatch):
    oracle = Oracle(lived, monkeypatch)
    for path, content in lived.items():
        for start in range(len(content)):
            kept = oracle.judge_one(path, content[:start] + bytes(len(content) - start))
            # Zeros where zeros were are no damage.
            whole = len(content) - len(content[start:].lstrip(b"\0"))
            if path == last_segment(lived):
                assert kept == oracle.durable_before(path, whole)
            elif whole < oracle.frames[path][-1].end:
                assert kept is None
            else:
                assert kept in (None, len(oracle.records))


def test_zeroed_sector_is_refused_or_costs_the_tail_that_was_not_proven(lived, monkeypatch):
    oracle = Oracle(lived, monkeypatch)
    for path, content in lived.items():
        for start in range(0, len(content), 64):
            changed = bytearray(content)
            hole = slice(start, min(start + 512, len(content)))
            changed[hole] = bytes(hole.stop - hole.start)
            kept = oracle.judge_one(path, changed)
            if path != last_segment(lived):
                assert kept in (None, len(oracle.records))
            elif hole.stop < len(content):
                assert kept is None or bytes(changed) == content


@pytest.mark.parametrize("changed_by", [-16, -8, -1, 1, 8, 16, 1000, 0x7FFFFFFF])
def test_frame_with_another_length_than_its_own_is_refused(lived, monkeypatch, changed_by):
    oracle = Oracle(lived, monkeypatch)
    for path, content in lived.items():
        for frame in oracle.frames[path]:
            for length in {max(0, frame.length + changed_by) & 0xFFFFFFFF, 0}:
                at = content.index(b" len=", frame.offset) + 5
                changed = bytearray(content)
                changed[at : at + 8] = b"%08x" % length
                assert oracle.judge_one(path, changed) is None


def test_upper_case_checksum_is_not_the_checksum(lived, monkeypatch):
    """Only the canonical rendering is a header: a flipped bit that turns a hex digit's case is seen as well."""
    oracle = Oracle(lived, monkeypatch)
    for path, content in lived.items():
        for frame in oracle.frames[path]:
            at = content.index(b" sum=", frame.offset) + 5
            digits = content[at : at + 8]
            if digits.upper() != digits:
                changed = content[:at] + digits.upper() + content[at + 8 :]
                assert oracle.judge_one(path, changed) is None


def test_end_mark_of_a_segment_that_was_begun_proves_that_it_had_been_durable(tiny):
    """Everything but the end mark is zeroed: no frame is left to say so, and still it is not a torn beginning."""
    (path,) = tiny
    zeroed = bytes(len(tiny[path]) - 8) + tiny[path][-8:]
    assert Oracle(tiny).judge({path: zeroed}) is None
    assert scan_segment(memoryview(zeroed)).end is SegmentEnd.DAMAGED
