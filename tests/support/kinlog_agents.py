"""Agents as their users write them, with nothing but OpenAI's client, and the endpoint that they are pointed at."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAI

from kinlog.schemas.settings import GenerationSettings, RolloutSettings
from kinlog.workers.agent_session import AgentSession
from kinlog.workers.agents import Endpoint
from kinlog.workers.engines import Completion, Engine, GeneratedTokens, GenerationRequest
from kinlog.workers.environments import Scorer, Verdict
from kinlog.workers.model_calls import ModelCalls
from kinlog.workers.openai_endpoint import OpenAIEndpoint
from kinlog.workers.tasks import Item
from kinlog.workers.tokenizer import Tokenizer


class Retrying:
    """Asks, does not like the first answer and asks the same again, has a tool say something, and asks once more."""

    def __init__(self, scorer: Scorer, settings: RolloutSettings) -> None:
        self._scorer = scorer

    async def run(self, item: Item, endpoint: Endpoint) -> Verdict:
        messages: list[object] = [{"role": "user", "content": item.prompt}]
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:

            async def ask() -> object:
                answer = await client.chat.completions.create(model=endpoint.model, messages=messages)
                return answer.choices[0].message

            await ask()
            messages += [await ask(), {"role": "tool", "tool_call_id": "1", "content": "?"}]
            last = await ask()
        return Verdict(reward=self._scorer.score(item, last.content), well_formed=last.content.isdigit())


class Blocking:
    """One question, by the client that blocks."""

    def __init__(self, scorer: Scorer, settings: RolloutSettings) -> None:
        self._scorer = scorer

    def run(self, item: Item, endpoint: Endpoint) -> Verdict:
        with OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            answer = client.chat.completions.create(
                model=endpoint.model, messages=[{"role": "user", "content": item.prompt}]
            )
        content = answer.choices[0].message.content
        return Verdict(reward=self._scorer.score(item, content), well_formed=content.isdigit())


class GivingUp:
    """Asks for what there is not."""

    def __init__(self, scorer: Scorer, settings: RolloutSettings) -> None:
        self._scorer = scorer

    async def run(self, item: Item, endpoint: Endpoint) -> Verdict:
        tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            await client.chat.completions.create(
                model=endpoint.model, messages=[{"role": "user", "content": item.prompt}], tools=[tool]
            )
        raise AssertionError("it was answered")


class Neither:
    """What is no agent."""

    def __init__(self, scorer: Scorer, settings: RolloutSettings) -> None:
        self.scorer = scorer


class Both(Blocking):
    """What cannot be told."""

    def begin(self, item: Item) -> object:
        raise AssertionError("nobody can tell whether this is wanted")


class Unmakeable:
    """An agent that its task cannot make."""

    def __init__(self) -> None:
        raise AssertionError("called without what it takes")


class HeldEngine:
    """Answers nobody, and knows who waits for it and who has gone. ``fail`` ends it."""

    weight_version = 0

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.waiting = 0
        self.gone = 0
        self.asked = asyncio.Event()
        self.left = asyncio.Event()
        self._never: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    def fail(self, error: BaseException) -> None:
        self.failure = error
        self._never.set_exception(error)

    async def generate(self, request: GenerationRequest, tokens: GeneratedTokens | None = None) -> Completion:
        self.waiting += 1
        self.asked.set()
        try:
            return await asyncio.shield(self._never)
        except asyncio.CancelledError:
            self.gone += 1
            self.left.set()
            raise
        finally:
            self.waiting -= 1

    async def update_weights(self, state_dict: Mapping[str, torch.Tensor], version: int) -> None:
        raise AssertionError("a rollout never updates weights")

    async def close(self) -> None:
        self._never.cancel()


@dataclass
class Served:
    """One rollout's place at an endpoint, and a client that does not try again by itself."""

    endpoint: Endpoint
    session: AgentSession
    calls: ModelCalls
    client: AsyncOpenAI

    def blocking(self) -> OpenAI:
        """Return the client that blocks."""
        return OpenAI(base_url=self.endpoint.base_url, api_key=self.endpoint.api_key, max_retries=0)

    async def say(self, *messages: object, **parameters: object):
        """Ask in a chat; texts are a user's messages."""
        said = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        return await self.client.chat.completions.create(
            model=self.endpoint.model, messages=said, **parameters
        )

    async def complete(self, prompt: str | Sequence[object], **parameters: object):
        """Ask for the completion of a text or of tokens."""
        return await self.client.completions.create(model=self.endpoint.model, prompt=prompt, **parameters)


@asynccontextmanager
async def served(
    engine: Engine, tokenizer: Tokenizer, settings: GenerationSettings, *, at: OpenAIEndpoint | None = None
) -> AsyncIterator[Served]:
    """Serve one rollout, at an endpoint of its own unless told which."""
    endpoint = at or OpenAIEndpoint(tokenizer, settings)
    calls = ModelCalls(engine, settings, seed=1)
    try:
        async with endpoint.serve(calls) as (address, session):
            # Without the certificates of the world, which take longer to read than most tests take.
            http = DefaultAsyncHttpxClient(verify=False)
            where = {"base_url": address.base_url, "api_key": address.api_key}
            async with AsyncOpenAI(**where, max_retries=0, http_client=http) as client:
                yield Served(address, session, calls, client)
    finally:
        if at is None:
            await endpoint.close()
