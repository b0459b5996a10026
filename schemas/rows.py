"""What the data plane says of its rows: typed identity and digest, so that no key is ever parsed."""

import msgspec

from kinlog.schemas.prompts import digest_bytes

__all__ = ["RowTag", "NO_CALL", "inventory_digest"]

#: ``RowTag.call`` of a canonical row, which belongs to no single model call.
NO_CALL = -1

_INVENTORY_DOMAIN = b"kinlog.inventory.1"


class RowTag(msgspec.Struct, frozen=True, kw_only=True):
    """What the data plane lists of one key."""

    done: bool = True
    """False for the leavings of a put that did not complete: all else is then unknown (-1, and an empty digest), and
    the only thing to do with the key is to clear it."""
    group_id: int
    generation: int
    attempt: int
    call: int
    """Model call of a staged row; ``NO_CALL`` for a canonical row."""
    digest: bytes
    """Digest of the row's content, as it was put."""


def inventory_digest(tags: dict[str, RowTag]) -> bytes:
    """Return the digest of a partition's visible rows: their keys and contents, whatever their order."""
    parts = [_INVENTORY_DOMAIN]
    for key in sorted(key for key, tag in tags.items() if tag.done):
        parts += (key.encode(), tags[key].digest)
    return digest_bytes(*parts)
