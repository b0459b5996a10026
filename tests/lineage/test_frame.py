"""A frame is verified before Arrow parses a byte of it: any flipped bit is seen."""

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinlog_builders import numbered, sealed_result
from kinlog_strategies import any_events

from kinlog.lineage.encoder import FrameEncoder
from kinlog.lineage.frame import MAGIC, PLACEHOLDER, FrameHeader, seal_frame, verify_frame
from kinlog.lineage.segment import SegmentInfo
from kinlog.schemas import events as e
from kinlog.schemas.codec import encode_event
from kinlog.schemas.reasons import Reason

INFO = SegmentInfo(
    log_id="l", run_id="r", epoch=3, index=0, first_seq=41, previous=0x1234, writer_version="test"
)


def built_frame(*events: e.Event) -> tuple[bytes, FrameHeader]:
    """A segment's bytes up to and with one frame of events, and that frame's header."""
    encoder = FrameEncoder(INFO)
    start = bytes(encoder.opening(40))
    data, header = encoder.frame([encode_event(event) for event in events], [5] * len(events), 41, 40)
    return start + bytes(data), header


def flipped(data: bytes, bit: int) -> memoryview:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return memoryview(changed)


TINY, TINY_HEADER = built_frame(numbered(1))


def test_sealed_frame_verifies_and_says_what_it_holds():
    data, header = built_frame(numbered(1), numbered(2), numbered(3))
    assert verify_frame(memoryview(data), header.offset) == header
    assert (header.first_seq, header.last_seq, header.epoch, header.durable_seq) == (41, 43, 3, 40)
    assert header.end == len(data)


def test_every_single_flipped_bit_of_a_frame_is_seen():
    first, last = TINY_HEADER.offset * 8, TINY_HEADER.end * 8
    unseen = [
        bit for bit in range(first, last) if verify_frame(flipped(TINY, bit), TINY_HEADER.offset) is not None
    ]
    assert not unseen


@settings(max_examples=30)
@given(st.data())
def test_flipped_bits_of_frames_of_any_events_are_seen(data):
    events = data.draw(st.lists(any_events(), min_size=1, max_size=8))
    content, header = built_frame(*events)
    assert verify_frame(memoryview(content), header.offset) == header
    for bit in data.draw(
        st.lists(st.integers(header.offset * 8, header.end * 8 - 1), min_size=20, max_size=20)
    ):
        assert verify_frame(flipped(content, bit), header.offset) is None


def test_every_burst_of_zeroed_sectors_is_seen():
    for start in range(TINY_HEADER.offset, TINY_HEADER.end, 64):
        changed = bytearray(TINY)
        changed[start : start + 512] = bytes(len(changed[start : start + 512]))
        if bytes(changed) != TINY:
            assert verify_frame(memoryview(changed), TINY_HEADER.offset) is None


def test_frame_cut_short_at_any_byte_does_not_verify():
    for end in range(TINY_HEADER.offset, TINY_HEADER.end):
        assert verify_frame(memoryview(TINY)[:end], TINY_HEADER.offset) is None


def test_frame_at_another_offset_does_not_verify():
    moved = memoryview(bytes(8) + TINY)
    assert verify_frame(moved, TINY_HEADER.offset + 8) is None


def test_header_is_compared_with_its_canonical_rendering():
    # The checksum's own digits are not under the checksum: in capitals they would mean the same number.
    data, header = next(
        built for n in range(99) if (built := built_frame(numbered(n)))[1].checksum > 0xA0000000
    )
    digits = f"sum={header.checksum:08x}".encode()
    assert data.count(digits) == 1
    capitals = data.replace(digits, b"sum=" + digits[4:].upper())
    assert capitals != data
    assert verify_frame(memoryview(capitals), header.offset) is None


def test_payload_that_quotes_a_header_does_not_confuse_reading_or_sealing():
    quoting = e.AttemptSuperseded(
        group_id=1,
        generation=0,
        attempt=1,
        reason=Reason.TIMEOUT,
        detail=(PLACEHOLDER + b" " + MAGIC + b" off=0").decode(),
    )
    data, header = built_frame(quoting, sealed_result(0, 0, 1))
    assert verify_frame(memoryview(data), header.offset) == header


def test_frame_without_the_placeholder_cannot_be_sealed():
    with pytest.raises(ValueError, match="placeholder"):
        seal_frame(memoryview(bytearray(b"no placeholder here")), TINY_HEADER)


def test_seed_chains_the_checksum_to_bytes_before_the_frame():
    frame = bytearray(b"...." + PLACEHOLDER + b"....")
    header = seal_frame(memoryview(frame), FrameHeader(0, 0, 1, 0, 1, 0, 0, 0), seed=zlib.crc32(b"prefix"))
    assert verify_frame(memoryview(frame), 0, seed=zlib.crc32(b"prefix")) == header
    assert verify_frame(memoryview(frame), 0, seed=zlib.crc32(b"prefiy")) is None
