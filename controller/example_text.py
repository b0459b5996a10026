"""The text of what a step was trained on, as far as it is at hand, for people and as JSON."""

import json
from collections.abc import Callable, Sequence

import msgspec

from kinlog.controller.token_text import prompt_lookup, token_decoder
from kinlog.lineage.run_directory import RunDirectory
from kinlog.replay.examples.rows import tokens_of_step
from kinlog.replay.examples.steps import StepExamples
from kinlog.schemas.config import load_config

__all__ = ["ExampleText", "render_text", "text_of_step"]


class CallText(msgspec.Struct, frozen=True, kw_only=True):
    """One model call: its text, or its token ids where nothing can decode them."""

    call: int
    prompt: str | tuple[int, ...]
    completion: str | tuple[int, ...]


class ExampleText(msgspec.Struct, frozen=True, kw_only=True):
    """One sibling."""

    group_id: int
    generation: int
    attempt: int
    prompt: str | None
    """The dataset's text, where the tokens are not at hand and the dataset is; ``None`` otherwise."""
    calls: tuple[CallText, ...]
    """None, where the tokens are not at hand."""


def text_of_step(run: RunDirectory, step: StepExamples) -> tuple[ExampleText, ...]:
    """Return the text of each sibling of a step, as far as the row journal or the dataset has it."""
    config = load_config(run.config) if run.config.is_file() else None
    decode = token_decoder(config) if config is not None else None
    tokens = {(t.group_id, t.generation): t for t in tokens_of_step(run, step)}
    siblings = [(group, sibling) for group in step.groups for sibling in group.siblings]
    look_up = (
        prompt_lookup(config) if config is not None and len(tokens) < len(siblings) else lambda prompt: None
    )
    texts = []
    for group, sibling in siblings:
        found = tokens.get((group.group_id, sibling.generation))
        texts.append(
            ExampleText(
                group_id=group.group_id,
                generation=sibling.generation,
                attempt=sibling.attempt,
                prompt=look_up(group.prompt) if found is None else None,
                calls=tuple(
                    CallText(
                        call=call.call,
                        prompt=_decoded(call.prompt_token_ids, decode),
                        completion=_decoded(call.completion_token_ids, decode),
                    )
                    for call in (found.calls if found is not None else ())
                ),
            )
        )
    return tuple(texts)


def _decoded(
    token_ids: tuple[int, ...], decode: Callable[[Sequence[int]], str] | None
) -> str | tuple[int, ...]:
    return token_ids if decode is None else decode(token_ids)


def render_text(texts: Sequence[ExampleText]) -> str:
    """Return the texts, quoted so that every character can be seen, and why some are not there."""
    lines = ["text"]
    for text in texts:
        name = f"  {text.group_id}/{text.generation}"
        if not text.calls:
            prompt = "" if text.prompt is None else f"prompt {_quoted(text.prompt)}; "
            lines.append(f"{name}  {prompt}its tokens are not at hand")
        for call in text.calls:
            lines.append(f"{name}  {_quoted(call.prompt)} -> {_quoted(call.completion)}")
    if not all(text.calls for text in texts):
        lines += [
            "",
            "  The log has no tokens. They are in the run's row journal from when they are generated until a trainer",
            "  checkpoint covers their step, and only if row_journal is enabled. Prompts are looked up in the dataset, where",
            '  it is installed: pip install "kinlog[train]".',
        ]
    if any(isinstance(call.completion, tuple) for text in texts for call in text.calls):
        lines += ["", "  Shown as token ids: the run's tokenizer is not at hand."]
    return "\n".join(lines)


def _quoted(text: str | tuple[int, ...]) -> str:
    return json.dumps(text, ensure_ascii=False)
