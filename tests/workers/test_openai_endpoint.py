"""The endpoint, asked by OpenAI's own client: what is answered, what is captured, and what is refused by which name."""

import asyncio

import httpx2
import openai
import pytest
from kinlog_agents import HeldEngine, served

from kinlog.schemas.errors import ConfigError
from kinlog.schemas.receipts import MAX_MODEL_CALLS
from kinlog.schemas.settings import GenerationSettings
from kinlog.workers.openai_endpoint import MODEL_NAME, OpenAIEndpoint

pytest_plugins = ["kinlog_policy_fixtures"]

SETTINGS = GenerationSettings(max_new_tokens=8, temperature=0.9)


def tokens_of(calls):
    return [[*call.prompt_token_ids.tolist(), *call.completion.token_ids.tolist()] for call in calls.captured]


async def test_chat_is_answered_with_what_was_captured(make_engine, tokenizer):
    async with served(make_engine(weight_version=5), tokenizer, SETTINGS) as it:
        answer = await it.say({"role": "system", "content": "s"}, "1,2=", logprobs=True)
        (call,) = it.calls.captured
    completion = call.completion
    (choice,) = answer.choices
    assert call.prompt_token_ids.tolist() == tokenizer.encode("s1,2=")
    assert choice.message.role == "assistant"
    assert choice.message.content == tokenizer.decode(completion.token_ids.tolist())
    assert choice.finish_reason == completion.finish_reason.value
    assert [token.logprob for token in choice.logprobs.content] == pytest.approx(completion.logprobs.tolist())
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, len(completion.token_ids))
    assert (answer.object, answer.model) == ("chat.completion", MODEL_NAME)
    assert set(completion.weight_versions.tolist()) == {5}


async def test_client_that_blocks_is_answered_in_a_thread(make_engine, tokenizer):
    async with served(make_engine(), tokenizer, SETTINGS) as it:
        with it.blocking() as client:
            answer = await asyncio.to_thread(
                client.chat.completions.create,
                model=it.endpoint.model,
                messages=[{"role": "user", "content": "1"}],
            )
        assert answer.choices[0].message.content == tokenizer.decode(tokens_of(it.calls)[0][1:])


async def test_content_in_parts_is_read_as_one_text(scripted_engine, tokenizer):
    parts = [{"type": "text", "text": "1,"}, {"type": "text", "text": "2="}]
    async with served(scripted_engine(["3"]), tokenizer, SETTINGS) as it:
        await it.say({"role": "user", "content": parts})
        assert it.calls.captured[0].prompt_token_ids.tolist() == tokenizer.encode("1,2=")


async def test_text_is_completed(scripted_engine, tokenizer):
    async with served(scripted_engine(["3"]), tokenizer, SETTINGS) as it:
        answer = await it.complete("1,2=", logprobs=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, answer.object) == ("3", "stop", "text_completion")
    assert (choice.logprobs.tokens, choice.logprobs.token_logprobs) == (["3", ""], [-1.0, -1.0])
    assert choice.logprobs.text_offset == [0, 1]
    assert answer.usage.total_tokens == 6


@pytest.mark.parametrize("wrap", [False, True], ids=["flat", "list_of_one"])
async def test_tokens_are_completed_as_they_are_and_given_back_if_asked_for(
    scripted_engine, tokenizer, wrap: bool
):
    prompt = [tokenizer.bos_id, *tokenizer.encode("12"), tokenizer.eos_id]
    async with served(scripted_engine(["3"]), tokenizer, SETTINGS) as it:
        asked = [prompt] if wrap else prompt
        answer = await it.complete(asked, extra_body={"return_token_ids": True})
        assert it.calls.captured[0].prompt_token_ids.tolist() == prompt
    extra = answer.choices[0].model_extra
    assert extra == {
        "prompt_token_ids": prompt,
        "token_ids": [*tokenizer.encode("3"), tokenizer.eos_id],
    }


async def test_streamed_chat_is_the_same_in_pieces(scripted_engine, tokenizer):
    async with served(scripted_engine(["12"] * 2), tokenizer, SETTINGS) as it:
        whole = await it.say("1")
        stream = await it.say("1", stream=True, logprobs=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    *parts, usage = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "12"
    assert [part.choices[0].finish_reason for part in parts] == [None, None, "stop"]
    assert sum(len(part.choices[0].logprobs.content) for part in parts if part.choices[0].logprobs) == 3
    assert (usage.choices, usage.usage) == ([], whole.usage)
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


async def test_stream_is_read_by_the_client_that_blocks_and_has_no_usage_unasked(scripted_engine, tokenizer):
    async with served(scripted_engine(["12"]), tokenizer, SETTINGS) as it:

        def read():
            with it.blocking() as client:
                return list(client.completions.create(model=it.endpoint.model, prompt="1", stream=True))

        chunks = await asyncio.to_thread(read)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "12"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "stop"]


async def test_models_are_listed(scripted_engine, tokenizer):
    async with served(scripted_engine([]), tokenizer, SETTINGS) as it:
        assert [model.id async for model in it.client.models.list()] == [it.endpoint.model]


async def test_limits_are_lowered_by_the_agent_and_never_raised(scripted_engine, tokenizer):
    engine = scripted_engine(["1"] * 5)
    async with served(engine, tokenizer, SETTINGS) as it:
        await it.say("1", max_tokens=3)
        await it.say("1", max_completion_tokens=4, max_tokens=6)
        await it.say("1", max_tokens=1_000)
        await it.say("1")
        await it.complete("1", max_tokens=2)
    assert [request.max_new_tokens for request in engine.requests] == [3, 4, 8, 8, 2]


async def test_what_asks_for_nothing_is_accepted(scripted_engine, tokenizer):
    engine = scripted_engine(["1"] * 2)
    neutral = {"temperature": 0.9, "top_p": 1.0, "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0}
    async with served(engine, tokenizer, SETTINGS) as it:
        await it.say(
            "1", **neutral, stop=[], tools=[], logit_bias={}, response_format={"type": "text"}, user="me"
        )
        await it.complete("1", **neutral, best_of=1, echo=False, seed=None)
    assert {request.temperature for request in engine.requests} == {0.9}


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 1.0),
        ("top_p", 0.5),
        ("n", 2),
        ("stop", ["="]),
        ("stop", "="),
        ("seed", 7),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("logit_bias", {"5": 10}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("top_logprobs", 2),
        ("reasoning_effort", "low"),
        ("min_p", 0.1),
    ],
)
async def test_unsupported_parameter_of_a_chat_is_refused_by_name(
    scripted_engine, tokenizer, parameter: str, value: object
):
    async with served(scripted_engine([]), tokenizer, SETTINGS) as it:
        with pytest.raises(openai.BadRequestError, match=parameter) as refused:
            await it.say("1", extra_body={parameter: value})
        assert (refused.value.param, refused.value.code) == (parameter, "unsupported_parameter")
        assert (it.calls.captured, it.session.failure) == ([], None)


@pytest.mark.parametrize(
    ("parameter", "value"), [("best_of", 2), ("echo", True), ("suffix", "!"), ("logprobs", 1)]
)
async def test_unsupported_parameter_of_a_completion_is_refused_by_name(
    scripted_engine, tokenizer, parameter: str, value: object
):
    async with served(scripted_engine([]), tokenizer, SETTINGS) as it:
        with pytest.raises(openai.BadRequestError) as refused:
            await it.complete("1", **{parameter: value})
        assert refused.value.param == parameter


@pytest.mark.parametrize(
    ("message", "parameter"),
    [
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "1", "weight": 1}, "messages[0].weight"),
        ({"role": "judge", "content": "1"}, "messages[0].role"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
    ],
)
async def test_message_that_the_policy_would_not_read_is_refused(
    scripted_engine, tokenizer, message, parameter: str
):
    async with served(scripted_engine([]), tokenizer, SETTINGS) as it:
        with pytest.raises(openai.BadRequestError) as refused:
            await it.say(message)
        assert refused.value.param == parameter


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (["1", "2"], "expected one prompt, found 2"),
        ([[3], [4]], "expected one prompt, found 2"),
        ("", "empty prompt"),
        ([], "empty prompt"),
        ([3, 99], r"token ids in \[0, 20\), found 3 to 99"),
    ],
)
async def test_prompt_that_is_not_one_is_refused(scripted_engine, tokenizer, prompt, message: str):
    async with served(scripted_engine([]), tokenizer, SETTINGS) as it:
        with pytest.raises(openai.BadRequestError, match=message):
            await it.complete(prompt)


async def test_prompt_that_does_not_fit_is_the_agents_own_fault(make_engine, tokenizer):
    async with served(make_engine(), tokenizer, SETTINGS) as it:
        with pytest.raises(openai.BadRequestError, match="at most 48 positions") as refused:
            await it.say("1" * 41)
        assert refused.value.code == "context_length_exceeded"
        assert it.session.failure is None
        await it.say("1")


async def test_text_that_the_tokenizer_does_not_know_is_a_failure_of_the_configuration(
    scripted_engine, tokenizer
):
    async with served(scripted_engine(["1"]), tokenizer, SETTINGS) as it:
        for ask in (it.say, it.complete):
            with pytest.raises(openai.BadRequestError, match=r"character 'z'.*model\.alphabet"):
                await ask("z")
            assert isinstance(it.session.failure, ConfigError)
        await it.say("1")
        assert it.session.failure is None, "the agent found another way"


async def test_failed_engine_is_not_the_agents_fault(tokenizer):
    engine = HeldEngine()
    async with served(engine, tokenizer, SETTINGS) as it:
        asking = asyncio.create_task(it.say("1"))
        await engine.asked.wait()
        engine.fail(RuntimeError("out of memory"))
        with pytest.raises(openai.InternalServerError, match="RuntimeError: out of memory") as failed:
            await asking
        assert failed.value.status_code == 503
        assert it.session.failure is engine.failure


async def test_more_calls_than_a_receipt_holds_are_refused(scripted_engine, tokenizer):
    async with served(scripted_engine(["1"] * MAX_MODEL_CALLS), tokenizer, SETTINGS) as it:
        for _ in range(MAX_MODEL_CALLS):
            await it.calls.make([3])
        with pytest.raises(openai.BadRequestError, match="at most 96 model calls") as refused:
            await it.say("1")
        assert refused.value.code == "too_many_model_calls"


async def test_other_model_is_not_found(scripted_engine, tokenizer):
    async with served(scripted_engine([]), tokenizer, SETTINGS) as it:
        with pytest.raises(openai.NotFoundError, match="'policy', found 'gpt-4o'") as refused:
            await it.client.chat.completions.create(
                model="gpt-4o", messages=[{"role": "user", "content": "1"}]
            )
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


async def test_wrong_key_opens_nothing(scripted_engine, tokenizer):
    async with served(scripted_engine([]), tokenizer, SETTINGS) as it:
        stranger = it.client.with_options(api_key="sk-guessed")
        for ask in (
            stranger.models.list(),
            stranger.completions.create(model="policy", prompt="1"),
            stranger.chat.completions.create(model="policy", messages=[{"role": "user", "content": "1"}]),
        ):
            with pytest.raises(openai.AuthenticationError) as refused:
                await ask
            assert refused.value.code == "invalid_api_key"


async def test_key_ends_with_its_rollout(scripted_engine, tokenizer):
    endpoint = OpenAIEndpoint(tokenizer, SETTINGS)
    async with served(scripted_engine(["1"]), tokenizer, SETTINGS, at=endpoint) as it:
        late = it.client.copy(http_client=httpx2.AsyncClient())
        await it.say("1")
    async with late:
        with pytest.raises(openai.AuthenticationError):
            await late.completions.create(model="policy", prompt="1")
    await endpoint.close()


async def test_request_that_is_under_way_when_its_rollout_ends_is_dropped(tokenizer):
    engine, endpoint = HeldEngine(), OpenAIEndpoint(tokenizer, SETTINGS)
    async with served(engine, tokenizer, SETTINGS, at=endpoint) as it:
        late = it.client.copy(http_client=httpx2.AsyncClient())
        asking = asyncio.create_task(late.completions.create(model="policy", prompt="1"))
        await engine.asked.wait()
    with pytest.raises(openai.AuthenticationError):
        await asking
    assert (engine.waiting, engine.gone, it.calls.captured) == (0, 1, [])
    await late.close()
    await endpoint.close()


async def test_request_whose_client_has_gone_is_dropped(tokenizer):
    engine = HeldEngine()
    async with served(engine, tokenizer, SETTINGS) as it:
        asking = asyncio.create_task(it.say("1"))
        await engine.asked.wait()
        asking.cancel()
        await engine.left.wait()
        assert (engine.waiting, it.calls.captured, it.session.failure) == (0, [], None)


async def test_request_whose_client_has_timed_out_is_dropped(tokenizer):
    engine = HeldEngine()
    async with served(engine, tokenizer, SETTINGS) as it:
        with pytest.raises(openai.APITimeoutError):
            await it.say("1", timeout=0.2)
        if engine.asked.is_set():  # else it was not even heard
            await engine.left.wait()
        assert (engine.waiting, it.calls.captured) == (0, [])


async def test_rollouts_at_one_endpoint_do_not_see_each_other(make_engine, tokenizer):
    engine, endpoint = make_engine(), OpenAIEndpoint(tokenizer, SETTINGS)
    async with (
        served(engine, tokenizer, SETTINGS, at=endpoint) as one,
        served(engine, tokenizer, SETTINGS, at=endpoint) as other,
    ):
        assert one.endpoint.base_url == other.endpoint.base_url
        await asyncio.gather(one.say("1"), other.say("2"), one.say("3"))
        assert sorted(tokens[0] for tokens in tokens_of(one.calls)) == tokenizer.encode("13")
        assert [tokens[0] for tokens in tokens_of(other.calls)] == tokenizer.encode("2")
    await endpoint.close()


async def test_error_of_the_protocol_has_the_shape_of_all_others(scripted_engine, tokenizer):
    async with served(scripted_engine([]), tokenizer, SETTINGS) as it:
        key = {"Authorization": f"Bearer {it.endpoint.api_key}"}
        async with httpx2.AsyncClient(base_url=it.endpoint.base_url + "/", headers=key) as http:
            answers = [
                await http.post("chat/completions", content=b"{"),
                await http.post("chat/completions", content=b"[]"),
                await http.post("embeddings", content=b"{}"),
                await http.get("chat/completions"),
                await http.post("completions", content=bytes(9 * 1024 * 1024)),
            ]
    assert [answer.status_code for answer in answers] == [400, 400, 404, 405, 413]
    assert all(answer.json()["error"]["type"] == "invalid_request_error" for answer in answers)


async def test_endpoint_that_is_closed_answers_nobody(tokenizer):
    engine, endpoint = HeldEngine(), OpenAIEndpoint(tokenizer, SETTINGS)
    async with served(engine, tokenizer, SETTINGS, at=endpoint) as it:
        asking = asyncio.create_task(it.say("1"))
        await engine.asked.wait()
        await endpoint.close()
        with pytest.raises(openai.APIError):
            await asking
        with pytest.raises(openai.APIConnectionError):
            await it.say("1")
        assert engine.gone == 1
    assert it.calls.captured == []
