"""Requests in OpenAI's format: what of it is understood, and by what name the rest is refused.

What would change how tokens are sampled is refused unless it says what is done anyway: log-probabilities are recorded,
and computed again in training, for plain sampling at ``generation.temperature``. What is unknown is refused as well, since
nobody can tell whether it would.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from kinlog.workers.tokenizer import ChatMessage

__all__ = ["ChatRequest", "RequestRefused", "TextRequest", "read_chat_request", "read_text_request"]

Positive = Annotated[int, Meta(ge=1)]

#: They say something about the request, and nothing about what is sampled.
_IGNORED: Final = frozenset(
    {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
)

#: Parameter -> the values that ask for nothing. ``null`` never asks for anything.
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "stop": ([], ""),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "top_p": (1,),
}

#: What a message may have and a template is not given. Assistant messages come back with these, empty.
_UNSAID: Final = frozenset({"annotations", "audio", "function_call", "refusal", "tool_calls"})

_AT = re.compile(r" - at `\$\.?(?P<path>.*)`$")

R = TypeVar("R", bound="_Request")


class RequestRefused(Exception):
    """The request is answered with an error.

    Parameters
    ----------
    status:
        Of HTTP.
    message:
        What was expected, what was found, and what to do.
    code:
        For programs.
    parameter:
        What of the request is at fault.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, parameter: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.parameter = parameter


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is streamed besides the reply."""

    include_usage: bool = False


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    max_tokens: Positive | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def max_new_tokens(self) -> int | None:
        """Limit on the completion; ``None`` leaves it to the configuration."""
        return self.max_tokens

    @property
    def streams_usage(self) -> bool:
        """Whether the stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class _TextPart(msgspec.Struct, frozen=True):
    type: Literal["text"]
    text: str


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None

    def as_said(self) -> ChatMessage:
        parts = [] if self.content is None else self.content
        content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return ChatMessage(self.role, content, self.name, self.tool_call_id)


class ChatRequest(_Request, frozen=True, kw_only=True):
    """What is asked of ``/v1/chat/completions``."""

    messages: Annotated[list[_Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None

    @property
    def max_new_tokens(self) -> int | None:
        """The newer name of the limit, and the older one: the lower of them."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)

    @property
    def conversation(self) -> list[ChatMessage]:
        """The messages, as the policy is to read them."""
        return [message.as_said() for message in self.messages]


class TextRequest(_Request, frozen=True, kw_only=True):
    """What is asked of ``/v1/completions``."""

    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None
    """0: of the tokens that were sampled. Those of others are not known."""
    return_token_ids: bool | None = None
    """For agents that speak in tokens: the answer has those of the prompt and of the completion."""

    def only_prompt(self) -> str | list[int]:
        """Return the prompt, as a text or as token ids.

        Raises
        ------
        RequestRefused
            There are several.
        """
        if isinstance(self.prompt, str):
            return self.prompt
        token_ids = [part for part in self.prompt if isinstance(part, int)]
        if len(token_ids) == len(self.prompt):
            return token_ids
        first = self.prompt[0]
        if len(self.prompt) != 1 or isinstance(first, int):
            raise RequestRefused(
                400,
                f"expected one prompt, found {len(self.prompt)}: send a request for each",
                parameter="prompt",
            )
        return first


def read_chat_request(body: bytes, *, temperature: float) -> ChatRequest:
    """Return what ``body`` asks of a chat.

    Parameters
    ----------
    body:
        JSON.
    temperature:
        The one that is sampled at.

    Raises
    ------
    RequestRefused
        It is malformed, or asks for what is not supported. The message names the parameter.
    """
    fields = _fields(body)
    messages = fields.get("messages")
    for place, message in enumerate(messages if isinstance(messages, list) else []):
        known = {*_Message.__struct_fields__}
        for name, value in message.items() if isinstance(message, dict) else ():
            if name not in known and not (name in _UNSAID and not value):
                raise _unsupported(f"messages[{place}].{name}", "the policy would not read it")
    return _read(fields, ChatRequest, temperature)


def read_text_request(body: bytes, *, temperature: float) -> TextRequest:
    """Return what ``body`` asks of a text to complete. As :func:`read_chat_request`."""
    return _read(_fields(body), TextRequest, temperature)


def _fields(body: bytes) -> dict[str, object]:
    try:
        return msgspec.json.decode(body, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise RequestRefused(400, f"expected a JSON object: {error}") from error


def _read(fields: Mapping[str, object], kind: type[R], temperature: float) -> R:
    for name, value in fields.items():
        if value is None or name in _IGNORED or name in kind.__struct_fields__:
            continue
        if name == "temperature":
            if value != temperature:
                raise _unsupported(
                    name, f"expected generation.temperature, {temperature:g}, or nothing, found {value!r}"
                )
        elif value not in _NEUTRAL.get(name, ()):
            expected = " or ".join([*map(repr, _NEUTRAL.get(name, ())), "nothing"])
            raise _unsupported(name, f"expected {expected}, found {str(value)[:80]!r}")
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        at = _AT.search(str(error))
        raise RequestRefused(400, str(error), parameter=at["path"] if at else None) from error


def _unsupported(name: str, why: str) -> RequestRefused:
    return RequestRefused(
        400, f"{name} is not supported: {why}", code="unsupported_parameter", parameter=name
    )
