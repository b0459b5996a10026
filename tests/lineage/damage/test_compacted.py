"""Compacted segments and bases: every byte of them had been durable, so that any damage is refused."""

from collections.abc import Callable

import pytest
from kinlog_damage_oracle import DIRECTORY, Files, Oracle, flipped_bits, frozen, scanned, segment_path
from kinlog_stores import MemoryStore

from kinlog.lineage.compaction import compact_log
from kinlog.lineage.names import base_name, compacted_name

COMPACTED = DIRECTORY / compacted_name((1, 0), (2, 0))
BASE = DIRECTORY / base_name((1, 1))


def compacted_copy(files: Files, *, drop_through_seq: int = 0) -> Files:
    """The log once everything but its newest segment was compacted, or dropped."""
    store = MemoryStore(files)
    compact_log(store, DIRECTORY, epoch=3, checkpoints=[], drop_through_seq=drop_through_seq)
    return {path: content for path, content in frozen(store).items() if path.parent == DIRECTORY}


@pytest.fixture(scope="module")
def compacted(lived: Files) -> Files:
    return compacted_copy(lived)


@pytest.fixture(scope="module")
def dropped(lived: Files) -> Files:
    return compacted_copy(lived, drop_through_seq=4)


def test_compacted_log_is_one_file_and_the_newest_segment_and_tells_the_same(lived: Files, compacted: Files):
    assert sorted(compacted) == [COMPACTED, segment_path(3, 0)]
    assert list(scanned(compacted).events()) == list(scanned(lived).events())


def test_dropped_history_is_a_base_and_what_follows_it(lived: Files, dropped: Files):
    assert BASE in dropped
    assert [r.seq for r in scanned(dropped).events()] == [5, 6, 7, 8]
    assert scanned(dropped).beginning().weight_version == 4


def test_compacted_segment_cut_at_every_byte_is_refused(compacted: Files):
    oracle = Oracle(compacted)
    for end in range(len(compacted[COMPACTED])):
        assert oracle.judge_one(COMPACTED, compacted[COMPACTED][:end]) is None


def test_every_flipped_bit_of_a_compacted_segment_is_refused(compacted: Files):
    oracle = Oracle(compacted)
    content = compacted[COMPACTED]
    for _, changed in flipped_bits(content, range(len(content) * 8)):
        assert oracle.judge_one(COMPACTED, changed) is None


def test_zero_filled_tail_of_a_compacted_segment_is_refused(compacted: Files):
    oracle = Oracle(compacted)
    content = compacted[COMPACTED]
    for start in range(len(content) - 8):
        assert oracle.judge_one(COMPACTED, content[:start] + bytes(len(content) - start)) is None


def test_every_frame_of_a_compacted_segment_dropped_or_repeated_is_refused(compacted: Files):
    oracle = Oracle(compacted)
    content = compacted[COMPACTED]
    for frame in oracle.frames[COMPACTED]:
        assert oracle.judge_one(COMPACTED, content[: frame.offset] + content[frame.end :]) is None
        assert oracle.judge_one(COMPACTED, content[: frame.end] + content[frame.offset :]) is None


def test_bytes_behind_the_end_of_a_compacted_segment_are_refused(compacted: Files):
    oracle = Oracle(compacted)
    assert oracle.judge_one(COMPACTED, compacted[COMPACTED] + b"more") is None


def test_every_cut_and_flipped_bit_of_a_base_is_refused(dropped: Files):
    oracle = Oracle(dropped)
    content = dropped[BASE]
    for end in range(len(content)):
        assert oracle.judge({**dropped, BASE: content[:end]}) is None
    for _, changed in flipped_bits(content, range(len(content) * 8)):
        assert oracle.judge({**dropped, BASE: bytes(changed)}, decode=False) is None


CHANGES: dict[str, Callable[[Files], Files]] = {
    "compacted segment gone": lambda files: {p: c for p, c in files.items() if p != COMPACTED},
    "compacted segment under another name": lambda files: {
        **{p: c for p, c in files.items() if p != COMPACTED},
        DIRECTORY / compacted_name((1, 0), (2, 1)): files[COMPACTED],
    },
    "compacted segment as a segment": lambda files: {
        **{p: c for p, c in files.items() if p != COMPACTED},
        segment_path(1, 0): files[COMPACTED],
    },
    "newest segment as a compacted one": lambda files: {**files, COMPACTED: files[segment_path(3, 0)]},
    "compacted segment twice": lambda files: {
        **files,
        DIRECTORY / compacted_name((1, 0), (1, 1)): files[COMPACTED],
        DIRECTORY / compacted_name((3, 1), (3, 2)): files[COMPACTED],
    },
}


@pytest.mark.parametrize("change", CHANGES)
def test_compacted_segment_that_is_gone_renamed_or_repeated_is_refused(compacted: Files, change: str):
    assert Oracle(compacted).judge(CHANGES[change](compacted)) is None


def test_base_that_is_gone_is_refused(dropped: Files):
    assert Oracle(dropped).judge({p: c for p, c in dropped.items() if p != BASE}) is None


def test_segments_that_a_crash_left_behind_are_not_read_whatever_is_in_them(lived: Files, compacted: Files):
    oracle = Oracle(compacted)
    replaced = [path for path in lived if path != segment_path(3, 0)]
    assert oracle.judge({**lived, **compacted}) == len(oracle.records)
    for path in replaced:
        for content in (b"", lived[path][:200], bytes(4096), lived[path][:-30] + bytes(30)):
            assert oracle.judge({**compacted, path: content}) == len(oracle.records)
