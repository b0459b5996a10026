"""The model calls of an agent that runs itself: asked for one by one or side by side, until its rollout ends."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kinlog.schemas.errors import ConfigError
from kinlog.workers.conversations import Conversations, Prompt
from kinlog.workers.model_calls import CapturedCall, ModelCalls, TooManyCallsError
from kinlog.workers.tokenizer import ChatMessage, Tokenizer

__all__ = ["AgentSession", "CallFailedError", "PromptTooLongError", "Reply", "SessionEndedError"]


class SessionEndedError(Exception):
    """The rollout has ended, or was given up: what is asked now would be nobody's."""


class PromptTooLongError(ValueError):
    """The engine cannot serve the request, whoever serves it."""


class CallFailedError(Exception):
    """The engine failed. It is not the agent's fault."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy answered."""

    call: CapturedCall
    text: str


class AgentSession:
    """What one rollout asks of the policy. Belongs to the engine's event loop.

    Parameters
    ----------
    calls:
        Makes the model calls, and keeps them.
    tokenizer:
        Who translates.
    """

    def __init__(self, calls: ModelCalls, tokenizer: Tokenizer) -> None:
        self._calls = calls
        self._tokenizer = tokenizer
        self._conversations = Conversations(tokenizer)
        self._making: set[asyncio.Task[CapturedCall]] = set()
        self._ended = False
        self.failure: BaseException | None = None
        """What the agent could do nothing about, unless a later call was made all the same: whatever it makes of it, its
        rollout has failed."""

    def chat_prompt(self, messages: Sequence[ChatMessage]) -> Prompt:
        """Return what the policy reads of a conversation.

        Raises
        ------
        ValueError
            It cannot be rendered or encoded, or is empty.
        """
        try:
            return self._checked(self._conversations.chat_prompt(messages))
        except ConfigError as error:
            self.failure = error
            raise

    def text_prompt(self, text: str) -> Prompt:
        """Return what the policy reads of a text. As :meth:`chat_prompt`."""
        try:
            return self._checked(self._conversations.text_prompt(text))
        except ConfigError as error:
            self.failure = error
            raise

    def token_prompt(self, token_ids: Sequence[int]) -> Prompt:
        """Return token ids as they are.

        Raises
        ------
        ValueError
            There are none, or the model does not have them all.
        """
        return self._checked(Prompt(token_ids, text=None, messages=None))

    async def reply(self, prompt: Prompt, *, max_new_tokens: int | None) -> Reply:
        """Make a call. Cancelling the await drops it.

        Raises
        ------
        SessionEndedError
            The rollout ended first.
        TooManyCallsError
            It has made as many calls as it may.
        PromptTooLongError
            The engine cannot serve the request.
        CallFailedError
            The engine failed.
        """
        if self._ended:
            raise SessionEndedError
        making = asyncio.create_task(self._calls.make(prompt.token_ids, max_new_tokens=max_new_tokens))
        self._making.add(making)
        try:
            await asyncio.wait({making})
        finally:
            making.cancel()
            self._making.discard(making)
        if making.cancelled():
            raise SessionEndedError
        error = making.exception()
        if isinstance(error, TooManyCallsError):
            raise error
        if isinstance(error, ValueError):
            raise PromptTooLongError(str(error)) from error
        self.failure = error
        if error is not None:
            raise CallFailedError(f"{type(error).__name__}: {error}") from error
        call = making.result()
        return Reply(call, self._conversations.add_reply(prompt, call.completion))

    async def end(self) -> None:
        """Drop the calls that are being made, and refuse all others."""
        self._ended = True
        making = set(self._making)
        for call in making:
            call.cancel()
        if making:
            await asyncio.wait(making)

    def _checked(self, prompt: Prompt) -> Prompt:
        if not prompt.token_ids:
            raise ValueError("expected something to read, found an empty prompt")
        lowest, highest = min(prompt.token_ids), max(prompt.token_ids)
        if lowest < 0 or highest >= self._tokenizer.vocabulary_size:
            raise ValueError(
                f"expected token ids in [0, {self._tokenizer.vocabulary_size}), found {lowest} to {highest}"
            )
        return prompt
