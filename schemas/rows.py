"""What the data plane says of its rows: typed identity and digest, so that no key is ever parsed."""

import msgspec

from kinlog.schemas.prompts import Digest, digest_bytes

__all__ = ["RowTag", "NO_CALL", "inventory_digest"]

#: ``RowTag.call`` of a canonical row, which belongs to no single model call.
NO_CALL = -1


class RowTag(msgspec.Struct, frozen=True):
    """The identity and the content of one visible row."""

    group_id: int
    generation: int
    attempt: int
    call: int
    row_digest: Digest


def inventory_digest(tags: dict[str, RowTag]) -> bytes:
    """Return the digest over the keys and row digests of a partition, in key order."""
    return digest_bytes(*(part for key in sorted(tags) for part in (key.encode(), tags[key].row_digest)))
