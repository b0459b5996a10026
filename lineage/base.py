"""A base: the projection that stands for history that was dropped.

It is written by compaction where the policy says ``history: drop``. Replay begins with it, and the first segment that is
left chains to its place. What was before it is known only as far as a projection tells.
"""

import zlib
from pathlib import Path

import msgspec
import zstandard

from kinlog.lineage.state import Projection, decode_projection, encode_projection
from kinlog.lineage.store import Store
from kinlog.schemas.errors import LogDamagedError
from kinlog.schemas.events import Position
from kinlog.schemas.prompts import digest_bytes

__all__ = ["Base", "decode_base", "encode_base", "read_base"]

_MAGIC = b"KINLOGB1"
_CHECKSUM_BYTES = 4


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """A projection, and its place in the log."""

    log_id: str
    run_id: str
    position: Position
    """The last frame that was dropped: what follows chains to it."""
    fold_version: int
    """What made the projection. A newer kinlog goes on from it all the same, since nothing else is left: what it counts
    and the old one did not, it counts from here on."""
    digest: bytes
    """BLAKE2b-128 of ``projection``."""
    projection: bytes
    """The canonical msgpack."""

    def decode(self) -> Projection:
        """Return the projection, a new one each time: folding changes it in place."""
        return decode_projection(self.projection)


def encode_base(
    projection: Projection, *, log_id: str, run_id: str, position: Position, fold_version: int
) -> bytes:
    """Return a base's file: a magic, the CRC-32 of what follows, and the zstd-compressed msgpack of the base."""
    content = encode_projection(projection)
    base = Base(
        log_id=log_id,
        run_id=run_id,
        position=position,
        fold_version=fold_version,
        digest=digest_bytes(content),
        projection=content,
    )
    body = zstandard.ZstdCompressor(level=9, write_checksum=True).compress(msgspec.msgpack.encode(base))
    return _MAGIC + zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little") + body


def decode_base(data: bytes) -> Base:
    """Return what :func:`encode_base` wrote.

    Raises
    ------
    ValueError
        The bytes are not what was written; the message says what differs.
    """
    at = len(_MAGIC) + _CHECKSUM_BYTES
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"it begins with {data[: len(_MAGIC)].hex()}, expected {_MAGIC.hex()}")
    expected = int.from_bytes(data[len(_MAGIC) : at], "little")
    found = zlib.crc32(data[at:])
    if found != expected:
        raise ValueError(f"its checksum is {found:08x}, expected {expected:08x}")
    try:
        base = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(data[at:]), type=Base)
        base.decode()
    except (zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise ValueError(str(error)) from error
    if digest_bytes(base.projection) != base.digest:
        raise ValueError("its projection is not the one that its digest names")
    return base


def read_base(store: Store, path: Path) -> Base:
    """Read and verify a base.

    Raises
    ------
    LogDamagedError
        It is not what was written.
    """
    try:
        return decode_base(bytes(store.read(path)))
    except ValueError as error:
        raise LogDamagedError(
            "damaged base",
            segment=path.name,
            offset_bytes=0,
            seq=0,
            expected="the projection that history was dropped for",
            found=str(error),
        ) from error
