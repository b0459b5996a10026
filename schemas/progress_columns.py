"""The Arrow schema of the progress journal: the tokens of model calls whose rollout has not ended, as they come."""

import pyarrow as pa

from kinlog.schemas.prompts import DIGEST_BYTES

__all__ = ["progress_schema"]


def progress_schema(metadata: dict[str, str] | None = None) -> pa.Schema:
    """Return the schema of a progress segment.

    A row is a part of one model call: tokens ``position`` to ``position + T - 1`` of its completion, in ``token_ids``,
    ``logprobs`` and ``weight_versions``. A call's parts follow each other, and its later ones may be missing.

    ``prompt_digest`` is of the token ids that the call was given. ``finish_reason`` is set once the call has ended. What
    begins with ``turn_`` is set once its answer has been judged, if the environment gave its state:
    ``turn_feedback`` is null where the rollout ended with this turn.
    """
    item = {"nullable": False}
    fields = [
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("generation", pa.int32(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("call", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("prompt_digest", pa.binary(DIGEST_BYTES), nullable=False),
        pa.field("token_ids", pa.list_(pa.field("item", pa.int32(), **item)), nullable=False),
        pa.field("logprobs", pa.list_(pa.field("item", pa.float32(), **item)), nullable=False),
        pa.field("weight_versions", pa.list_(pa.field("item", pa.int32(), **item)), nullable=False),
        pa.field("finish_reason", pa.utf8()),
        pa.field("turn_reward", pa.float64()),
        pa.field("turn_well_formed", pa.bool_()),
        pa.field("turn_feedback", pa.utf8()),
        pa.field("turn_state_version", pa.int32()),
        pa.field("turn_state", pa.large_binary()),
    ]
    return pa.schema(fields, metadata=dict(metadata) if metadata else None)
