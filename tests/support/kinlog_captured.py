"""From captured calls to the row that is trained, as worker and finalizer go together."""

from collections.abc import Sequence

import torch

from kinlog.schemas.reasons import Validity
from kinlog.schemas.receipts import ModelCall, Receipt
from kinlog.workers.finalizer import build_canonical_row
from kinlog.workers.model_calls import CapturedCall
from kinlog.workers.rows import CanonicalRow, StagedRow, row_digest

GROUP, GENERATION, ATTEMPT = 3, 1, 2


def staged_rows(calls: Sequence[CapturedCall]) -> list[StagedRow]:
    """The rows that a worker stages for an attempt's calls."""
    return [
        StagedRow(
            group_id=GROUP,
            generation=GENERATION,
            attempt=ATTEMPT,
            call=call.call,
            token_ids=torch.cat([call.prompt_token_ids, call.completion.token_ids]),
            prompt_tokens=len(call.prompt_token_ids),
            logprobs=call.completion.logprobs,
            weight_versions=call.completion.weight_versions,
        )
        for call in calls
    ]


def receipt_of(calls: Sequence[CapturedCall], rows: Sequence[StagedRow]) -> Receipt:
    """What is recorded of them."""
    return Receipt(
        tuple(
            ModelCall(
                call=call.call,
                parent=call.parent,
                prompt_tokens=row.prompt_tokens,
                completion_tokens=row.completion_tokens,
                min_weight_version=int(row.weight_versions.min()),
                max_weight_version=int(row.weight_versions.max()),
                row_digest=row_digest(row),
            )
            for call, row in zip(calls, rows, strict=True)
        )
    )


def trained_row(calls: Sequence[CapturedCall]) -> CanonicalRow:
    """The row that the finalizer makes of them, once it has verified them against their receipt."""
    rows = staged_rows(calls)
    return row_of_receipt(receipt_of(calls, rows), rows)


def row_of_receipt(receipt: Receipt, rows: Sequence[StagedRow]) -> CanonicalRow:
    """The row that the finalizer makes of what a worker reported and staged."""
    return build_canonical_row(
        group_id=rows[0].group_id,
        generation=rows[0].generation,
        attempt=rows[0].attempt,
        draw_index=0,
        receipt=receipt,
        staged={row.call: row for row in rows},
        prompt_token_ids=(),
        validity=Validity.VALID,
        raw_reward=1.0,
        shaped_reward=1.0,
    )


def surviving(calls: Sequence[CapturedCall]) -> list[CapturedCall]:
    """The calls that the last one goes on from, and the last one."""
    chain, place = [], len(calls) - 1
    while place >= 0:
        chain.append(calls[place])
        place = calls[place].parent
    return chain[::-1]
