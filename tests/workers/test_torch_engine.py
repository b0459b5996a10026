import asyncio

import pytest
import torch

from kinlog.schemas.reasons import FinishReason
from kinlog.workers.engines import EngineClosedError, GenerationRequest
from kinlog.workers.model import load_policy

pytest_plugins = ["kinlog_policy_fixtures"]

PROMPT = (5, 6, 7, 8)


def request(*, seed=0, prompt=PROMPT, max_new_tokens=12, temperature=1.0):
    return GenerationRequest(
        prompt_token_ids=prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
    )


def same(first, second):
    return torch.equal(first.token_ids, second.token_ids) and torch.equal(first.logprobs, second.logprobs)


def prefer(policy, token_id, *, bias=50.0):
    """Make the policy all but certain to sample ``token_id``, whatever it reads."""
    weights = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    weights["model.norm.weight"].zero_()
    hidden = weights["model.norm.weight"].shape[0]
    # The final norm scales features to 0: logits are then all equal, so let one feature through.
    weights["model.norm.weight"][0] = 1.0
    weights["model.embed_tokens.weight"][:] = 0.0
    weights["model.embed_tokens.weight"][:, 0] = 1.0
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name].zero_()
    weights["lm_head.weight"].zero_()
    weights["lm_head.weight"][token_id, 0] = bias / hidden**0.5
    return weights


async def test_dtypes_and_lengths_agree(make_engine):
    completion = await make_engine().generate(request())
    length = len(completion.token_ids)
    assert 1 <= length <= 12
    assert (completion.token_ids.dtype, completion.logprobs.dtype, completion.weight_versions.dtype) == (
        torch.int64,
        torch.float32,
        torch.int32,
    )
    assert completion.logprobs.shape == completion.weight_versions.shape == (length,)


async def test_same_seed_gives_the_same_completion_and_another_seed_another(make_engine):
    engine = make_engine()
    first, again, other = [await engine.generate(request(seed=seed)) for seed in (1, 1, 2)]
    assert same(first, again)
    assert not same(first, other)


async def test_neighbours_do_not_change_a_completion_by_a_single_bit(make_engine):
    engine = make_engine(max_batch_size=4)
    requests = [request(seed=seed, prompt=PROMPT[: 1 + seed % 4]) for seed in range(11)]
    alone = [await engine.generate(each) for each in requests]
    together = await asyncio.gather(*(engine.generate(each) for each in reversed(requests)))
    assert all(same(first, second) for first, second in zip(alone, reversed(together), strict=True))


async def test_logprobs_are_those_that_a_full_forward_pass_computes(make_engine, model_settings):
    completion = await make_engine().generate(request(seed=3, temperature=0.7))
    model = load_policy(model_settings).model.eval()
    row = torch.cat([torch.tensor(PROMPT), completion.token_ids])
    with torch.no_grad():
        logits = model(input_ids=row.unsqueeze(0)).logits[0, len(PROMPT) - 1 : -1]
    expected = torch.log_softmax(logits / 0.7, dim=-1).gather(1, completion.token_ids.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(completion.logprobs, expected, rtol=1e-4, atol=1e-5)


async def test_sampled_frequencies_follow_the_logprobs(make_engine):
    engine = make_engine(max_batch_size=32)
    drawn = await asyncio.gather(
        *(engine.generate(request(seed=seed, max_new_tokens=1)) for seed in range(600))
    )
    counts = torch.zeros(64)
    expected = torch.zeros(64)
    for completion in drawn:
        counts[completion.token_ids[0]] += 1
        expected[completion.token_ids[0]] = 600 * completion.logprobs[0].exp()
    assert expected.sum() == pytest.approx(
        600, rel=0.02
    )  # every token was seen, and their probabilities add up
    assert ((counts - expected).abs() < 5 * expected.sqrt() + 1).all()


async def test_end_token_is_part_of_the_completion_even_at_once(make_engine, model_settings):
    engine = make_engine()
    policy = load_policy(model_settings)
    await engine.update_weights(prefer(policy, policy.tokenizer.eos_id), 1)
    completion = await engine.generate(request())
    assert completion.token_ids.tolist() == [policy.tokenizer.eos_id]
    assert completion.finish_reason is FinishReason.STOP
    assert policy.tokenizer.decode(completion.token_ids.tolist()) == ""


async def test_limit_ends_a_completion_without_end_token(make_engine, model_settings):
    engine = make_engine()
    await engine.update_weights(prefer(load_policy(model_settings), 9), 1)
    completion = await engine.generate(request(max_new_tokens=5))
    assert completion.token_ids.tolist() == [9] * 5
    assert completion.finish_reason is FinishReason.LENGTH


async def test_short_request_resolves_before_the_long_one_of_its_batch(make_engine, model_settings):
    engine = make_engine()
    await engine.update_weights(prefer(load_policy(model_settings), 9), 1)
    long = asyncio.create_task(engine.generate(request(max_new_tokens=40)))
    await engine.generate(request(max_new_tokens=2))
    assert not long.done()
    assert len((await long).token_ids) == 40


async def test_more_requests_than_slots_are_all_served(make_engine):
    engine = make_engine(max_batch_size=2)
    completions = await asyncio.gather(*(engine.generate(request(seed=seed)) for seed in range(9)))
    assert len(completions) == 9


async def test_update_between_tokens_stamps_each_token_with_its_version(make_engine, model_settings):
    engine = make_engine(weight_version=4)
    nine, ten = (prefer(load_policy(model_settings), token_id) for token_id in (9, 10))
    await engine.update_weights(nine, 5)
    long = asyncio.create_task(engine.generate(request(max_new_tokens=40)))
    await engine.generate(request(max_new_tokens=3))
    await engine.update_weights(ten, 6)
    completion = await long
    versions = completion.weight_versions.tolist()
    assert set(versions) == {5, 6}
    assert versions == sorted(versions)
    assert completion.token_ids.tolist() == [9 if version == 5 else 10 for version in versions]
    assert engine.weight_version == 6


async def test_weights_of_another_shape_are_refused_and_change_nothing(make_engine, model_settings):
    engine = make_engine()
    weights = dict(load_policy(model_settings).model.named_parameters())
    before = await engine.generate(request())
    with pytest.raises(ValueError, match=r"lm_head.weight: expected shape .*, found \(3, 3\)"):
        await engine.update_weights({**weights, "lm_head.weight": torch.zeros(3, 3)}, 1)
    with pytest.raises(ValueError, match="spare"):
        await engine.update_weights({**weights, "spare": torch.zeros(1)}, 1)
    assert engine.weight_version == 0
    assert same(before, await engine.generate(request()))


async def test_cancelled_request_frees_its_slot(make_engine, model_settings):
    engine = make_engine(max_batch_size=1)
    await engine.update_weights(prefer(load_policy(model_settings), 9), 1)
    abandoned = asyncio.create_task(engine.generate(request(max_new_tokens=44)))
    waiting = asyncio.create_task(engine.generate(request(max_new_tokens=44)))
    next_in_line = asyncio.create_task(engine.generate(request(max_new_tokens=1)))
    await asyncio.wait([abandoned], timeout=0)
    abandoned.cancel()
    waiting.cancel()
    assert len((await next_in_line).token_ids) == 1
    assert abandoned.cancelled()
    assert waiting.cancelled()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(max_new_tokens=45), "at most 48 positions, found 4 prompt tokens [+] 45"),
        (request(prompt=()), "found 0 prompt tokens"),
        (request(max_new_tokens=0), "max_new_tokens 0"),
        (request(temperature=0.0), "temperature above 0"),
        (request(prompt=(5, 999)), "token ids in"),
    ],
)
async def test_bad_request_is_refused_without_harm_to_others(make_engine, bad, message):
    engine = make_engine()
    good = asyncio.create_task(engine.generate(request()))
    with pytest.raises(ValueError, match=message):
        await engine.generate(bad)
    assert len((await good).token_ids) >= 1


async def test_error_in_the_decode_loop_fails_pending_and_later_requests(make_engine):
    engine = make_engine(max_batch_size=2)

    def broken_forward(**_):
        raise RuntimeError("the device is on fire")

    engine._model.forward = broken_forward
    results = await asyncio.gather(
        *(engine.generate(request(seed=seed)) for seed in range(4)), return_exceptions=True
    )
    assert [str(result) for result in results] == ["the device is on fire"] * 4
    with pytest.raises(RuntimeError, match="the device is on fire"):
        await engine.generate(request())


async def test_closing_fails_what_is_pending_and_what_comes_later(make_engine):
    engine = make_engine(max_batch_size=1)
    pending = [asyncio.create_task(engine.generate(request(max_new_tokens=44))) for _ in range(2)]
    await asyncio.wait(pending, timeout=0)
    await engine.close()
    results = await asyncio.gather(*pending, return_exceptions=True)
    assert all(isinstance(result, EngineClosedError) for result in results)
    with pytest.raises(EngineClosedError):
        await engine.generate(request())
