"""From what an agent says to the tokens that the policy reads: what was sampled before is never encoded again.

An agent repeats the whole conversation at each call, as text. The tokens of a text are not those that were sampled: a
tokenizer encodes ``12`` as one token that a policy had sampled as two. So a rollout's calls are remembered with their
tokens, and a conversation that goes on from one of them begins with these.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kinlog.workers.engines import Completion
from kinlog.workers.tokenizer import ChatMessage, Tokenizer

__all__ = ["Conversations", "Prompt"]

_ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the policy is to read in one call."""

    token_ids: Sequence[int]
    text: str | None
    """What they stand for, as the agent said it; ``None`` for an agent that speaks in tokens."""
    messages: tuple[ChatMessage, ...] | None
    """The conversation; ``None`` for a prompt that is no chat."""


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A prompt and the reply to it: what a later prompt may begin with."""

    asked: str
    token_ids: Sequence[int]
    text: str
    messages: tuple[ChatMessage, ...] | None


class Conversations:
    """The conversations of one rollout. They may branch, and be under way side by side.

    Parameters
    ----------
    tokenizer:
        Who translates.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._exchanges: list[_Exchange] = []

    def chat_prompt(self, messages: Sequence[ChatMessage]) -> Prompt:
        """Return what the policy reads of a conversation.

        It goes on from the longest earlier conversation that it repeats, reply included, message by message, unless
        the chat template now writes that one differently: the policy then reads another history than it had, and the
        call begins anew.

        Raises
        ------
        ConfigError
            The tokenizer has no chat template, or no token for what is said.
        ValueError
            The template does not take these messages.
        """
        said = tuple(messages)
        text = self._tokenizer.render_chat(said)
        repeated = [
            exchange
            for exchange in self._exchanges
            if exchange.messages is not None and exchange.messages == said[: len(exchange.messages)]
        ]
        return Prompt(self._token_ids(text, repeated), text, said)

    def text_prompt(self, text: str) -> Prompt:
        """Return what the policy reads of a text. It goes on from the longest earlier one that it begins with.

        Raises
        ------
        ConfigError
            The tokenizer has no token for some of it.
        """
        texts = [
            exchange
            for exchange in self._exchanges
            # What is asked again goes on from no reply to it, not even from an empty one.
            if exchange.messages is None and exchange.asked != text
        ]
        return Prompt(self._token_ids(text, texts), text, None)

    def add_reply(self, prompt: Prompt, completion: Completion) -> str:
        """Remember what the policy replied, and return it as text."""
        token_ids = completion.token_ids.tolist()
        reply = self._tokenizer.decode(token_ids)
        if prompt.text is not None:
            messages = prompt.messages
            self._exchanges.append(
                _Exchange(
                    asked=prompt.text,
                    token_ids=(*prompt.token_ids, *token_ids),
                    text=prompt.text + reply,
                    messages=None if messages is None else (*messages, ChatMessage(_ASSISTANT, reply)),
                )
            )
        return reply

    def _token_ids(self, text: str, earlier: Sequence[_Exchange]) -> list[int]:
        continued: _Exchange | None = None
        for exchange in earlier:
            # Of several that are as long, the last: a call that is made again takes the place of the first try.
            if text.startswith(exchange.text) and (
                continued is None or len(exchange.text) >= len(continued.text)
            ):
                continued = exchange
        if continued is None:
            return self._tokenizer.encode(text)
        rest = text[len(continued.text) :]
        if continued.token_ids[-1] == self._tokenizer.eos_id:
            # The policy has ended its reply itself; the template writes an end after every reply.
            rest = rest.removeprefix(self._tokenizer.eos_text)
        return [*continued.token_ids, *self._tokenizer.encode(rest)]
