"""From a sealed sibling's staged rows to its training example: pure functions, checked against the receipt.

The receipt is what the log knows of a sibling's content; the staged rows are what the data plane gives back for it.
Nothing here trusts the second: a row that is absent, foreign or altered is refused by name, before it can be trained.
"""

from collections.abc import Mapping, Sequence

import torch

from kinlog.schemas.errors import DataPlaneError, RowsMissingError
from kinlog.schemas.reasons import Validity
from kinlog.schemas.receipts import ModelCall, Receipt, canonical_key, staging_key
from kinlog.workers.rows import MASKED_WEIGHT_VERSION, CanonicalRow, StagedRow, row_digest

__all__ = ["build_canonical_row", "linearize", "verify_staged_rows"]


def build_canonical_row(
    *,
    group_id: int,
    generation: int,
    attempt: int,
    draw_index: int,
    receipt: Receipt | None,
    staged: Mapping[int, StagedRow],
    prompt_token_ids: Sequence[int],
    validity: Validity,
    raw_reward: float,
    shaped_reward: float,
) -> CanonicalRow:
    """Return the training example of one sealed sibling.

    Parameters
    ----------
    group_id, generation, attempt, draw_index:
        Identity of the sibling's accepted attempt, and of its group's draw.
    receipt:
        What the seal recorded, or ``None`` for a placeholder sibling, which was sealed to keep its group at N.
    staged:
        The attempt's staged rows by model call, exactly those that the receipt lists.
    prompt_token_ids:
        The prompt, at least one token. Only a placeholder is built from it; a placeholder's row is masked throughout.
    validity:
        As sealed. Whatever is not valid is masked throughout: it keeps its place in the group, and teaches nothing.
    raw_reward, shaped_reward:
        As sealed.

    Raises
    ------
    RowsMissingError
        When the receipt lists a row that ``staged`` lacks.
    DataPlaneError
        When a row is not what the receipt says, or the calls do not continue each other.
    ValueError
        When a placeholder has no prompt tokens, or the receipt lists no call at all.
    """
    if receipt is None:
        if staged:
            raise DataPlaneError(
                f"{canonical_key(group_id, generation, attempt)}: a placeholder has no receipt, so nothing can vouch for "
                f"staged rows, but {len(staged)} were given (calls {sorted(staged)[:8]}). Clear them instead."
            )
        token_ids = torch.tensor(list(prompt_token_ids), dtype=torch.int64)
        loss_mask, logprobs, weight_versions = _blank_columns(len(token_ids))
    else:
        verify_staged_rows(receipt, staged, group_id=group_id, generation=generation, attempt=attempt)
        token_ids, loss_mask, logprobs, weight_versions = _assemble(linearize(receipt, staged))
        if validity is not Validity.VALID:
            loss_mask, logprobs, weight_versions = _blank_columns(len(token_ids))
    return CanonicalRow(
        group_id=group_id,
        generation=generation,
        attempt=attempt,
        draw_index=draw_index,
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        weight_versions=weight_versions,
        valid=validity is Validity.VALID,
        raw_reward=raw_reward,
        shaped_reward=shaped_reward,
    )


def verify_staged_rows(
    receipt: Receipt, staged: Mapping[int, StagedRow], *, group_id: int, generation: int, attempt: int
) -> None:
    """Check every staged row against the receipt: identity, lengths, weight versions and digest.

    Rows of dead branches are checked too: the receipt vouches for all of them or for none.

    Raises
    ------
    RowsMissingError
        When a listed row is absent; the message names the first few keys.
    DataPlaneError
        When a row differs from the receipt, or is not listed in it. The message names the key, the fact, what was
        expected and what was found.
    ValueError
        When the receipt lists no call, or its calls are not numbered from 0 with parents before their children.
    """
    _check_manifest(receipt)
    missing = [call.call for call in receipt.calls if call.call not in staged]
    if missing:
        keys = [staging_key(group_id, generation, attempt, call) for call in missing]
        raise RowsMissingError(
            f"{len(missing)} of {len(receipt.calls)} staged rows are missing, the first of them {keys[:4]}. "
            "Redispatch the sibling, or restore a checkpoint that has them."
        )
    unlisted = sorted(set(staged) - {call.call for call in receipt.calls})
    if unlisted:
        raise DataPlaneError(
            f"row {staging_key(group_id, generation, attempt, unlisted[0])}: the receipt lists calls 0 to "
            f"{len(receipt.calls) - 1} only, and cannot vouch for this one"
        )
    for call in receipt.calls:
        row = staged[call.call]
        key = staging_key(group_id, generation, attempt, call.call)
        identity = (row.group_id, row.generation, row.attempt, row.call)
        _expect(key, "identity", (group_id, generation, attempt, call.call), identity)
        _expect(key, "prompt tokens", call.prompt_tokens, row.prompt_tokens)
        _expect(key, "completion tokens", call.completion_tokens, row.completion_tokens)
        if row.completion_tokens:  # a zero-token completion has no versions of its own to compare
            _expect(key, "oldest weight version", call.min_weight_version, int(row.weight_versions.min()))
            _expect(key, "newest weight version", call.max_weight_version, int(row.weight_versions.max()))
        _expect(key, "digest", call.row_digest.hex(), row_digest(row).hex())


def linearize(receipt: Receipt, staged: Mapping[int, StagedRow]) -> tuple[StagedRow, ...]:
    """Return the rows of the calls that lead from the root to the last call, in that order.

    A call whose context no later call of that chain extends is a dead branch (a retried turn, a side question): it was
    generated, but it is not part of the episode that was scored, and is left out.

    Every child, on a dead branch too, must begin with its parent's prompt and completion, token for token: otherwise
    a chat template or a retokenization changed history between the calls, and the log-probabilities that were recorded
    are not those of the tokens that would be trained.

    Raises
    ------
    DataPlaneError
        When a call does not continue its parent; the message names the key and the first differing position.
    """
    for call in receipt.calls:
        if call.parent >= 0:
            _check_continues(parent=staged[call.parent], child=staged[call.call])
    chain: list[StagedRow] = []
    position = receipt.calls[-1].call
    while position >= 0:
        chain.append(staged[position])
        position = receipt.calls[position].parent
    chain.reverse()
    return tuple(chain)


def _check_manifest(receipt: Receipt) -> None:
    if not receipt.calls:
        raise ValueError(
            "the receipt lists no model call; a sibling without any is sealed with no receipt at all"
        )
    for position, call in enumerate(receipt.calls):
        # Parents before children: a walk to the root always ends, whatever a damaged receipt says.
        if call.call != position or not -1 <= call.parent < position:
            raise ValueError(
                f"the receipt's call at position {position} is {_render(call)}: not an ordered manifest"
            )


def _check_continues(*, parent: StagedRow, child: StagedRow) -> None:
    history = parent.token_ids
    shared = min(int(history.numel()), child.prompt_tokens)
    differing = (history[:shared] != child.token_ids[:shared]).nonzero()
    if differing.numel():
        at = int(differing[0])
        raise DataPlaneError(
            f"row {child.key}: its prompt must begin with the tokens of its parent {parent.key}, but at position {at} "
            f"expected {int(history[at])}, found {int(child.token_ids[at])}"
        )
    if shared < history.numel():
        raise DataPlaneError(
            f"row {child.key}: its prompt must begin with all {history.numel()} tokens of its parent {parent.key}, but "
            f"holds only {child.prompt_tokens}"
        )


def _blank_columns(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.zeros(length, dtype=torch.bool),
        torch.zeros(length, dtype=torch.float32),
        torch.full((length,), MASKED_WEIGHT_VERSION, dtype=torch.int32),
    )


def _assemble(
    chain: tuple[StagedRow, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lay the chain's completions over the last call's tokens, which hold all of them at the same positions."""
    token_ids = chain[-1].token_ids
    loss_mask, logprobs, weight_versions = _blank_columns(int(token_ids.numel()))
    for row in chain:
        generated = slice(row.prompt_tokens, int(row.token_ids.numel()))
        loss_mask[generated] = True
        logprobs[generated] = row.logprobs
        weight_versions[generated] = row.weight_versions
    return token_ids, loss_mask, logprobs, weight_versions


def _expect(key: str, fact: str, expected: object, found: object) -> None:
    if expected != found:
        raise DataPlaneError(
            f"row {key} is not what its receipt says: {fact}: expected {expected}, found {found}. "
            "Do not train on it: redispatch the sibling."
        )


def _render(call: ModelCall) -> str:
    return f"call {call.call} with parent {call.parent}"
