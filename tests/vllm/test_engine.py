"""The vLLM engine does what every engine does, on a real vLLM."""

import asyncio

import pytest
import torch

pytest.importorskip("vllm", reason="the tests of vLLM's engine run in its own environment: make test-vllm")

from kinlog_vllm import PROMPT, Weights, assert_logprobs, request, until

from kinlog.schemas.reasons import FinishReason
from kinlog.workers.engines import GeneratedTokens
from kinlog.workers.vllm_engine import VllmEngine

pytest_plugins = ["kinlog_vllm_fixtures"]
pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]


async def test_logprobs_are_those_of_the_model_at_the_sampling_temperature(
    engine: VllmEngine, weights: Weights
):
    completions = await asyncio.gather(*(engine.generate(request(seed=seed)) for seed in range(12)))
    for completion in completions:
        length = len(completion.token_ids)
        assert 1 <= length <= 12
        assert (completion.token_ids.dtype, completion.logprobs.dtype, completion.weight_versions.dtype) == (
            torch.int64,
            torch.float32,
            torch.int32,
        )
        assert completion.logprobs.shape == completion.weight_versions.shape == (length,)
        assert_logprobs(weights, completion)


async def test_same_seed_gives_the_same_tokens_and_another_seed_others(engine: VllmEngine):
    first, again, other = [await engine.generate(request(seed=seed)) for seed in (2**63 - 1, 2**63 - 1, 2)]
    assert first.token_ids.tolist() == again.token_ids.tolist()
    assert first.token_ids.tolist() != other.token_ids.tolist()


async def test_a_short_request_ends_before_a_long_one_that_began_with_it(engine: VllmEngine):
    long = asyncio.create_task(engine.generate(request(seed=5, max_new_tokens=150)))
    await engine.generate(request(seed=5, max_new_tokens=1))
    assert not long.done()
    await long


async def test_tokens_are_in_sight_while_they_are_generated(engine: VllmEngine):
    tokens = GeneratedTokens()
    seen = set()
    call = asyncio.create_task(engine.generate(request(seed=5, max_new_tokens=60), tokens))
    while not call.done():
        seen.add(len(tokens))
        await asyncio.sleep(0)
    assert len(seen) > 3
    completion = await call
    assert completion.token_ids.tolist() == list(tokens.token_ids)


async def test_end_token_is_part_of_the_completion_even_at_once(
    engine: VllmEngine, weights: Weights, versions
):
    eos_id = engine._model.eos_id
    await engine.update_weights(weights.prefer(eos_id), next(versions))
    completion = await engine.generate(request())
    assert completion.token_ids.tolist() == [eos_id]
    assert completion.finish_reason is FinishReason.STOP


async def test_limit_ends_a_completion_without_end_token(engine: VllmEngine, weights: Weights, versions):
    await engine.update_weights(weights.prefer(9), next(versions))
    completion = await engine.generate(request(max_new_tokens=5))
    assert completion.token_ids.tolist() == [9] * 5
    assert completion.finish_reason is FinishReason.LENGTH


async def test_tokens_of_an_earlier_attempt_are_kept_and_gone_on_from(
    engine: VllmEngine, weights: Weights, versions
):
    version = next(versions)
    await engine.update_weights(weights.state_dict(version), version)
    whole = await engine.generate(request(seed=5, max_new_tokens=40))
    assert len(whole.token_ids) > 20
    before = GeneratedTokens(
        whole.token_ids[:10].tolist(), whole.logprobs[:10].tolist(), whole.weight_versions[:10].tolist()
    )
    resumed = await engine.generate(request(seed=5, max_new_tokens=40), before)
    assert resumed.token_ids[:10].tolist() == whole.token_ids[:10].tolist()
    assert torch.equal(resumed.logprobs[:10], whole.logprobs[:10])
    assert 10 < len(resumed.token_ids) <= 40
    assert_logprobs(weights, resumed)
    # With the seed of the beginning, the draws of the beginning would come once more.
    assert resumed.token_ids[10:20].tolist() != whole.token_ids[:10].tolist()


async def test_tokens_that_are_an_end_already_are_the_completion(engine: VllmEngine):
    eos_id = engine._model.eos_id
    ended = await engine.generate(request(), GeneratedTokens([9, eos_id], [-1.0, -2.0], [3, 4]))
    assert (ended.token_ids.tolist(), ended.finish_reason) == ([9, eos_id], FinishReason.STOP)
    full = await engine.generate(request(max_new_tokens=2), GeneratedTokens([9, 9], [-1.0, -2.0], [3, 4]))
    assert (full.weight_versions.tolist(), full.finish_reason) == ([3, 4], FinishReason.LENGTH)


async def test_a_cancelled_call_leaves_the_engine(engine: VllmEngine):
    tokens = GeneratedTokens()
    call = asyncio.create_task(engine.generate(request(seed=5, max_new_tokens=150), tokens))
    await until(lambda: len(tokens) > 0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert engine._llm.output_processor.get_num_unfinished_requests() == 0
    assert len((await engine.generate(request(seed=1))).token_ids) >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": ()}, "expected a prompt and room for a token"),
        ({"max_new_tokens": 0}, "expected a prompt and room for a token"),
        ({"max_new_tokens": 157}, r"at most 160 positions, found 4 prompt tokens \+ 157"),
        ({"prompt": (5, 2_000)}, r"token ids in \[0, \d+\), found 5 to 2000"),
        ({"prompt": (-1, 5)}, "found -1 to 5"),
    ],
)
async def test_what_the_model_cannot_serve_is_refused(engine: VllmEngine, arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        await engine.generate(request(**arguments))
    assert engine.failure is None
    assert len(PROMPT) == 4
