import asyncio

import pytest
import torch

from kinlog.schemas.reasons import FinishReason, Validity
from kinlog.schemas.settings import GenerationSettings, RolloutSettings
from kinlog.workers.agents import build_agent
from kinlog.workers.environments import EnvironmentFailure, Verdict
from kinlog.workers.model_calls import ModelCalls
from kinlog.workers.rollout import run_rollout

pytest_plugins = ["kinlog_policy_fixtures"]

GENERATION = GenerationSettings(max_new_tokens=8, temperature=0.9)
PLAIN = RolloutSettings(max_turns=3, retry_discount=0.5)
BITS = 2  # index of a row of the retry task


class FixedEnvironment:
    def __init__(self, reward, *, fails=False):
        self._reward = reward
        self._fails = fails

    def begin(self, item):
        return self

    async def judge(self, answer, *, call):
        if self._fails:
            raise EnvironmentFailure("the sandbox is gone")
        return Verdict(reward=self._reward, well_formed=True, feedback=None)


@pytest.fixture
def run(mixture, tokenizer):
    def run(engine, *, environment=None, settings=PLAIN, seed=1, sample_index=BITS):
        item = mixture[sample_index]
        environment = environment or build_agent(item.agent_name, mixture, settings)
        calls = ModelCalls(engine, GENERATION, seed=seed)
        return run_rollout(calls, tokenizer, environment, item, settings=settings)

    return run


@pytest.fixture
def right_answer(mixture):
    return str(int(mixture[BITS].prompt.removeprefix("b").removesuffix("=")).bit_count())


async def test_right_first_answer_is_one_call_with_full_reward(run, scripted_engine, right_answer):
    rollout = await run(scripted_engine([right_answer]))
    assert (len(rollout.calls), rollout.raw_reward, rollout.shaped_reward) == (1, 1.0, 1.0)
    assert (rollout.finish_reason, rollout.validity) == (FinishReason.STOP, Validity.VALID)
    assert rollout.completion_tokens == len(right_answer) + 1


async def test_each_prompt_extends_the_last_prompt_and_completion_token_by_token(
    run, scripted_engine, right_answer, tokenizer
):
    rollout = await run(scripted_engine(["-,", "", right_answer]))
    assert [(captured.call, captured.parent) for captured in rollout.calls] == [(0, -1), (1, 0), (2, 1)]
    for previous, following in zip(rollout.calls, rollout.calls[1:], strict=False):
        before = torch.cat([previous.prompt_token_ids, previous.completion.token_ids])
        assert torch.equal(following.prompt_token_ids[: len(before)], before)
        assert following.prompt_token_ids[len(before) :].tolist() == tokenizer.encode("?")
    assert rollout.raw_reward == 0.25


async def test_last_answer_counts_when_turns_are_spent(run, scripted_engine, right_answer):
    rollout = await run(scripted_engine([right_answer + "-", right_answer + "-", "-"]))
    assert (len(rollout.calls), rollout.raw_reward) == (3, 0.0)


async def test_calls_and_siblings_have_seeds_of_their_own(run, scripted_engine):
    engines = [scripted_engine(["-"] * 3) for _ in range(3)]
    for engine, seed in zip(engines, (1, 1, 2), strict=True):
        await run(engine, seed=seed)
    first, again, other = ([request.seed for request in engine.requests] for engine in engines)
    assert first == again
    assert len({*first, *other}) == 6
    assert {request.temperature for request in engines[0].requests} == {0.9}


async def test_shaping_is_applied_once_over_the_whole_rollout(run, scripted_engine, right_answer):
    settings = RolloutSettings(max_turns=2, retry_discount=0.5, format_reward=0.2, length_penalty=0.01)
    rollout = await run(scripted_engine(["-,", right_answer]), settings=settings)
    assert rollout.raw_reward == 0.5
    assert rollout.shaped_reward == pytest.approx(0.5 + 0.2 - 0.01 * (3 + len(right_answer) + 1))


async def test_answer_cut_off_by_its_limit_earns_no_format_reward(run, scripted_engine):
    settings = RolloutSettings(format_reward=0.2)
    rollout = await run(
        scripted_engine(["12"], stop=False), environment=FixedEnvironment(0.0), settings=settings
    )
    assert (rollout.finish_reason, rollout.shaped_reward) == (FinishReason.LENGTH, 0.0)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
async def test_reward_that_is_not_finite_is_refused_naming_the_sample(run, scripted_engine, mixture, reward):
    with pytest.raises(ValueError, match=f"finite reward.*{mixture[BITS].sample_id}"):
        await run(scripted_engine(["1"]), environment=FixedEnvironment(reward))


async def test_environment_failure_keeps_the_tokens_and_marks_the_rollout(run, scripted_engine):
    rollout = await run(scripted_engine(["12"]), environment=FixedEnvironment(1.0, fails=True))
    assert (rollout.validity, rollout.raw_reward, rollout.completion_tokens) == (Validity.FAILED, 0.0, 3)


async def test_logprobs_that_are_not_finite_poison_the_rollout(run, scripted_engine):
    rollout = await run(scripted_engine(["12"], logprob=float("nan")), environment=FixedEnvironment(1.0))
    assert rollout.validity is Validity.POISONED


async def test_real_rollout_is_the_same_again_beside_others(run, make_engine):
    engine = make_engine(max_batch_size=3)
    alone = await run(engine, seed=4)
    together = await asyncio.gather(*(run(engine, seed=seed) for seed in range(8)))
    assert len(together[4].calls) == len(alone.calls)
    for first, second in zip(alone.calls, together[4].calls, strict=True):
        assert torch.equal(first.completion.token_ids, second.completion.token_ids)
        assert torch.equal(first.completion.logprobs, second.completion.logprobs)
