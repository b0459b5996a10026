"""Parts of model calls as the progress journal's columns, and back."""

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from kinlog.lineage.journal import Attempt
from kinlog.schemas.progress_columns import progress_schema
from kinlog.schemas.reasons import FinishReason
from kinlog.workers.engines import GeneratedTokens
from kinlog.workers.environments import Verdict
from kinlog.workers.model_calls import Turn

__all__ = ["CallPart", "parts_from_batch", "parts_to_batch"]


class CallPart(NamedTuple):
    """Some tokens of a model call, in a row, and how it ended if it did."""

    attempt: Attempt
    call: int
    position: int
    """Place of the first of the tokens in the call's completion."""
    prompt_digest: bytes
    tokens: GeneratedTokens
    finish_reason: FinishReason | None
    turn: Turn | None


def parts_to_batch(parts: Sequence[CallPart]) -> pa.RecordBatch:
    """Return the journal's batch of ``parts``, in their order."""
    schema = progress_schema()
    turns = [part.turn for part in parts]
    columns = {
        "group_id": [part.attempt[0] for part in parts],
        "generation": [part.attempt[1] for part in parts],
        "attempt": [part.attempt[2] for part in parts],
        "call": [part.call for part in parts],
        "position": [part.position for part in parts],
        "prompt_digest": [part.prompt_digest for part in parts],
        "token_ids": [part.tokens.token_ids for part in parts],
        "logprobs": [part.tokens.logprobs for part in parts],
        "weight_versions": [part.tokens.weight_versions for part in parts],
        "finish_reason": [part.finish_reason and part.finish_reason.value for part in parts],
        "turn_reward": [turn and turn.verdict.reward for turn in turns],
        "turn_well_formed": [turn and turn.verdict.well_formed for turn in turns],
        "turn_feedback": [turn and turn.verdict.feedback for turn in turns],
        "turn_state_version": [turn and turn.state_version for turn in turns],
        "turn_state": [turn and turn.state for turn in turns],
    }
    return pa.RecordBatch.from_pydict(columns, schema=schema)


def parts_from_batch(batch: pa.RecordBatch, wanted: Container[Attempt]) -> Iterator[CallPart]:
    """Yield the parts of the wanted attempts in a batch of the progress journal."""
    identities = (batch.column(name).to_pylist() for name in ("group_id", "generation", "attempt"))
    for place, attempt in enumerate(zip(*identities, strict=True)):
        if attempt not in wanted:
            continue
        (row,) = batch.slice(place, 1).to_pylist()
        yield CallPart(
            attempt=attempt,
            call=row["call"],
            position=row["position"],
            prompt_digest=row["prompt_digest"],
            tokens=GeneratedTokens(row["token_ids"], row["logprobs"], row["weight_versions"]),
            finish_reason=None if row["finish_reason"] is None else FinishReason(row["finish_reason"]),
            turn=_turn(row),
        )


def _turn(row: dict[str, object]) -> Turn | None:
    match row:
        case {
            "turn_reward": float(reward),
            "turn_well_formed": bool(well_formed),
            "turn_feedback": (str() | None) as feedback,
            "turn_state_version": int(state_version),
            "turn_state": bytes(state),
        }:
            verdict = Verdict(reward=reward, well_formed=well_formed, feedback=feedback)
            return Turn(verdict, state, state_version)
        case _:
            return None
