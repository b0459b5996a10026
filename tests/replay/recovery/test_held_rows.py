"""Comparing a listing with lineage once, and fast, comes to what comparing it row by row comes to."""

import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinlog_builders import Story, story
from msgspec.structs import replace

from kinlog.lineage.state import GroupPhase, GroupState
from kinlog.replay.recovery.held_rows import GivenUp, HeldRows
from kinlog.replay.recovery.inventory import (
    Inventory,
    RowProblem,
    canonical_rows,
    expected_inventory,
    staged_rows,
)
from kinlog.schemas.reasons import Partition, Reason
from kinlog.schemas.receipts import canonical_key, staging_key
from kinlog.schemas.rows import RowTag

_HALF_PUT = RowTag(done=False, group_id=-1, generation=-1, attempt=-1, call=-1, digest=b"")

_HARM = {
    "gone": lambda tag: None,
    "half put": lambda tag: _HALF_PUT,
    "not done": lambda tag: replace(tag, done=False),
    "another content": lambda tag: replace(tag, digest=b"another content."),
    "another group": lambda tag: replace(tag, group_id=tag.group_id + 1),
    "another generation": lambda tag: replace(tag, generation=tag.generation + 1),
    "another attempt": lambda tag: replace(tag, attempt=tag.attempt + 1),
    "another call": lambda tag: replace(tag, call=tag.call + 1),
}


def _problems(expected: Mapping[str, RowTag], found: Mapping[str, RowTag]) -> tuple[RowProblem, ...]:
    """The rows that are not as they should be, one by one."""
    lost = {key: Reason.ROWS_MISSING for key in expected if key not in found or not found[key].done}
    differing = {key: Reason.DIGEST_MISMATCH for key, tag in expected.items() if found.get(key) != tag}
    return tuple(RowProblem(key, reason) for key, reason in sorted((differing | lost).items()))


@st.composite
def _listings(draw: st.DrawFn) -> tuple[list[GroupState], Inventory]:
    """Live groups, and a listing in another order than theirs, in which some rows have come to harm."""
    told = story(draw(st.integers(0, 7)), groups=6)
    groups = list(told.p.live_groups())
    whole = expected_inventory(told.p)

    # Rarely: of two that are harmed side by side, either hides whether the other is seen.
    chance = random.Random(draw(st.integers(0, 2**32)))
    harm = _HARM[draw(st.sampled_from(sorted(_HARM)))]

    def listed(rows: dict[str, RowTag]) -> dict[str, RowTag]:
        answer = {key: harm(tag) if chance.random() < 0.1 else tag for key, tag in rows.items()}
        order = sorted(answer, reverse=draw(st.booleans()))
        return {key: tag for key in order if (tag := answer[key]) is not None}

    stranger = {"stranger": _HALF_PUT} if draw(st.booleans()) else {}
    return groups, Inventory(listed(whole.staging) | stranger, listed(whole.training))


@settings(max_examples=60, deadline=None)
@given(case=_listings(), data=st.data())
def test_problems_and_what_is_left_are_those_of_a_comparison_row_by_row(
    case: tuple[list[GroupState], Inventory], data: st.DataObject
):
    groups, inventory = case
    held = HeldRows(inventory)
    relied_on: set[str] = set()
    given_up: list[GivenUp] = []
    for group in groups:
        kept = data.draw(st.booleans())
        if group.phase is GroupPhase.FINALIZED:
            rows = canonical_rows(group)
            assert held.canonical_problems(group) == _problems(rows, inventory.training)
            relied_on |= set(rows) if kept else set()
            if not kept:
                given_up.append(GivenUp(group, ()))
            continue
        staged = {generation: staged_rows(group, sibling) for generation, sibling in group.siblings.items()}
        problems = {generation: _problems(rows, inventory.staging) for generation, rows in staged.items()}
        assert held.staged_problems(group) == {g: found for g, found in problems.items() if found}
        lost = [g for g in staged if problems[g] or not kept]
        given_up.append(GivenUp(group, lost))
        relied_on |= {key for g, rows in staged.items() if g not in lost for key in rows}
    assert held.left(given_up, ()) == {
        Partition.STAGING: {key: tag for key, tag in inventory.staging.items() if key not in relied_on},
        Partition.TRAINING: {key: tag for key, tag in inventory.training.items() if key not in relied_on},
    }


@pytest.mark.parametrize("harm", sorted(_HARM))
def test_no_harm_to_any_single_row_goes_unseen(harm: str):
    told = Story()
    ready, finalized = told.group(told.ready()), told.group(told.finalized())
    whole = expected_inventory(told.p)

    def harmed(rows: dict[str, RowTag], key: str) -> dict[str, RowTag]:
        tag = _HARM[harm](rows[key])
        return {k: t for k, t in (rows | {key: tag}).items() if t is not None}

    assert len(whole.staging) == 4
    assert len(whole.training) == 2
    for key in whole.staging:
        staging = harmed(whole.staging, key)
        (problems,) = HeldRows(Inventory(staging, {})).staged_problems(ready).values()
        assert problems == _problems(whole.staging, staging)
    for key in whole.training:
        training = harmed(whole.training, key)
        problems = HeldRows(Inventory({}, training)).canonical_problems(finalized)
        assert [problem.key for problem in problems] == [key]
        assert problems == _problems(whole.training, training)


def test_a_group_that_is_asked_about_again_has_the_same_problems():
    told = Story()
    group = told.group(told.ready())
    inventory = expected_inventory(told.p)
    lost = staging_key(group.group_id, 1, 1, 0)
    del inventory.staging[lost]
    held = HeldRows(inventory)
    first = held.staged_problems(group)
    assert held.staged_problems(group) == first == {1: (RowProblem(lost, Reason.ROWS_MISSING),)}
    assert HeldRows.of(held) is held


def test_comparing_takes_nothing_out_of_the_inventory():
    told = Story()
    group = told.group(told.ready())
    inventory = expected_inventory(told.p)
    before = dict(inventory.staging)
    held = HeldRows(inventory)
    held.staged_problems(group)
    assert inventory.staging == before
    assert held.left([], [])[Partition.STAGING] == {}


def test_rows_that_a_finalize_without_an_outcome_may_have_put_are_not_left_over():
    told = Story()
    group = told.ready()
    told.start_finalize(group)
    key = canonical_key(group, 0, 1)
    held = HeldRows(Inventory({}, {key: _HALF_PUT, "stranger": _HALF_PUT}))
    assert held.left([], [told.group(group)])[Partition.TRAINING] == {"stranger": _HALF_PUT}
