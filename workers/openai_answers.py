"""Answers in OpenAI's format: whole, as a stream of server-sent events, and errors."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from kinlog.workers.model_calls import CapturedCall

__all__ = ["Answer", "chat_answer", "chat_stream", "error_body", "model_list", "text_answer", "text_stream"]

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the policy replied, and what the client wants to know of it."""

    model: str
    call: CapturedCall
    reply: str
    decode: Decode
    with_logprobs: bool
    with_token_ids: bool = False
    with_usage: bool = False
    answer_id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def finish_reason(self) -> str:
        return self.call.completion.finish_reason.value

    @property
    def usage(self) -> dict[str, int]:
        read, generated = len(self.call.prompt_token_ids), len(self.call.completion.token_ids)
        return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}

    def tokens(self) -> list[tuple[str, float]]:
        """Every sampled token as text, the end token's being empty, with its log-probability."""
        completion = self.call.completion
        texts = [self.decode([token_id]) for token_id in completion.token_ids.tolist()]
        return list(zip(texts, completion.logprobs.tolist(), strict=True))


def chat_answer(answer: Answer) -> bytes:
    """Return the body of a chat's answer."""
    message = {"role": "assistant", "content": answer.reply, "refusal": None}
    choice = _choice(answer, logprobs=_chat_logprobs(answer), message=message)
    return _body(answer, "chatcmpl", "chat.completion", [choice], usage=answer.usage)


def chat_stream(answer: Answer) -> bytes:
    """Return the same as server-sent events."""
    begun = _choice(None, logprobs=None, delta={"role": "assistant", "content": ""})
    said = _choice(None, logprobs=_chat_logprobs(answer), delta={"content": answer.reply})
    ended = _choice(answer, logprobs=None, delta={})
    return _events(answer, "chatcmpl", "chat.completion.chunk", [begun, said, ended])


def text_answer(answer: Answer) -> bytes:
    """Return the body of the answer to a prompt that is no chat."""
    choice = _choice(answer, logprobs=_text_logprobs(answer), text=answer.reply, **_token_ids(answer))
    return _body(answer, "cmpl", "text_completion", [choice], usage=answer.usage)


def text_stream(answer: Answer) -> bytes:
    """Return the same as server-sent events."""
    said = _choice(None, logprobs=_text_logprobs(answer), text=answer.reply, **_token_ids(answer))
    ended = _choice(answer, logprobs=None, text="")
    return _events(answer, "cmpl", "text_completion", [said, ended])


def model_list(model: str) -> bytes:
    """Return the body that lists the one model there is."""
    entry = {"id": model, "object": "model", "created": 0, "owned_by": "kinlog"}
    return msgspec.json.encode({"object": "list", "data": [entry]})


def error_body(status: int, message: str, *, code: str | None, parameter: str | None) -> bytes:
    """Return the body of an error."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "param": parameter, "code": code}}
    )


def _choice(ended: Answer | None, *, logprobs: object, **said: object) -> dict[str, object]:
    """A choice, or a part of it; only the last part says how it ended."""
    finish_reason = ended.finish_reason if ended is not None else None
    return {"index": 0, **said, "logprobs": logprobs, "finish_reason": finish_reason}


def _chat_logprobs(answer: Answer) -> dict[str, object] | None:
    if not answer.with_logprobs:
        return None
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in answer.tokens()
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(answer: Answer) -> dict[str, object] | None:
    if not answer.with_logprobs:
        return None
    tokens, offsets = answer.tokens(), [0]
    for text, _ in tokens:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": [text for text, _ in tokens],
        "token_logprobs": [logprob for _, logprob in tokens],
        "text_offset": offsets[:-1],
        "top_logprobs": None,
    }


def _token_ids(answer: Answer) -> dict[str, object]:
    if not answer.with_token_ids:
        return {}
    return {
        "prompt_token_ids": answer.call.prompt_token_ids.tolist(),
        "token_ids": answer.call.completion.token_ids.tolist(),
    }


def _body(
    answer: Answer, prefix: str, kind: str, choices: list[dict[str, object]], *, usage: dict[str, int] | None
) -> bytes:
    return msgspec.json.encode(
        {
            "id": f"{prefix}-{answer.answer_id}",
            "object": kind,
            "created": answer.created,
            "model": answer.model,
            "choices": choices,
            "usage": usage,
        }
    )


def _events(answer: Answer, prefix: str, kind: str, parts: list[dict[str, object]]) -> bytes:
    bodies = [_body(answer, prefix, kind, [part], usage=None) for part in parts]
    if answer.with_usage:
        bodies.append(_body(answer, prefix, kind, [], usage=answer.usage))
    return b"".join(b"data: " + body + b"\n\n" for body in (*bodies, b"[DONE]"))
