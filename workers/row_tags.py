"""Tags as TransferQueue stores them: what makes a row visible, and tells its identity and digest."""

from collections.abc import Mapping

from kinlog.schemas.errors import DataPlaneError
from kinlog.schemas.prompts import DIGEST_BYTES
from kinlog.schemas.rows import NO_CALL, RowTag
from kinlog.workers.rows import Row, StagedRow, row_digest

__all__ = ["read_tag", "write_tag"]

_UNDONE = RowTag(done=False, group_id=-1, generation=-1, attempt=-1, call=NO_CALL, digest=b"")


def write_tag(row: Row) -> dict[str, object]:
    """Return the tag that makes ``row`` visible, as the data plane stores it."""
    return {
        "done": True,
        "group_id": row.group_id,
        "generation": row.generation,
        "attempt": row.attempt,
        "call": row.call if isinstance(row, StagedRow) else NO_CALL,
        "digest": row_digest(row),
    }


def read_tag(key: str, stored: Mapping[str, object]) -> RowTag:
    """Return the stored tag of ``key``; a key without one has not been put completely.

    Raises
    ------
    DataPlaneError
        When there is a tag that :func:`write_tag` did not make.
    """
    if not stored:
        return _UNDONE
    match stored:
        case {
            "done": True,
            "group_id": int(group_id),
            "generation": int(generation),
            "attempt": int(attempt),
            "call": int(call),
            "digest": bytes(digest),
        } if len(digest) == DIGEST_BYTES:
            return RowTag(
                done=True,
                group_id=group_id,
                generation=generation,
                attempt=attempt,
                call=call,
                digest=digest,
            )
        case _:
            raise DataPlaneError(
                f"key {key}: expected a tag of kinlog's, found {dict(stored)!r}. Something else writes to this "
                "TransferQueue, or it was loaded from another program's checkpoint."
            )
