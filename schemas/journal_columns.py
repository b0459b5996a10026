"""The Arrow schema of the row journal: one row for each model call that a worker staged."""

import pyarrow as pa

from kinlog.schemas.prompts import DIGEST_BYTES

__all__ = ["JOURNAL_IDENTITY", "journal_schema"]

#: What says which row it is: enough to know whether the row is still needed.
JOURNAL_IDENTITY: tuple[str, ...] = ("group_id", "generation", "attempt", "call")


def journal_schema(metadata: dict[str, str] | None = None) -> pa.Schema:
    """Return the schema of a journal segment.

    Columns: ``group_id`` to ``call`` are the row's identity; ``row_digest`` is its content's, as receipts have it.
    ``token_ids`` are the call's prompt and then its completion, P + C of them, and ``prompt_tokens`` is P: the mask of
    what the policy generated is false for the first P and true for the rest. ``logprobs`` and ``weight_versions`` have
    one value for each of the C completion tokens.
    """
    fields = [
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("generation", pa.int32(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("call", pa.int32(), nullable=False),
        pa.field("row_digest", pa.binary(DIGEST_BYTES), nullable=False),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("token_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
        pa.field("logprobs", pa.list_(pa.field("item", pa.float32(), nullable=False)), nullable=False),
        pa.field("weight_versions", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
    ]
    return pa.schema(fields, metadata=dict(metadata) if metadata else None)
