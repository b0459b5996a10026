"""Rows: what they refuse, and what their digests see."""

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kinlog_rows import make_canonical_row, make_staged_row

from kinlog.schemas.prompts import DIGEST_BYTES
from kinlog.schemas.reasons import Partition
from kinlog.schemas.rows import NO_CALL, RowTag, inventory_digest
from kinlog.workers.row_columns import canonical_from_columns, rows_to_columns, staged_from_columns
from kinlog.workers.row_tags import read_tag, write_tag
from kinlog.workers.rows import CanonicalRow, StagedRow, row_digest


def test_digest_of_a_row_is_the_one_that_logs_record():
    row = StagedRow(
        group_id=1,
        generation=2,
        attempt=3,
        call=4,
        token_ids=torch.tensor([5, 6, 2**40]),
        prompt_tokens=1,
        logprobs=torch.tensor([-0.5, -0.25]),
        weight_versions=torch.tensor([7, 8], dtype=torch.int32),
    )
    assert row_digest(row).hex() == "0a47bce091c660893b07458037db37b1"


def test_digest_of_a_canonical_row_is_the_one_that_logs_record():
    assert row_digest(make_canonical_row()).hex() == "031e758d1d36eec77d05fcf118160067"


def test_digest_does_not_depend_on_memory_layout():
    row = make_staged_row()
    strided = torch.stack([row.token_ids, torch.zeros_like(row.token_ids)], dim=1)[:, 0]
    offset = torch.cat([torch.zeros(9), row.logprobs])[9:]
    assert not strided.is_contiguous()
    assert row_digest(replace(row, token_ids=strided, logprobs=offset)) == row_digest(row)


@pytest.mark.parametrize(
    "change",
    [
        {
            "prompt_tokens": 7,
            "logprobs": torch.zeros(1),
            "weight_versions": torch.zeros(1, dtype=torch.int32),
        },
        {"token_ids": torch.arange(8)},
    ],
)
def test_digest_covers_all_content_of_a_staged_row(change: dict[str, Any]):
    row = make_staged_row(prompt=8, completion=0)
    assert row_digest(replace(row, **change)) != row_digest(row)


@pytest.mark.parametrize(
    "change",
    [
        {"draw_index": 8},
        {"raw_reward": 0.2},
        {"shaped_reward": 1.5},
        {"token_ids": torch.arange(4)},
        {"logprobs": torch.tensor([0.0, -0.5, -0.5, 0.0])},
        {"weight_versions": torch.tensor([-1, 3, 4, -1], dtype=torch.int32)},
        {"loss_mask": torch.tensor([True, True, True, False])},
        {"logprobs": torch.tensor([0.0, -0.5, -0.25, -0.0])},
    ],
)
def test_digest_covers_all_content_of_a_canonical_row(change: dict[str, Any]):
    row = make_canonical_row()
    assert row_digest(replace(row, **change)) != row_digest(row)


@pytest.mark.parametrize("row", [make_staged_row(), make_canonical_row()], ids=["staged", "canonical"])
def test_same_content_has_the_same_digest_in_every_attempt_and_every_run(row: StagedRow | CanonicalRow):
    assert row_digest(replace(row, group_id=8, generation=3, attempt=5)) == row_digest(row)


@given(
    tokens=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20),
    data=st.data(),
)
def test_any_change_of_one_token_changes_the_digest(tokens: list[int], data: st.DataObject):
    position = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(st.integers(-(2**63), 2**63 - 1).filter(lambda token: token != tokens[position]))

    def row_of(token_ids: list[int]) -> StagedRow:
        return StagedRow(
            group_id=0,
            generation=0,
            attempt=0,
            call=0,
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            prompt_tokens=len(token_ids),
            logprobs=torch.empty(0),
            weight_versions=torch.empty(0, dtype=torch.int32),
        )

    changed = [*tokens[:position], other, *tokens[position + 1 :]]
    assert row_digest(row_of(changed)) != row_digest(row_of(tokens))


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 0.0, -0.0])
def test_rewards_of_every_kind_are_kept(reward: float):
    row = make_canonical_row(raw_reward=reward)
    columns = rows_to_columns(Partition.TRAINING, [row])
    values = {name: column.unbind()[0] for name, column in columns.items()}
    assert row_digest(canonical_from_columns((0, 0, 0), values)) == row_digest(row)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": torch.zeros(8)}, "token_ids must have dtype torch.int64, found torch.float32"),
        ({"logprobs": torch.zeros(5, dtype=torch.float64)}, "logprobs must have dtype torch.float32"),
        (
            {"weight_versions": torch.zeros(5, dtype=torch.int64)},
            "weight_versions must have dtype torch.int32",
        ),
        ({"logprobs": torch.zeros(4)}, "logprobs must have 5 values, found 4"),
        ({"token_ids": torch.zeros(2, 4, dtype=torch.int64)}, "one dimension, found 2"),
        ({"token_ids": [1, 2]}, "token_ids must be a torch.Tensor, found list"),
        ({"prompt_tokens": 9}, "prompt_tokens is 9, but token_ids holds only 8"),
        ({"attempt": -1}, "attempt must be an int of at least 0, found -1"),
        ({"group_id": "7"}, "group_id must be an int of at least 0, found '7'"),
        ({"call": True}, "call must be an int of at least 0, found True"),
    ],
)
def test_a_staged_row_of_other_shape_is_refused_by_name(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        replace(make_staged_row(), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": torch.zeros(0, dtype=torch.int64)}, "at least one token"),
        ({"loss_mask": torch.ones(4)}, "loss_mask must have dtype torch.bool"),
        ({"loss_mask": torch.ones(3, dtype=torch.bool)}, "loss_mask must have 4 values, found 3"),
        ({"loss_mask": torch.zeros(4, dtype=torch.bool)}, "logprobs must be 0 wherever loss_mask is false"),
        (
            {"logprobs": torch.tensor([math.nan, -0.5, -0.25, 0.0])},
            "logprobs must be 0 wherever loss_mask is false",
        ),
        ({"weight_versions": torch.full((4,), 3, dtype=torch.int32)}, "weight_versions must be -1 wherever"),
    ],
)
def test_a_canonical_row_of_other_shape_is_refused_by_name(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        replace(make_canonical_row(), **change)


def test_columns_are_jagged_even_for_rows_of_one_length_and_for_scalars():
    columns = rows_to_columns(Partition.STAGING, [make_staged_row(generation=n) for n in range(4)])
    assert all(column.is_nested and column.layout == torch.jagged for column in columns.values())


def test_columns_give_back_every_row():
    rows = [make_staged_row(generation=n, prompt=n + 1, completion=n) for n in range(4)]
    columns = rows_to_columns(Partition.STAGING, rows)
    for position, row in enumerate(rows):
        values = {name: column.unbind()[position] for name, column in columns.items()}
        rebuilt = staged_from_columns((0, position, 0, 0), values)
        assert row_digest(rebuilt) == row_digest(row)


def test_a_row_of_another_partition_is_refused():
    with pytest.raises(ValueError, match="CanonicalRow: it cannot be put into 'staging'"):
        rows_to_columns(Partition.STAGING, [make_canonical_row()])


def test_a_tag_gives_back_typed_identity_and_digest():
    staged = make_staged_row(1, 2, 3, 4)
    tag = read_tag(staged.key, write_tag(staged))
    assert (tag.done, tag.group_id, tag.generation, tag.attempt, tag.call) == (True, 1, 2, 3, 4)
    assert tag.digest == row_digest(staged)
    canonical = make_canonical_row()
    assert read_tag(canonical.key, write_tag(canonical)).call == NO_CALL


def test_inventory_digest_ignores_order_and_unfinished_puts_only():
    tags = {
        row.key: read_tag(row.key, write_tag(row))
        for row in (make_staged_row(generation=n) for n in range(3))
    }
    unfinished = {"g9.s9.a9.c9": read_tag("g9.s9.a9.c9", {})}
    assert inventory_digest(dict(reversed(tags.items()))) == inventory_digest(tags)
    assert inventory_digest(tags | unfinished) == inventory_digest(tags)
    first = next(iter(tags))
    assert inventory_digest({key: tag for key, tag in tags.items() if key != first}) != inventory_digest(tags)
    altered: dict[str, RowTag] = tags | {
        first: msgspec.structs.replace(tags[first], digest=bytes(DIGEST_BYTES))
    }
    assert inventory_digest(altered) != inventory_digest(tags)
