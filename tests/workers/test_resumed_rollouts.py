"""A rollout that goes on from what an earlier attempt generated is the rollout that would have been."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace as with_changes

import pytest
import torch
from kinlog_progress_parts import Kept
from kinlog_stateful_environment import Forgetful, Tally, judged

from kinlog.schemas.settings import GenerationSettings, RolloutSettings
from kinlog.workers.engines import GeneratedTokens
from kinlog.workers.environments import Environment
from kinlog.workers.model_calls import EarlierCall, ModelCalls
from kinlog.workers.rollout import Rollout, run_rollout

pytest_plugins = ["kinlog_policy_fixtures"]

GENERATION = GenerationSettings(max_new_tokens=12, temperature=0.9)
SETTINGS = RolloutSettings(max_turns=3)


@pytest.fixture
def run(mixture, tokenizer, make_engine):
    engine = make_engine(max_batch_size=2)

    async def run(
        environment: Environment,
        earlier: Sequence[EarlierCall] = (),
        *,
        settings: RolloutSettings = SETTINGS,
        kept: Kept | None = None,
    ) -> Rollout:
        judged.clear()
        calls = ModelCalls(engine, GENERATION, seed=5, progress=kept, earlier=earlier)
        return await run_rollout(calls, tokenizer, environment, mixture[0], settings=settings)

    return run


def assert_same(found: Rollout, expected: Rollout, *, bit_by_bit: bool) -> None:
    assert (found.raw_reward, found.shaped_reward, found.validity, found.finish_reason) == (
        expected.raw_reward,
        expected.shaped_reward,
        expected.validity,
        expected.finish_reason,
    )
    for one, other in zip(found.calls, expected.calls, strict=True):
        assert (one.call, one.parent) == (other.call, other.parent)
        assert torch.equal(one.prompt_token_ids, other.prompt_token_ids)
        assert torch.equal(one.completion.token_ids, other.completion.token_ids)
        assert torch.equal(one.completion.weight_versions, other.completion.weight_versions)
        if bit_by_bit:
            assert torch.equal(one.completion.logprobs, other.completion.logprobs)
        else:
            torch.testing.assert_close(
                one.completion.logprobs, other.completion.logprobs, atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
async def test_rollout_resumed_after_any_turn_is_the_uninterrupted_one_bit_by_bit(run, turns):
    kept = Kept()
    whole = await run(Tally(), kept=kept)
    assert len(judged) == 3
    resumed = await run(Tally(), kept.calls[:turns])
    assert_same(resumed, whole, bit_by_bit=True)
    assert len(judged) == 3 - turns  # the environment was put where it was, and not run again
    assert resumed.resumed_tokens == sum(len(call.completion.token_ids) for call in whole.calls[:turns])


@pytest.mark.parametrize("call", [0, 1, 2])
async def test_rollout_resumed_inside_of_any_call_goes_on_with_the_same_tokens(run, call):
    kept = Kept()
    whole = await run(Tally(), kept=kept)
    for tokens in {0, 1, len(kept.calls[call].tokens) // 2, len(kept.calls[call].tokens)}:
        resumed = await run(Tally(), kept.cut_in(call, tokens))
        assert_same(resumed, whole, bit_by_bit=False)
        done = sum(len(made.completion.token_ids) for made in whole.calls[:call])
        assert resumed.resumed_tokens == done + tokens


async def test_environment_that_gives_no_state_is_run_again_on_the_tokens_that_there_are(run):
    kept = Kept()
    whole = await run(Forgetful(), kept=kept)
    assert [call.turn for call in kept.calls] == [None] * 3
    resumed = await run(Forgetful(), kept.calls[:2])
    assert_same(resumed, whole, bit_by_bit=True)
    assert len(judged) == 3


async def test_state_of_a_version_that_is_not_known_any_more_begins_the_environment_anew(run, caplog):
    kept = Kept()
    whole = await run(Tally(), kept=kept)
    old = [
        with_changes(call, turn=with_changes(call.turn, state_version=1))
        for call in kept.calls[:2]
        if call.turn is not None
    ]
    resumed = await run(Tally(), old)
    assert_same(resumed, whole, bit_by_bit=True)
    assert len(judged) == 3
    assert "expected state version 2, found 1" in caplog.text


async def test_state_that_is_too_large_is_not_kept_and_said_to_be(run, caplog):
    kept = Kept()
    await run(Tally(), settings=RolloutSettings(max_turns=3, max_state_bytes=4), kept=kept)
    assert [call.turn for call in kept.calls] == [None] * 3
    assert "more than rollout.max_state_bytes (4)" in caplog.text


async def test_tokens_after_another_prompt_are_not_used(run):
    kept = Kept()
    whole = await run(Tally(), kept=kept)
    foreign = [with_changes(call, prompt_digest=b"x" * 16) for call in kept.calls]
    resumed = await run(Tally(), foreign)
    assert_same(resumed, whole, bit_by_bit=True)
    assert resumed.resumed_tokens == 0


async def test_what_was_taken_over_is_told_again_under_the_new_attempt(run):
    """Else a third attempt would have the second's part only."""
    first, second = Kept(), Kept()
    await run(Tally(), kept=first)
    await run(Tally(), first.cut_in(1, 2), kept=second)
    assert [list(call.tokens) for call in second.calls[:1]] == [list(call.tokens) for call in first.calls[:1]]
    assert [call.turn for call in second.calls] == [call.turn for call in first.calls]


async def test_weight_version_of_each_part_is_kept(mixture, tokenizer, make_engine):
    engine = make_engine(max_batch_size=1)
    state = {name: tensor.clone() for name, tensor in engine._model.state_dict().items()}
    await engine.update_weights(state, 4)
    before = GeneratedTokens([3, 4], [-0.25, -0.5], [1, 2])
    calls = ModelCalls(engine, GENERATION, seed=5)
    digest = await _digest_of(calls, [5, 6])
    resumed = ModelCalls(engine, GENERATION, seed=5, earlier=[EarlierCall(digest, before, None, None)])
    captured = await resumed.make([5, 6])
    completion = captured.completion
    assert completion.token_ids[:2].tolist() == [3, 4]
    assert completion.logprobs[:2].tolist() == [-0.25, -0.5]
    assert completion.weight_versions.tolist() == [1, 2] + [4] * (len(completion.token_ids) - 2)


async def _digest_of(calls: ModelCalls, prompt: list[int]) -> bytes:
    kept = Kept()
    calls._progress = kept
    await calls.make(prompt)
    return kept.calls[0].prompt_digest


async def test_completion_that_was_complete_is_not_generated_again(make_engine):
    engine = make_engine(max_batch_size=1)
    kept = Kept()
    whole = await ModelCalls(engine, GENERATION, seed=5, progress=kept).make([5, 6])
    ended = [with_changes(kept.calls[0], finish_reason=None)]
    again = await asyncio.wait_for(ModelCalls(engine, GENERATION, seed=9, earlier=ended).make([5, 6]), 600)
    assert torch.equal(again.completion.token_ids, whole.completion.token_ids)
    assert again.completion.finish_reason is whole.completion.finish_reason
