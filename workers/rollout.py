"""One rollout: model calls and verdicts in turn, captured so that they linearize into one training row."""

import math
from dataclasses import dataclass

import torch

from kinlog.schemas.prompts import digest_bytes
from kinlog.schemas.reasons import FinishReason, Validity
from kinlog.schemas.settings import GenerationSettings, RolloutSettings
from kinlog.workers.engines import Completion, Engine, GenerationRequest
from kinlog.workers.environments import Environment, EnvironmentFailure, Verdict
from kinlog.workers.tasks import Item
from kinlog.workers.tokenizer import Tokenizer

__all__ = ["CapturedCall", "Rollout", "run_rollout"]


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """One model call of a rollout, as it was made."""

    call: int
    """Position among the rollout's calls, from 0."""
    parent: int
    """The call whose prompt and completion this one's prompt begins with, token by token; -1 for the first."""
    prompt_token_ids: torch.Tensor
    """int64, ``(P,)``: all that the policy read, earlier calls included."""
    completion: Completion


@dataclass(frozen=True, slots=True)
class Rollout:
    """A finished rollout of one sibling."""

    calls: tuple[CapturedCall, ...]
    raw_reward: float
    """The environment's reward."""
    shaped_reward: float
    """``raw_reward`` with shaping applied, once: what advantages are made of."""
    finish_reason: FinishReason
    """How the last call ended."""
    validity: Validity
    completion_tokens: int
    """Tokens that the policy generated, over all calls."""


async def run_rollout(
    engine: Engine,
    tokenizer: Tokenizer,
    environment: Environment,
    item: Item,
    *,
    generation: GenerationSettings,
    rollout: RolloutSettings,
    seed: int,
) -> Rollout:
    """Run one sibling to its end.

    Every call's prompt is the last one's prompt and completion, as tokens, followed by the feedback: nothing is
    decoded and encoded again, which would give other tokens than those sampled. Call seeds follow from ``seed``.

    Parameters
    ----------
    engine, tokenizer, environment:
        Who answers, who translates, who judges.
    item:
        The row of the dataset.
    generation, rollout:
        Sampling, and the shaping that is applied.
    seed:
        The sibling's seed.

    Raises
    ------
    ValueError
        The reward is not finite, or the conversation outgrew the model's positions.
    """
    calls: list[CapturedCall] = []
    prompt_token_ids = tokenizer.encode(item.prompt)
    verdict: Verdict | None = None
    while True:
        call = len(calls)
        completion = await engine.generate(
            GenerationRequest(
                prompt_token_ids=prompt_token_ids,
                max_new_tokens=generation.max_new_tokens,
                temperature=generation.temperature,
                seed=_call_seed(seed, call),
            )
        )
        calls.append(
            CapturedCall(
                call=call,
                parent=call - 1,
                prompt_token_ids=torch.tensor(prompt_token_ids, dtype=torch.int64),
                completion=completion,
            )
        )
        answer_token_ids = completion.token_ids.tolist()
        try:
            verdict = await environment.judge(item, tokenizer.decode(answer_token_ids), call=call)
        except EnvironmentFailure:
            verdict = None
            break
        if verdict.feedback is None:
            break
        prompt_token_ids = prompt_token_ids + answer_token_ids + tokenizer.encode(verdict.feedback)

    finish_reason = calls[-1].completion.finish_reason
    completion_tokens = sum(len(captured.completion.token_ids) for captured in calls)
    raw_reward = 0.0 if verdict is None else verdict.reward
    if not math.isfinite(raw_reward):
        raise ValueError(
            f"expected a finite reward, found {raw_reward} for sample {item.sample_id!r} of task {item.task_name!r}"
        )
    well_formed = verdict is not None and verdict.well_formed and finish_reason is FinishReason.STOP
    return Rollout(
        calls=tuple(calls),
        raw_reward=raw_reward,
        shaped_reward=raw_reward
        + rollout.format_reward * well_formed
        - rollout.length_penalty * completion_tokens,
        finish_reason=finish_reason,
        validity=_validity(calls, judged=verdict is not None),
        completion_tokens=completion_tokens,
    )


def _call_seed(seed: int, call: int) -> int:
    # 63 bits, mixed: neighbouring siblings' calls must not share a seed, as seed + call would make them.
    digest = digest_bytes(seed.to_bytes(16, "little", signed=True), call.to_bytes(8, "little"))
    return int.from_bytes(digest[:8], "little") >> 1


def _validity(calls: list[CapturedCall], *, judged: bool) -> Validity:
    for captured in calls:
        completion = captured.completion
        if completion.logprobs.shape != completion.token_ids.shape:
            return Validity.POISONED
        if not bool(torch.isfinite(completion.logprobs).all()):
            return Validity.POISONED
    return Validity.VALID if judged else Validity.FAILED
