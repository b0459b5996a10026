"""Pairing: results, rewards, rows and siblings belong together by identity, whatever is missing or comes in whatever order."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kinlog_conformance import (
    COHORT,
    SIBLING,
    Given,
    Like,
    cohort_results,
    driven,
    finalize_answered,
    finalizing,
    generating,
    placeholder,
    reserved,
    result,
)
from kinlog_rows import make_staged_row

from kinlog.lineage import decide
from kinlog.lineage.state import GroupPhase
from kinlog.schemas import events as e
from kinlog.schemas.errors import TransitionError
from kinlog.schemas.reasons import Granularity, Reason, Validity
from kinlog.schemas.receipts import ModelCall, Receipt
from kinlog.workers.finalizer import build_canonical_row
from kinlog.workers.grpo import group_advantages
from kinlog.workers.rows import CanonicalRow, row_digest
from kinlog.workers.trainer_worker import _training_row


def canonical_row(
    generation: int, *, placeholder: bool = False, draw_index: int = 7, shaped_reward: float = 0.5
) -> CanonicalRow:
    """The canonical row of a sibling of group 3, as the finalizer builds it."""
    staged = make_staged_row(3, generation, 1)
    call = ModelCall(0, -1, staged.prompt_tokens, staged.completion_tokens, 2, 2, row_digest(staged))
    return build_canonical_row(
        group_id=3,
        generation=generation,
        attempt=1,
        draw_index=draw_index,
        receipt=None if placeholder else Receipt((call,)),
        staged={} if placeholder else {0: staged},
        prompt_token_ids=[1, 2],
        validity=Validity.PLACEHOLDER if placeholder else Validity.VALID,
        raw_reward=1.0,
        shaped_reward=shaped_reward,
    )


def test_raw_and_shaped_reward_are_both_sealed():
    Given(generating()).when(result(0, 1, 1, raw_reward=1.0, shaped_reward=0.625)).then(
        events=[Like(e.SiblingSealed, generation=1, raw_reward=1.0, shaped_reward=0.625)]
    )


@settings(max_examples=20)
@given(granularity=st.sampled_from([SIBLING, COHORT]), order=st.permutations(range(4)))
def test_shaped_reward_is_sealed_as_it_came_whether_results_stream_or_come_as_one(
    granularity: Granularity, order: list[int]
):
    def answer_in_order(bench):
        bench.pool.delay_ticks = lambda rollout: 20 * order.index(rollout.generation)

    done = Given(reserved(siblings=4, granularity=granularity)).when(answer_in_order, driven(0)).then()
    # What the workers of the bench answer; shaping once more would halve it once more.
    rewards = {s.generation: (s.raw_reward, s.shaped_reward) for s in done.of(e.SiblingSealed)}
    assert rewards == {g: (g / 10, g / 20) for g in range(4)}


def test_value_that_is_trained_on_is_the_shaped_reward_that_was_sealed():
    row = _training_row(canonical_row(1, shaped_reward=0.625))
    assert (row.group_id, row.generation, row.reward) == (3, 1, 0.625)


@settings(max_examples=25)
@given(siblings=st.integers(1, 6), data=st.data())
def test_results_that_come_in_any_order_with_any_of_them_missing_shift_nothing(siblings: int, data):
    order = data.draw(st.permutations(range(siblings)))
    missing = data.draw(st.sets(st.integers(0, siblings - 1)))
    done = Given(generating(siblings=siblings)).when(
        *(
            placeholder(0, g) if g in missing else result(0, g, 1, raw_reward=g + 0.5, shaped_reward=g + 0.25)
            for g in order
        )
    )
    found = done.then(state={0: GroupPhase.READY}).p.groups[0].siblings
    for g in range(siblings):
        seal = found[g].sealed
        assert seal is not None
        expected = (g, 0.0, 0.0) if g in missing else (g, g + 0.5, g + 0.25)
        assert (seal.generation, seal.raw_reward, seal.shaped_reward) == expected
        assert (seal.receipt is None) is (g in missing)


@settings(max_examples=25)
@given(siblings=st.integers(1, 6), granularity=st.sampled_from([SIBLING, COHORT]), data=st.data())
def test_results_that_never_come_leave_their_siblings_running_and_shift_nothing(
    siblings: int, granularity: Granularity, data
):
    order = data.draw(st.permutations(range(siblings)))
    came = order[: data.draw(st.integers(0, siblings - 1))]
    given_group = Given(generating(siblings=siblings, granularity=granularity))
    if granularity is COHORT:
        done = given_group.when(cohort_results(0, dict.fromkeys(came, 1)))
        done.then(raises=(TransitionError, "the cohort seals whole"), state={0: {"sealed": set()}})
        return
    done = given_group.when(*(result(0, g, 1, raw_reward=g + 0.5, shaped_reward=g + 0.25) for g in came))
    done.then(state={0: {"sealed": set(came), "running": set(range(siblings)) - set(came)}})
    for g in came:
        seal = done.p.groups[0].siblings[g].sealed
        assert seal is not None
        assert (seal.generation, seal.raw_reward, seal.shaped_reward) == (g, g + 0.5, g + 0.25)


@settings(max_examples=25)
@given(siblings=st.integers(2, 6), data=st.data())
def test_results_of_a_cohort_are_paired_by_identity_whatever_order_they_are_listed_in(siblings: int, data):
    order = data.draw(st.permutations(range(siblings)))
    done = Given(generating(siblings=siblings, granularity=COHORT)).when(
        cohort_results(0, dict.fromkeys(order, 1))
    )
    assert [s.generation for s in done.then().of(e.SiblingSealed)] == list(range(siblings))


def test_result_of_another_sibling_is_not_taken_for_a_cohort_s():
    def swapped(bench):
        results = {g: bench.story.result(0, 1 - g) for g in (0, 1)}
        return decide.seal_cohort(bench.p, 0, results)

    Given(generating(granularity=COHORT)).when(swapped).then(
        raises=(TransitionError, "got the result of another sibling")
    )


@settings(max_examples=25)
@given(siblings=st.integers(2, 6), seed=st.integers(0, 99), data=st.data())
def test_finalized_rows_are_paired_by_identity_and_none_may_be_missing(siblings: int, seed: int, data):
    missing = data.draw(st.sets(st.integers(0, siblings - 1), max_size=siblings - 1))

    def answered(bench):
        whole = finalize_answered(0)(bench)
        rows = [row for row in whole.rows if row.generation not in missing]
        random.Random(seed).shuffle(rows)
        return e.GroupFinalized(group_id=0, rows=tuple(rows), valid_fraction=1.0)

    done = Given(finalizing(siblings=siblings)).when(answered)
    if missing:
        done.then(raises=(TransitionError, "expected one row of each sealed attempt"))
    else:
        done.then(state={0: GroupPhase.FINALIZED})


@pytest.mark.parametrize("placeholder", [False, True])
def test_draw_index_travels_into_the_canonical_row_of_every_kind_of_sibling(placeholder: bool):
    row = canonical_row(1, placeholder=placeholder, draw_index=1_234_567)
    assert (row.draw_index, row.group_id, row.generation, row.attempt) == (1_234_567, 3, 1, 1)


@settings(max_examples=50)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_advantages_are_grouped_by_group_id_whatever_stands_where_and_whatever_is_missing(
    sizes: list[int], seed: int, data
):
    chance = random.Random(seed)
    rows = [(group, g, chance.random()) for group, size in enumerate(sizes) for g in range(size)]
    kept = data.draw(st.lists(st.sampled_from(rows), unique=True, min_size=1))
    found = group_advantages(torch.tensor([reward for _, _, reward in kept]), [group for group, _, _ in kept])
    for place, (group, _, reward) in enumerate(kept):
        own = [r for of, _, r in kept if of == group]
        mean = sum(own) / len(own)
        deviation = (sum((r - mean) ** 2 for r in own) / len(own)) ** 0.5
        expected = (reward - mean) / (deviation + 1e-6) if deviation >= 1e-6 else 0.0
        assert found[place].item() == pytest.approx(expected, rel=1e-2, abs=1e-4)


@settings(max_examples=25)
@given(siblings=st.integers(1, 5), seed=st.integers(0, 99), data=st.data())
def test_rows_are_trained_on_with_their_own_rewards_whatever_order_they_come_in_and_whatever_is_masked(
    siblings: int, seed: int, data
):
    masked = data.draw(st.sets(st.integers(0, siblings - 1)))
    rows = [
        canonical_row(g, placeholder=g in masked, shaped_reward=0.0 if g in masked else g + 0.25)
        for g in range(siblings)
    ]
    random.Random(seed).shuffle(rows)
    trained = {row.generation: _training_row(row) for row in rows if row.valid}
    assert set(trained) == set(range(siblings)) - masked
    for g, row in trained.items():
        assert (row.group_id, row.reward) == (3, g + 0.25)
        staged = make_staged_row(3, g, 1)
        assert row.token_ids.equal(staged.token_ids)
        assert row.logprobs[row.loss_mask].equal(staged.logprobs)


def test_two_draws_of_one_prompt_are_two_groups_for_the_advantages():
    """An epoch later the same prompt is drawn again: neither its text nor its sample id may join the two."""
    found = group_advantages(torch.tensor([1.0, 0.0, 1.0, 1.0]), [0, 0, 9, 9])
    assert [round(value, 3) for value in found.tolist()] == [1.0, -1.0, 0.0, 0.0]


def test_same_result_twice_is_a_no_op_and_shifts_nothing():
    Given(generating()).when(result(0, 1, 1), result(0, 1, 1), result(0, 0, 1)).then(
        events=[Like(e.SiblingSealed, generation=1), Like(e.SiblingSealed, generation=0)]
    )


def test_late_result_of_one_sibling_takes_nothing_from_another():
    Given(generating(), lambda bench: bench.story.supersede(0, 0, Reason.TIMEOUT)).when(
        result(0, 0, 1), result(0, 1, 1)
    ).then(
        events=[Like(e.LateResultRejected, generation=0), Like(e.SiblingSealed, generation=1)],
        state={0: {"sealed": {1}, "waiting": {0}}},
    )
