"""Rollouts of 131,072 tokens all the way: staged, journalled, lost, put back, and finalized, on the real data plane."""

from pathlib import Path

import pytest
import torch
from kinlog_builders import prompt_ref
from kinlog_lives import run_config

from kinlog.schemas.codec import MAX_PAYLOAD_BYTES, encode_event
from kinlog.schemas.events import SiblingSealed
from kinlog.schemas.orders import FinalizeOrder
from kinlog.schemas.reasons import FinishReason, Partition, Validity
from kinlog.schemas.receipts import ModelCall, Receipt, canonical_key
from kinlog.schemas.rows import RowTag
from kinlog.schemas.settings import RowJournalSettings
from kinlog.workers.data_plane import DataPlane
from kinlog.workers.finalizer_worker import FinalizerWorker
from kinlog.workers.row_journalling import journalled, open_journal
from kinlog.workers.rows import StagedRow, row_digest

pytest_plugins = ["kinlog_data_plane"]
pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("the data plane")]

TOKENS = 131_072


def rollout(generation: int) -> list[StagedRow]:
    """Two model calls, of which the second reads and extends the first."""
    chance = torch.Generator().manual_seed(generation)
    token_ids = torch.randint(0, 151_936, (TOKENS,), generator=chance)
    lengths = ((1_000, TOKENS // 2), (TOKENS // 2 + 200, TOKENS))
    return [
        StagedRow(
            group_id=1,
            generation=generation,
            attempt=1,
            call=call,
            token_ids=token_ids[:total].clone(),
            prompt_tokens=prompt,
            logprobs=-torch.rand(total - prompt, generator=chance),
            weight_versions=torch.full((total - prompt,), 3, dtype=torch.int32),
        )
        for call, (prompt, total) in enumerate(lengths)
    ]


def sealed(rows: list[StagedRow]) -> SiblingSealed:
    calls = tuple(
        ModelCall(r.call, r.call - 1, r.prompt_tokens, r.completion_tokens, 3, 3, row_digest(r)) for r in rows
    )
    return SiblingSealed(
        group_id=1,
        generation=rows[0].generation,
        attempt=1,
        weight_version=3,
        max_weight_version=3,
        receipt=Receipt(calls),
        raw_reward=1.0,
        shaped_reward=1.0,
        prompt_tokens=rows[0].prompt_tokens,
        completion_tokens=sum(r.completion_tokens for r in rows),
        finish_reason=FinishReason.STOP,
        validity=Validity.VALID,
    )


async def test_rollouts_of_131072_tokens_are_lost_put_back_and_finalized_token_for_token(
    data_plane: DataPlane, tmp_path: Path
):
    rollouts = [rollout(generation) for generation in range(2)]
    rows = [row for of_sibling in rollouts for row in of_sibling]
    await journalled(data_plane.put_staged, open_journal(tmp_path, RowJournalSettings()))(rows)
    await data_plane.clear(Partition.STAGING, [row.key for row in rows], cut=None)

    tags = {
        r.key: RowTag(group_id=1, generation=r.generation, attempt=1, call=r.call, digest=row_digest(r))
        for r in rows
    }
    put_back = await data_plane.put_back(tmp_path, tags)
    assert (put_back.num_rows, put_back.missing, put_back.damaged) == (4, (), ())

    siblings = tuple(sealed(of_sibling) for of_sibling in rollouts)
    assert max(len(encode_event(event).payload) for event in siblings) < MAX_PAYLOAD_BYTES / 8
    finalizer = FinalizerWorker(run_config())
    finalizer._data_plane = data_plane
    refs = await finalizer.finalize(FinalizeOrder(group_id=1, prompt=prompt_ref(0), siblings=siblings))
    assert isinstance(refs, tuple), refs
    keys = [canonical_key(1, generation, 1) for generation in range(2)]
    found = await data_plane.get_canonical(keys)
    for of_sibling, ref, key in zip(rollouts, refs, keys, strict=True):
        last = of_sibling[-1]
        assert torch.equal(found[key].token_ids, last.token_ids)
        assert int(found[key].loss_mask.sum()) == sum(row.completion_tokens for row in of_sibling)
        assert torch.equal(found[key].logprobs[last.prompt_tokens :], last.logprobs)
        assert ref.row_digest == row_digest(found[key])
