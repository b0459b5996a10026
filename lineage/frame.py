"""Frames: the unit of commit, and the checksum that is verified before Arrow parses a byte.

A frame is one Arrow IPC record-batch message. Its header is a fixed-width ASCII text in the message's custom metadata,
so any Arrow reader passes over it. It is found by its magic, compared byte for byte with its canonical rendering, and
then the checksum over all bytes of the frame is compared: a flipped bit anywhere in the frame is seen.

The checksum is CRC-32 (``zlib.crc32``): it finds every single burst of up to 32 bits, and guards against accidents,
not against forgery. Each header carries the checksum of the frame before it, so frames cannot be dropped, repeated or
swapped unnoticed.
"""

import re
import zlib
from typing import NamedTuple

__all__ = ["FrameHeader", "METADATA_KEY", "MAGIC", "PLACEHOLDER", "seal_frame", "verify_frame", "find_header"]

METADATA_KEY = b"kinlog.frame"
MAGIC = b"KINLOG1 "

_FORMAT = b"KINLOG1 off=%016x len=%08x seq=%016x num=%08x epoch=%08x durable=%016x prev=%08x sum=%08x"
_PATTERN = re.compile(
    rb"KINLOG1 off=([0-9a-f]{16}) len=([0-9a-f]{8}) seq=([0-9a-f]{16}) num=([0-9a-f]{8}) "
    rb"epoch=([0-9a-f]{8}) durable=([0-9a-f]{16}) prev=([0-9a-f]{8}) sum=([0-9a-f]{8})"
)

#: What a frame is built with, before its place and its bytes are known.
PLACEHOLDER = _FORMAT % (0, 0, 0, 0, 0, 0, 0, 0)
_PLACEHOLDER = re.compile(re.escape(PLACEHOLDER))
_SUM_BYTES = 8
_NO_SUM = b"0" * _SUM_BYTES

#: A record batch of the log's schema has well under this much metadata before its header's end.
_SEARCH_BYTES = 8192


class FrameHeader(NamedTuple):
    """What a frame says of itself."""

    offset: int
    """Byte offset of the frame in its segment: a frame that was moved does not verify."""
    length: int
    """Bytes of the whole message, prefix, metadata and body."""
    first_seq: int
    """seq of its first event; for a frame without events, of the next event."""
    num_events: int
    epoch: int
    durable_seq: int
    """Every event up to here was durable when this frame was written: losing one of them is damage, not a crash."""
    previous: int
    """Checksum of the frame before it, over segments; 0 for the first of a log."""
    checksum: int

    @property
    def last_seq(self) -> int:
        return self.first_seq + self.num_events - 1

    @property
    def end(self) -> int:
        return self.offset + self.length


def seal_frame(frame: memoryview, header: FrameHeader, seed: int = 0) -> FrameHeader:
    """Write the header into a frame built with ``PLACEHOLDER``, and return it with its length and checksum.

    ``seed`` is the CRC-32 of the bytes that the checksum covers before the frame: the segment's prefix for its opening
    frame, nothing for all others.
    """
    found = _PLACEHOLDER.search(frame)
    if found is None:
        raise ValueError("the frame was not built with the header's placeholder")
    at = found.start()
    end = at + len(PLACEHOLDER)
    header = header._replace(length=len(frame), checksum=0)
    frame[at:end] = _FORMAT % header
    header = header._replace(checksum=zlib.crc32(frame, seed))
    frame[end - _SUM_BYTES : end] = b"%08x" % header.checksum
    return header


def find_header(data: memoryview, start: int, limit: int | None = None) -> tuple[int, FrameHeader] | None:
    """Return the position and content of the first canonical header at or after ``start``, or ``None``."""
    end = len(data) if limit is None else min(len(data), start + limit)
    found = _PATTERN.search(data[start:end])
    if found is None:
        return None
    return start + found.start(), FrameHeader(*(int(group, 16) for group in found.groups()))


def verify_frame(data: memoryview, offset: int, seed: int = 0, *, origin: int = 0) -> FrameHeader | None:
    """Return the header of the frame at ``offset`` if its every byte is as written, else ``None``.

    Whether it belongs at this place of the chain is for the caller to compare.

    Parameters
    ----------
    origin:
        Where in its file ``data`` begins: only the frame has to be in it.
    """
    found = find_header(data, offset, _SEARCH_BYTES)
    if found is None:
        return None
    at, header = found
    end = header.end - origin
    if header.offset - origin != offset or header.length < len(PLACEHOLDER) or end > len(data):
        return None
    sum_at = at + len(PLACEHOLDER) - _SUM_BYTES
    if sum_at + _SUM_BYTES > end:
        return None
    checksum = zlib.crc32(data[offset:sum_at], seed)
    checksum = zlib.crc32(_NO_SUM, checksum)
    checksum = zlib.crc32(data[sum_at + _SUM_BYTES : end], checksum)
    return header if checksum == header.checksum else None
