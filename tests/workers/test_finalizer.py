"""The finalizer: what it builds from staged rows, and what it refuses to build from."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kinlog.schemas.errors import DataPlaneError, RowsMissingError
from kinlog.schemas.reasons import Validity
from kinlog.schemas.receipts import ModelCall, Receipt
from kinlog.workers.finalizer import build_canonical_row, linearize
from kinlog.workers.rows import CanonicalRow, StagedRow, row_digest

GROUP, GENERATION, ATTEMPT = 11, 3, 2


def staged_call(call: int, prompt: Sequence[int], completion: Sequence[int], version: int = 4) -> StagedRow:
    return StagedRow(
        group_id=GROUP,
        generation=GENERATION,
        attempt=ATTEMPT,
        call=call,
        token_ids=torch.tensor([*prompt, *completion], dtype=torch.int64),
        prompt_tokens=len(prompt),
        logprobs=torch.tensor([-token / 100 for token in completion], dtype=torch.float32),
        weight_versions=torch.full((len(completion),), version, dtype=torch.int32),
    )


def receipt_of(rows: Sequence[StagedRow], parents: Sequence[int]) -> Receipt:
    return Receipt(
        calls=tuple(
            ModelCall(
                call=row.call,
                parent=parent,
                prompt_tokens=row.prompt_tokens,
                completion_tokens=row.completion_tokens,
                min_weight_version=int(row.weight_versions.min()) if row.completion_tokens else 0,
                max_weight_version=int(row.weight_versions.max()) if row.completion_tokens else 0,
                row_digest=row_digest(row),
            )
            for row, parent in zip(rows, parents, strict=True)
        )
    )


def canonical(
    receipt: Receipt | None,
    rows: Sequence[StagedRow],
    prompt: Sequence[int] = (1,),
    validity: Validity = Validity.VALID,
) -> CanonicalRow:
    return build_canonical_row(
        group_id=GROUP,
        generation=GENERATION,
        attempt=ATTEMPT,
        draw_index=5,
        receipt=receipt,
        staged={row.call: row for row in rows},
        prompt_token_ids=prompt,
        validity=validity,
        raw_reward=1.0,
        shaped_reward=0.5,
    )


#: Two turns: prompt 1 2, completion 10 11, tool output 50 51, completion 20.
TWO_TURNS = (
    staged_call(0, [1, 2], [10, 11], version=4),
    staged_call(1, [1, 2, 10, 11, 50, 51], [20], version=6),
)


def test_policy_tokens_are_trained_and_prompt_and_tool_tokens_are_not():
    row = canonical(receipt_of(TWO_TURNS, [-1, 0]), TWO_TURNS)
    assert row.token_ids.tolist() == [1, 2, 10, 11, 50, 51, 20]
    assert row.loss_mask.tolist() == [False, False, True, True, False, False, True]
    assert row.weight_versions.tolist() == [-1, -1, 4, 4, -1, -1, 6]
    assert row.logprobs.tolist() == pytest.approx([0, 0, -0.10, -0.11, 0, 0, -0.20])
    assert (row.raw_reward, row.shaped_reward, row.draw_index) == (1.0, 0.5, 5)


def test_a_branch_that_the_last_call_does_not_continue_is_left_out():
    dead = staged_call(1, [1, 2, 10, 11, 60], [33, 34])
    last = staged_call(2, [1, 2, 10, 11, 50], [20])
    rows = (TWO_TURNS[0], dead, last)
    receipt = receipt_of(rows, [-1, 0, 0])
    assert [row.call for row in linearize(receipt, dict(enumerate(rows)))] == [0, 2]
    assert canonical(receipt, rows).token_ids.tolist() == [1, 2, 10, 11, 50, 20]


def test_a_dead_root_is_left_out():
    rows = (staged_call(0, [9], [8]), staged_call(1, [1, 2], [10]))
    assert canonical(receipt_of(rows, [-1, -1]), rows).token_ids.tolist() == [1, 2, 10]


def test_a_zero_token_completion_gives_a_fully_masked_row():
    rows = (staged_call(0, [1, 2], []),)
    row = canonical(receipt_of(rows, [-1]), rows)
    assert row.token_ids.tolist() == [1, 2]
    assert not row.loss_mask.any()


@pytest.mark.parametrize("validity", [Validity.FAILED, Validity.POISONED])
def test_what_is_not_valid_is_masked_throughout_and_keeps_its_tokens(validity: Validity):
    row = canonical(receipt_of(TWO_TURNS, [-1, 0]), TWO_TURNS, validity=validity)
    assert row.token_ids.tolist() == [1, 2, 10, 11, 50, 51, 20]
    assert not row.valid
    assert not row.loss_mask.any()
    assert row.weight_versions.tolist() == [-1] * 7


def test_a_placeholder_is_its_masked_prompt():
    row = canonical(None, [], prompt=[7, 8, 9], validity=Validity.PLACEHOLDER)
    assert not row.valid
    assert row.token_ids.tolist() == [7, 8, 9]
    assert not row.loss_mask.any()
    assert row.weight_versions.tolist() == [-1, -1, -1]


def test_a_placeholder_without_prompt_tokens_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        canonical(None, [], prompt=[])


def test_a_placeholder_with_staged_rows_is_refused():
    with pytest.raises(DataPlaneError, match=r"g11\.s3\.a2: a placeholder has no receipt"):
        canonical(None, TWO_TURNS)


def test_a_missing_staged_row_is_named():
    with pytest.raises(RowsMissingError, match=r"1 of 2 staged rows are missing.*g11\.s3\.a2\.c0"):
        canonical(receipt_of(TWO_TURNS, [-1, 0]), TWO_TURNS[1:])


def test_a_staged_row_that_no_call_of_the_receipt_lists_is_refused():
    with pytest.raises(DataPlaneError, match=r"g11\.s3\.a2\.c1: the receipt lists calls 0 to 0 only"):
        canonical(receipt_of(TWO_TURNS[:1], [-1]), TWO_TURNS)


@pytest.mark.parametrize(
    ("fact", "change", "message"),
    [
        ("prompt_tokens", 3, "prompt tokens: expected 3, found 2"),
        ("completion_tokens", 1, "completion tokens: expected 1, found 2"),
        ("min_weight_version", 3, "oldest weight version: expected 3, found 4"),
        ("max_weight_version", 5, "newest weight version: expected 5, found 4"),
        ("row_digest", bytes(16), f"digest: expected {'00' * 16}, found"),
    ],
)
def test_a_row_that_differs_from_its_receipt_is_refused_by_name(fact: str, change: object, message: str):
    receipt = receipt_of(TWO_TURNS, [-1, 0])
    wrong = msgspec.structs.replace(receipt.calls[0], **{fact: change})
    with pytest.raises(DataPlaneError, match=rf"g11\.s3\.a2\.c0 is not what its receipt says: {message}"):
        canonical(Receipt(calls=(wrong, receipt.calls[1])), TWO_TURNS)


def test_a_row_of_another_attempt_is_refused():
    receipt = receipt_of(TWO_TURNS, [-1, 0])
    foreign = (replace(TWO_TURNS[0], attempt=ATTEMPT + 1), TWO_TURNS[1])
    with pytest.raises(DataPlaneError, match=r"identity: expected \(11, 3, 2, 0\), found \(11, 3, 3, 0\)"):
        canonical(receipt, foreign)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 2, 10, 12, 50], "position 3 expected 11, found 12"),
        ([1, 2, 10], "all 4 tokens of its parent g11.s3.a2.c0, but holds only 3"),
    ],
)
def test_a_child_that_does_not_continue_its_parent_is_refused(prompt: list[int], message: str):
    rows = (TWO_TURNS[0], staged_call(1, prompt, [20]))
    with pytest.raises(DataPlaneError, match=message):
        canonical(receipt_of(rows, [-1, 0]), rows)


@pytest.mark.parametrize("parents", [[0, -1], [-1, 1], [-1, -2], [-1, 7]])
def test_a_receipt_whose_parents_do_not_come_first_is_refused(parents: list[int]):
    with pytest.raises(ValueError, match="not an ordered manifest"):
        canonical(receipt_of(TWO_TURNS, parents), TWO_TURNS)


def test_a_receipt_without_calls_is_refused():
    with pytest.raises(ValueError, match="lists no model call"):
        canonical(Receipt(calls=()), [])


@given(
    turns=st.lists(
        st.tuples(st.lists(st.integers(0, 99), max_size=4), st.lists(st.integers(100, 199), max_size=4)),
        min_size=1,
        max_size=5,
    )
)
def test_every_policy_token_is_trained_once_and_nothing_else(turns: list[tuple[list[int], list[int]]]):
    context = [0]
    rows: list[StagedRow] = []
    expected = [False]
    for call, (feedback, completion) in enumerate(turns):
        context = [*context, *feedback]
        rows.append(staged_call(call, context, completion))
        context = [*context, *completion]
        expected += [False] * len(feedback) + [True] * len(completion)
    row = canonical(receipt_of(rows, range(-1, len(rows) - 1)), rows)
    assert row.token_ids.tolist() == context
    assert row.loss_mask.tolist() == expected
    assert int(row.loss_mask.sum()) == receipt_of(rows, range(-1, len(rows) - 1)).completion_tokens


def test_building_a_row_leaves_the_staged_rows_as_they_were():
    before: list[bytes] = [row_digest(row) for row in TWO_TURNS]
    canonical(receipt_of(TWO_TURNS, [-1, 0]), TWO_TURNS)
    assert [row_digest(row) for row in TWO_TURNS] == before


def test_the_same_inputs_give_the_same_row_whatever_their_memory_layout():
    strided = torch.stack([TWO_TURNS[1].token_ids, TWO_TURNS[1].token_ids + 1], dim=1)[:, 0]
    build: Callable[[StagedRow], CanonicalRow] = lambda last: canonical(  # noqa: E731
        receipt_of(TWO_TURNS, [-1, 0]), (TWO_TURNS[0], last)
    )
    assert row_digest(build(replace(TWO_TURNS[1], token_ids=strided))) == row_digest(build(TWO_TURNS[1]))
