"""Agents that run themselves: how they are found, what their rollouts come to, and how they are given up."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace

import httpx2
import openai
import pytest
import torch
from kinlog_agents import Blocking, HeldEngine, Retrying
from kinlog_attached import tiny_config

from kinlog.schemas.errors import ConfigError
from kinlog.schemas.reasons import Reason, Validity
from kinlog.schemas.settings import GenerationSettings, RolloutSettings
from kinlog.workers.agent_rollout import run_agent
from kinlog.workers.agents import Agent, Endpoint, build_agent, open_dataset
from kinlog.workers.engines import GeneratedTokens
from kinlog.workers.environments import EnvironmentFailure, Retry, SingleTurn, Verdict
from kinlog.workers.failures import classify_failure
from kinlog.workers.model_calls import EarlierCall, ModelCalls
from kinlog.workers.openai_endpoint import OpenAIEndpoint
from kinlog.workers.tasks import Item

pytest_plugins = ["kinlog_policy_fixtures"]

GENERATION = GenerationSettings(max_new_tokens=8, temperature=0.9)
SETTINGS = RolloutSettings(format_reward=0.2)
BITS = 2  # index of a row of the task that counts bits


class Scripted:
    """An agent that does what a test says."""

    def __init__(self, run: Callable[[Item, Endpoint], Awaitable[Verdict]]) -> None:
        self._run = run

    async def run(self, item: Item, endpoint: Endpoint) -> Verdict:
        return await self._run(item, endpoint)


def client_of(endpoint: Endpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=endpoint.base_url,
        api_key=endpoint.api_key,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=False),
    )


async def ask(endpoint: Endpoint, text: str = "1") -> str:
    async with client_of(endpoint) as client:
        answer = await client.completions.create(model=endpoint.model, prompt=text)
    return answer.choices[0].text


@pytest.fixture
async def run(mixture, tokenizer):
    endpoint = OpenAIEndpoint(tokenizer, GENERATION)

    def run(engine, agent: Agent, calls: ModelCalls | None = None):
        calls = calls or ModelCalls(engine, GENERATION, seed=1)
        return run_agent(calls, endpoint, agent, mixture[BITS], settings=SETTINGS)

    yield run
    await endpoint.close()


@pytest.fixture
def right_answer(mixture):
    return str(int(mixture[BITS].prompt.removeprefix("b").removesuffix("=")).bit_count())


@pytest.mark.parametrize(("name", "kind"), [("single_turn", SingleTurn), ("retry", Retry)])
def test_task_names_an_agent_that_is_built_in(mixture, name: str, kind: type):
    assert type(build_agent(name, mixture, SETTINGS)) is kind


@pytest.mark.parametrize("name", ["Retrying", "Blocking"])
def test_task_names_an_agent_of_its_users_own(mixture, name: str):
    agent = build_agent(f"kinlog_agents:{name}", mixture, SETTINGS)
    assert type(agent).__name__ == name
    assert isinstance(agent, Agent)


def test_task_names_an_environment_of_its_users_own(mixture):
    environment = build_agent("kinlog.workers.environments:Retry", mixture, SETTINGS)
    assert isinstance(environment, Retry)
    assert not isinstance(environment, Agent)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("oracle", r"\['retry', 'single_turn'\], or module:Class of your own, found 'oracle'"),
        ("no_such_module:Agent", "cannot be made: No module named 'no_such_module'"),
        ("kinlog_agents:Agents", "cannot be made: .*no attribute 'Agents'"),
        ("kinlog_agents:Unmakeable", "cannot be made: .*takes 1 positional argument"),
        ("kinlog_agents:Neither", "'begin' .* or 'run' .*, found neither"),
        ("kinlog_agents:Both", "'begin' .* or 'run' .*, found both"),
    ],
)
def test_agent_that_is_none_is_refused_saying_what_was_expected(mixture, name: str, message: str):
    with pytest.raises(ConfigError, match=f"dataset.tasks: .*{message}"):
        build_agent(name, mixture, SETTINGS)


def test_run_is_refused_when_a_task_names_no_agent():
    assert len(open_dataset(tiny_config("retry", "kinlog_agents:Blocking", max_new_tokens=4))) == 8
    with pytest.raises(ConfigError, match="found 'oracle'"):
        open_dataset(tiny_config("retry", "oracle", max_new_tokens=4))


async def test_unmodified_agent_is_captured(run, scripted_engine, mixture, right_answer, tokenizer):
    rollout = await run(scripted_engine(["-", "3", right_answer]), Retrying(mixture, SETTINGS))
    assert [(call.call, call.parent) for call in rollout.calls] == [(0, -1), (1, -1), (2, 1)]
    first, second, last = rollout.calls
    assert torch.equal(first.prompt_token_ids, second.prompt_token_ids)
    expected = [
        *tokenizer.encode(mixture[BITS].prompt + "3"),
        tokenizer.eos_id,
        *tokenizer.encode("?"),
    ]
    assert last.prompt_token_ids.tolist() == expected
    assert (rollout.raw_reward, rollout.shaped_reward, rollout.validity) == (1.0, 1.2, Validity.VALID)


async def test_agent_that_blocks_has_a_thread_of_its_own(run, make_engine, mixture):
    agent = Blocking(mixture, SETTINGS)
    rollouts = await asyncio.gather(*(run(make_engine(), agent) for _ in range(3)))
    assert [len(rollout.calls) for rollout in rollouts] == [1, 1, 1]


async def test_agent_whose_judge_fails_is_kept_and_marked(run, scripted_engine):
    async def judge_fails(item, endpoint):
        await ask(endpoint)
        raise EnvironmentFailure("the sandbox is gone")

    rollout = await run(scripted_engine(["12"]), Scripted(judge_fails))
    assert (rollout.validity, rollout.raw_reward, rollout.completion_tokens) == (Validity.FAILED, 0.0, 3)


async def test_agent_that_asks_nothing_is_refused_naming_the_sample(run, scripted_engine, mixture):
    async def silent(item, endpoint):
        return Verdict(reward=1.0, well_formed=True)

    with pytest.raises(ValueError, match=f"{mixture[BITS].sample_id}' ended without a model call") as refused:
        await run(scripted_engine([]), Scripted(silent))
    assert classify_failure(refused.value) is Reason.DATA_FAILURE


async def test_agent_that_returns_no_verdict_is_refused(run, scripted_engine):
    async def rewarded(item, endpoint):
        await ask(endpoint)
        return 1.0

    with pytest.raises(TypeError, match="to return a Verdict, found float"):
        await run(scripted_engine(["1"]), Scripted(rewarded))


async def test_agent_that_is_refused_fails_by_its_own_fault(run, scripted_engine):
    async def picky(item, endpoint):
        async with client_of(endpoint) as client:
            await client.completions.create(model=endpoint.model, prompt="1", n=2)

    with pytest.raises(openai.BadRequestError) as refused:
        await run(scripted_engine([]), Scripted(picky))
    assert classify_failure(refused.value) is Reason.DATA_FAILURE


async def test_agent_that_runs_out_of_patience_has_timed_out(run):
    async def impatient(item, endpoint):
        async with client_of(endpoint) as client:
            await client.completions.create(model=endpoint.model, prompt="1", timeout=0.05)

    with pytest.raises(openai.APITimeoutError) as timed_out:
        await run(HeldEngine(), Scripted(impatient))
    assert classify_failure(timed_out.value) is Reason.TIMEOUT


async def test_agent_that_reaches_nobody_has_failed_by_infrastructure(run, scripted_engine):
    async def astray(item, endpoint):
        await ask(replace(endpoint, base_url="http://127.0.0.1:1/v1"))

    with pytest.raises(openai.APIConnectionError) as unreachable:
        await run(scripted_engine([]), Scripted(astray))
    assert classify_failure(unreachable.value) is Reason.INFRASTRUCTURE_FAILURE


async def test_failure_of_the_engine_is_not_covered_up_by_the_agent(run):
    engine = HeldEngine()

    async def undaunted(item, endpoint):
        try:
            await ask(endpoint)
        except openai.InternalServerError:
            return Verdict(reward=0.0, well_formed=False)
        raise AssertionError("nobody answers")

    running = asyncio.create_task(run(engine, Scripted(undaunted)))
    await engine.asked.wait()
    engine.fail(OSError("the device is gone"))
    with pytest.raises(OSError, match="the device is gone") as failed:
        await running
    assert classify_failure(failed.value) is Reason.INFRASTRUCTURE_FAILURE


async def test_text_outside_of_the_alphabet_ends_the_run_and_not_the_rollout(run, scripted_engine):
    with pytest.raises(ConfigError, match="character 'z'"):
        await run(scripted_engine([]), Scripted(lambda item, endpoint: ask(endpoint, "z")))


async def test_agent_that_cancels_itself_is_not_taken_for_one_that_was_given_up(run, scripted_engine):
    async def gives_up(item, endpoint):
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="cancelled itself"):
        await run(scripted_engine([]), Scripted(gives_up))


async def test_agent_that_is_given_up_is_cancelled_and_so_is_what_it_asked(run):
    engine, cancelled = HeldEngine(), asyncio.Event()

    async def tidy(item, endpoint):
        try:
            await ask(endpoint)
        finally:
            cancelled.set()

    running = asyncio.create_task(run(engine, Scripted(tidy)))
    await engine.asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (engine.waiting, engine.gone) == (0, 1), "its slot is free at once"
    await cancelled.wait()


async def test_agent_that_does_not_let_itself_be_given_up_gets_no_more_tokens(run):
    engine = HeldEngine()
    outcomes: asyncio.Queue[BaseException] = asyncio.Queue()

    async def stubborn(item, endpoint):
        while True:
            try:
                await ask(endpoint)
            except (asyncio.CancelledError, openai.APIError) as error:
                outcomes.put_nowait(error)
                if isinstance(error, openai.AuthenticationError):
                    raise

    running = asyncio.create_task(run(engine, Scripted(stubborn)))
    await engine.asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert isinstance(await outcomes.get(), asyncio.CancelledError)
    assert isinstance(await outcomes.get(), openai.AuthenticationError)
    assert engine.waiting == 0


async def test_thread_of_an_agent_that_was_given_up_gets_errors_and_no_tokens(run):
    engine, ended = HeldEngine(), threading.Event()
    outcomes: list[Exception] = []

    class Stubborn:
        def run(self, item: Item, endpoint: Endpoint) -> Verdict:
            where = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "max_retries": 0}
            with openai.OpenAI(**where) as client:
                for _ in range(2):
                    try:
                        client.completions.create(model=endpoint.model, prompt="1")
                    except openai.APIError as error:
                        outcomes.append(error)
            ended.set()
            return Verdict(reward=1.0, well_formed=True)

    running = asyncio.create_task(run(engine, Stubborn()))
    await engine.asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await asyncio.to_thread(ended.wait, 30.0)
    assert [type(error) for error in outcomes] == [openai.AuthenticationError] * 2
    assert engine.waiting == 0


async def test_what_an_agent_leaves_unanswered_ends_with_its_rollout(run, make_engine):
    engine, left = make_engine(), []

    async def hasty(item, endpoint):
        await ask(endpoint)
        left.append(asyncio.create_task(ask(endpoint, "12")))
        await asyncio.sleep(0)
        return Verdict(reward=1.0, well_formed=True)

    rollout = await run(engine, Scripted(hasty))
    with pytest.raises((openai.APIError, httpx2.HTTPError)):
        await left[0]
    assert len(rollout.calls) == 1


class Kept:
    """Keeps what calls have generated, as the progress journal does."""

    def __init__(self) -> None:
        self.calls: list[EarlierCall] = []

    def begin_call(self, call: int, prompt_digest: bytes, tokens: GeneratedTokens) -> None:
        self.calls.append(EarlierCall(prompt_digest, tokens, None, None))

    def end_call(self, call, finish_reason) -> None:
        self.calls[call] = EarlierCall(
            self.calls[call].prompt_digest, self.calls[call].tokens, finish_reason, None
        )


async def test_agent_that_is_run_again_is_answered_with_what_was_generated_before(run, make_engine, mixture):
    engine, kept = make_engine(), Kept()
    agent = Retrying(mixture, SETTINGS)
    first = await run(engine, agent, ModelCalls(engine, GENERATION, seed=1, progress=kept))
    again = await run(engine, agent, ModelCalls(engine, GENERATION, seed=2, earlier=kept.calls[:2]))
    assert again.resumed_tokens == sum(len(call.completion.token_ids) for call in first.calls[:2])
    for one, other in zip(first.calls[:2], again.calls[:2], strict=True):
        assert torch.equal(one.completion.token_ids, other.completion.token_ids)
    assert [call.parent for call in again.calls] == [call.parent for call in first.calls]
