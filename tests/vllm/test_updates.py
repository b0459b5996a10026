"""Weights are replaced in place while requests are under way, and every token says which weights sampled it."""

import asyncio
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("vllm", reason="the tests of vLLM's engine run in its own environment: make test-vllm")

from kinlog_vllm import BLOCK_SIZE, Weights, assert_logprobs, memory_files, request, until

from kinlog.schemas.settings import InFlightUpdates
from kinlog.workers.engines import Completion, GeneratedTokens
from kinlog.workers.vllm_engine import VllmEngine

pytest_plugins = ["kinlog_vllm_fixtures"]
pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

LONG_PROMPT = tuple(3 + position % 11 for position in range(3 * BLOCK_SIZE))


async def update(engine: VllmEngine, weights: Weights, versions: Iterator[int]) -> int:
    version = next(versions)
    await engine.update_weights(weights.state_dict(version), version)
    return version


async def generate_across_updates(
    engine: VllmEngine, weights: Weights, versions: Iterator[int], *, updates: int
) -> tuple[list[Completion], list[int]]:
    """Have requests generate while weights change again and again. Return them, and the versions."""
    used = [await update(engine, weights, versions)]
    tokens = [GeneratedTokens() for _ in range(8)]
    calls = [
        asyncio.create_task(engine.generate(request(seed=seed, max_new_tokens=150), tokens[seed]))
        for seed in range(8)
    ]
    for _ in range(updates):
        longest = max(map(len, tokens))
        await until(
            lambda longest=longest: max(map(len, tokens)) >= longest + 2 or all(call.done() for call in calls)
        )
        used.append(await update(engine, weights, versions))
    return await asyncio.gather(*calls), used


async def test_requests_go_on_with_their_keys_and_values(
    with_policy: Callable[[InFlightUpdates], VllmEngine], weights: Weights, versions: Iterator[int]
):
    completions, used = await generate_across_updates(with_policy("continue"), weights, versions, updates=4)
    assert {version for c in completions for version in c.weight_versions.tolist()} == set(used)
    for completion in completions:
        assert completion.weight_versions.tolist() == sorted(completion.weight_versions.tolist())
        assert_logprobs(weights, completion)


async def test_requests_go_on_after_the_new_weights_have_read_their_tokens(
    with_policy: Callable[[InFlightUpdates], VllmEngine], weights: Weights, versions: Iterator[int]
):
    completions, used = await generate_across_updates(with_policy("recompute"), weights, versions, updates=4)
    assert {version for c in completions for version in c.weight_versions.tolist()} == set(used)
    for completion in completions:
        assert completion.weight_versions.tolist() == sorted(completion.weight_versions.tolist())
        assert_logprobs(weights, completion, read_again=True)


async def test_requests_end_before_the_update_and_those_that_come_meanwhile_wait(
    with_policy: Callable[[InFlightUpdates], VllmEngine], weights: Weights, versions: Iterator[int]
):
    engine = with_policy("finish")
    old = next(versions)
    await engine.update_weights(weights.prefer(9), old)
    tokens = GeneratedTokens()
    under_way = asyncio.create_task(engine.generate(request(seed=5, max_new_tokens=100), tokens))
    await until(lambda: len(tokens) > 0)
    updating = asyncio.create_task(update(engine, weights, versions))
    await asyncio.sleep(0)
    later = asyncio.create_task(engine.generate(request(seed=5)))
    completion = await under_way
    assert len(completion.token_ids) == 100
    assert set(completion.weight_versions.tolist()) == {old}
    assert not later.done()
    new = await updating
    assert set((await later).weight_versions.tolist()) == {new}
    assert_logprobs(weights, await later)


@pytest.mark.parametrize("policy", ["continue", "recompute", "finish"])
async def test_new_requests_never_find_keys_and_values_of_older_weights(
    with_policy: Callable[[InFlightUpdates], VllmEngine],
    weights: Weights,
    versions: Iterator[int],
    policy: InFlightUpdates,
):
    engine = with_policy(policy)
    for _ in range(2):
        version = await update(engine, weights, versions)
        under_way = asyncio.create_task(
            engine.generate(request(seed=5, prompt=LONG_PROMPT, max_new_tokens=60))
        )
        for seed in (1, 2):
            completion = await engine.generate(request(seed=seed, prompt=LONG_PROMPT))
            assert set(completion.weight_versions.tolist()) == {version}
            assert_logprobs(weights, completion, prompt=LONG_PROMPT)
        if policy != "continue":
            await under_way
    await under_way


async def test_siblings_find_the_keys_and_values_of_their_prompt(engine: VllmEngine):
    # Else the test above would hold without anybody having done anything for it.
    from vllm.inputs import tokens_input
    from vllm.sampling_params import SamplingParams

    cached = []
    for name in ("first", "second"):
        prompt = tokens_input(list(LONG_PROMPT), cache_salt="one")
        async for output in engine._llm.generate(
            prompt, SamplingParams(max_tokens=1, detokenize=False), name
        ):
            cached.append(output.num_cached_tokens)
    assert cached == [
        0,
        2 * BLOCK_SIZE,
    ]  # the last block is always read: its last token is what is sampled after


async def test_weights_that_are_not_the_models_are_refused_and_change_nothing(
    engine: VllmEngine, weights: Weights, versions: Iterator[int]
):
    version = await update(engine, weights, versions)
    good = weights.state_dict(version + 1)
    with pytest.raises(ValueError, match=r"lm_head.weight: expected shape .*, found \(3, 3\)"):
        await engine.update_weights({**good, "lm_head.weight": torch.zeros(3, 3)}, version + 1)
    with pytest.raises(ValueError, match="spare"):
        await engine.update_weights({**good, "spare": torch.zeros(1)}, version + 1)
    assert (engine.weight_version, engine.failure) == (version, None)
    completion = await engine.generate(request(seed=1))
    assert set(completion.weight_versions.tolist()) == {version}
    assert_logprobs(weights, completion)


async def test_no_memory_is_kept_of_weights_that_were_handed_over(
    engine: VllmEngine, weights: Weights, versions: Iterator[int]
):
    await update(engine, weights, versions)
    assert memory_files() == set()
