"""Rows of the data plane, as small and as varied as the tests need them."""

from typing import Any

import torch

from kinlog.workers.rows import CanonicalRow, StagedRow


def make_staged_row(
    group_id: int = 0,
    generation: int = 0,
    attempt: int = 0,
    call: int = 0,
    *,
    prompt: int = 3,
    completion: int = 5,
    seed: int = 0,
) -> StagedRow:
    """Return the row of a model call, with tokens that only 64 bits hold; the same for the same arguments."""
    random = torch.Generator().manual_seed(seed * 1_000_003 + group_id * 1009 + generation * 101 + call)
    return StagedRow(
        group_id=group_id,
        generation=generation,
        attempt=attempt,
        call=call,
        token_ids=torch.randint(2**33, 2**40, (prompt + completion,), generator=random),
        prompt_tokens=prompt,
        logprobs=-torch.rand(completion, generator=random),
        weight_versions=torch.full((completion,), 2, dtype=torch.int32),
    )


def make_canonical_row(
    group_id: int = 0, generation: int = 0, *, raw_reward: float = 0.1, **changes: Any
) -> CanonicalRow:
    """Return a training example of four tokens, two of them the policy's."""
    fields: dict[str, Any] = {
        "group_id": group_id,
        "generation": generation,
        "attempt": 0,
        "draw_index": 7,
        "token_ids": torch.arange(4) + 2**40,
        "loss_mask": torch.tensor([False, True, True, False]),
        "logprobs": torch.tensor([0.0, -0.5, -0.25, 0.0]),
        "weight_versions": torch.tensor([-1, 3, 3, -1], dtype=torch.int32),
        "raw_reward": raw_reward,
        "shaped_reward": -1.5,
    }
    return CanonicalRow(**({"valid": True} | fields | changes))
