"""An OpenAI-compatible endpoint in front of a worker's engine: an agent that is pointed there is captured."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from kinlog.schemas.settings import GenerationSettings
from kinlog.workers.agent_session import (
    AgentSession,
    CallFailedError,
    PromptTooLongError,
    SessionEndedError,
)
from kinlog.workers.agents import Endpoint
from kinlog.workers.conversations import Prompt
from kinlog.workers.model_calls import ModelCalls, TooManyCallsError
from kinlog.workers.openai_answers import (
    Answer,
    chat_answer,
    chat_stream,
    error_body,
    model_list,
    text_answer,
    text_stream,
)
from kinlog.workers.openai_requests import (
    ChatRequest,
    RequestRefused,
    TextRequest,
    read_chat_request,
    read_text_request,
)
from kinlog.workers.tokenizer import Tokenizer

__all__ = ["MODEL_NAME", "OpenAIEndpoint"]

#: The one model that there is.
MODEL_NAME = "policy"

#: Only this machine's own processes may ask.
_HOST = "127.0.0.1"

_MAX_REQUEST_BYTES = 8 * 1024 * 1024
_JSON = "application/json"
_EVENTS = "text/event-stream"


class OpenAIEndpoint:
    """Serves the rollouts of one worker, each by the key that it was given. Started when the first of them needs it.

    Parameters
    ----------
    tokenizer:
        The policy's.
    settings:
        The temperature that is sampled at.
    """

    def __init__(self, tokenizer: Tokenizer, settings: GenerationSettings) -> None:
        self._tokenizer = tokenizer
        self._temperature = settings.temperature
        self._sessions: dict[str, AgentSession] = {}
        """By key."""
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def serve(self, calls: ModelCalls) -> AsyncIterator[tuple[Endpoint, AgentSession]]:
        """Serve one rollout for the length of the block: after it, its key opens nothing.

        Raises
        ------
        OSError
            The endpoint cannot be started.
        """
        base_url = await self._start()
        key = secrets.token_urlsafe(24)
        session = self._sessions[key] = AgentSession(calls, self._tokenizer)
        try:
            yield Endpoint(base_url, key, MODEL_NAME), session
        finally:
            del self._sessions[key]
            await session.end()

    async def close(self) -> None:
        """Answer nobody any more. Harmless if it was never started."""
        for session in tuple(self._sessions.values()):
            await session.end()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _start(self) -> str:
        """Start the server if it is not there yet, and return its base URL."""
        async with self._starting:
            if self._runner is None:
                application = web.Application(
                    client_max_size=_MAX_REQUEST_BYTES, middlewares=[_errors_as_answers]
                )
                application.router.add_post("/v1/chat/completions", self._chat)
                application.router.add_post("/v1/completions", self._complete)
                application.router.add_get("/v1/models", self._models)
                # A client that has gone cancels its handler: nobody waits for what is being generated for it.
                runner = web.AppRunner(
                    application, handler_cancellation=True, access_log=None, shutdown_timeout=1.0
                )
                await runner.setup()
                await web.TCPSite(runner, _HOST, 0).start()
                self._runner = runner
            port: int = self._runner.addresses[0][1]
            return f"http://{_HOST}:{port}/v1"

    async def _chat(self, request: web.Request) -> web.Response:
        session = self._session(request)
        asked = read_chat_request(await request.read(), temperature=self._temperature)
        _check_model(asked.model)
        prompt = session.chat_prompt(asked.conversation)
        answer = await self._answer(session, prompt, asked, with_logprobs=bool(asked.logprobs))
        return _response(chat_stream(answer), _EVENTS) if asked.stream else _response(chat_answer(answer))

    async def _complete(self, request: web.Request) -> web.Response:
        session = self._session(request)
        asked = read_text_request(await request.read(), temperature=self._temperature)
        _check_model(asked.model)
        said = asked.only_prompt()
        prompt = session.text_prompt(said) if isinstance(said, str) else session.token_prompt(said)
        answer = await self._answer(session, prompt, asked, with_logprobs=asked.logprobs is not None)
        return _response(text_stream(answer), _EVENTS) if asked.stream else _response(text_answer(answer))

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return _response(model_list(MODEL_NAME))

    async def _answer(
        self, session: AgentSession, prompt: Prompt, asked: ChatRequest | TextRequest, *, with_logprobs: bool
    ) -> Answer:
        reply = await session.reply(prompt, max_new_tokens=asked.max_new_tokens)
        return Answer(
            model=MODEL_NAME,
            call=reply.call,
            reply=reply.text,
            decode=self._tokenizer.decode,
            with_logprobs=with_logprobs,
            with_token_ids=isinstance(asked, TextRequest) and bool(asked.return_token_ids),
            with_usage=asked.streams_usage,
        )

    def _session(self, request: web.Request) -> AgentSession:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key) if scheme.lower() == "bearer" else None
        if session is None:
            raise _no_such_key()
        return session


def _check_model(model: str) -> None:
    if model != MODEL_NAME:
        raise RequestRefused(
            404,
            f"expected the model {MODEL_NAME!r}, found {model!r}",
            code="model_not_found",
            parameter="model",
        )


def _no_such_key() -> RequestRefused:
    return RequestRefused(
        401,
        "expected the API key of a rollout that is under way: it is given to the agent, and ends with its rollout",
        code="invalid_api_key",
    )


@web.middleware
async def _errors_as_answers(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestRefused as error:
        refused = error
    except SessionEndedError:
        refused = _no_such_key()
    except TooManyCallsError as error:
        refused = RequestRefused(400, str(error), code="too_many_model_calls")
    except PromptTooLongError as error:
        refused = RequestRefused(400, str(error), code="context_length_exceeded")
    except CallFailedError as error:
        refused = RequestRefused(503, f"the engine failed: {error}")
    except ValueError as error:
        refused = RequestRefused(400, str(error))
    except web.HTTPException as error:
        refused = RequestRefused(error.status, f"{request.method} {request.path}: {error.reason}")
    body = error_body(refused.status, str(refused), code=refused.code, parameter=refused.parameter)
    return web.Response(status=refused.status, body=body, content_type=_JSON)


def _response(body: bytes, content_type: str = _JSON) -> web.Response:
    return web.Response(body=body, content_type=content_type)
