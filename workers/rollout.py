"""One rollout: model calls and verdicts in turn, captured so that they linearize into one training row."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kinlog.schemas.reasons import FinishReason, Validity
from kinlog.schemas.settings import RolloutSettings
from kinlog.workers.environments import (
    Environment,
    EnvironmentFailure,
    Episode,
    ResumableEpisode,
    StateNotUsableError,
    Verdict,
)
from kinlog.workers.model_calls import CapturedCall, EarlierCall, ModelCalls, Turn, prompt_digest
from kinlog.workers.tasks import Item
from kinlog.workers.tokenizer import Tokenizer

__all__ = ["Rollout", "ended_rollout", "run_rollout"]

_logger = logging.getLogger(__name__)


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
    resumed_tokens: int
    """How many of them an earlier attempt had generated."""


async def run_rollout(
    calls: ModelCalls,
    tokenizer: Tokenizer,
    environment: Environment,
    item: Item,
    *,
    settings: RolloutSettings,
) -> Rollout:
    """Run one sibling to its end.

    Every call's prompt is the last one's prompt and completion, as tokens, followed by the feedback: nothing is
    decoded and encoded again, which would give other tokens than those sampled.

    What an earlier attempt was judged for is taken over, if the environment can be put where it was then.

    Parameters
    ----------
    calls:
        Makes the model calls.
    tokenizer, environment:
        Who translates, who judges.
    item:
        The row of the dataset.
    settings:
        The shaping that is applied, and the limit of what an environment's state may take.

    Raises
    ------
    ValueError
        The reward is not finite, or the conversation outgrew the model's positions.
    """
    episode = environment.begin(item)
    prompt_token_ids = tokenizer.encode(item.prompt)
    turns = _turns_to_take_over(calls.earlier, tokenizer, prompt_token_ids)
    verdict: Verdict | None = None
    if turns:
        restored = _restored(episode, turns[-1][1])
        # One that could not be restored may have been left half way.
        episode, turns = (episode, turns) if restored else (environment.begin(item), [])
    for prompt_token_ids, earlier in turns:
        calls.take_over(prompt_token_ids, earlier)
        verdict = earlier.turn.verdict if earlier.turn is not None else None
    while True:
        if verdict is not None:
            if verdict.feedback is None:
                break
            answered = calls.captured[-1].completion.token_ids.tolist()
            prompt_token_ids = prompt_token_ids + answered + tokenizer.encode(verdict.feedback)
        captured = await calls.make(prompt_token_ids)
        answer = tokenizer.decode(captured.completion.token_ids.tolist())
        try:
            verdict = await episode.judge(answer, call=captured.call)
        except EnvironmentFailure:
            verdict = None
            break
        turn = _turn_of(episode, verdict, item, limit=settings.max_state_bytes)
        if turn is not None:
            calls.end_turn(turn)
    return ended_rollout(calls, verdict, item, settings=settings)


def ended_rollout(
    calls: ModelCalls, verdict: Verdict | None, item: Item, *, settings: RolloutSettings
) -> Rollout:
    """Return what a rollout came to. ``verdict`` is ``None`` when nobody could judge it.

    Raises
    ------
    ValueError
        The reward is not finite, or no model call was made.
    """
    captured = calls.captured
    if not captured:
        raise ValueError(f"the agent of sample {item.sample_id!r} ended without a model call")
    finish_reason = captured[-1].completion.finish_reason
    completion_tokens = sum(len(call.completion.token_ids) for call in captured)
    raw_reward = 0.0 if verdict is None else verdict.reward
    if not math.isfinite(raw_reward):
        raise ValueError(
            f"expected a finite reward, found {raw_reward} for sample {item.sample_id!r} of task {item.task_name!r}"
        )
    well_formed = verdict is not None and verdict.well_formed and finish_reason is FinishReason.STOP
    return Rollout(
        calls=tuple(captured),
        raw_reward=raw_reward,
        shaped_reward=raw_reward
        + settings.format_reward * well_formed
        - settings.length_penalty * completion_tokens,
        finish_reason=finish_reason,
        validity=_validity(captured, judged=verdict is not None),
        completion_tokens=completion_tokens,
        resumed_tokens=calls.resumed_tokens,
    )


def _turns_to_take_over(
    earlier_calls: Sequence[EarlierCall], tokenizer: Tokenizer, prompt_token_ids: list[int]
) -> list[tuple[list[int], EarlierCall]]:
    """Return the judged calls that the conversation begins with again, each with its prompt."""
    turns: list[tuple[list[int], EarlierCall]] = []
    for earlier in earlier_calls:
        turn = earlier.turn
        if (
            turn is None
            or earlier.finish_reason is None
            or earlier.prompt_digest != prompt_digest(prompt_token_ids)
        ):
            break
        turns.append((prompt_token_ids, earlier))
        if turn.verdict.feedback is None:
            break
        answered = list(earlier.tokens.token_ids)
        prompt_token_ids = prompt_token_ids + answered + tokenizer.encode(turn.verdict.feedback)
    return turns


def _restored(episode: Episode, earlier: EarlierCall) -> bool:
    """Put the episode where it was after that call. False when it cannot be."""
    if not isinstance(episode, ResumableEpisode) or earlier.turn is None:
        return False
    try:
        episode.restore_state(earlier.turn.state, earlier.turn.state_version)
    except StateNotUsableError as error:
        _logger.warning("the rollout is begun anew: %s", error)
        return False
    except Exception:
        # It is no fault of the tokens: the sibling is not to pay for it with its budget, nor with another seed.
        _logger.exception("the rollout is begun anew: the environment could not be put where it was")
        return False
    return True


def _turn_of(episode: Episode, verdict: Verdict, item: Item, *, limit: int) -> Turn | None:
    """Return what another attempt can go on from. ``None`` when the environment cannot say, or nobody could write it."""
    if not isinstance(episode, ResumableEpisode):
        return None
    try:
        state, version = episode.save_state(), episode.state_version
        problem = _problem_of(state, version, verdict, limit=limit)
    except Exception:
        _logger.exception(
            "this turn cannot be resumed: no state of the environment of sample %r", item.sample_id
        )
        return None
    if problem:
        _logger.warning(
            "this turn cannot be resumed: the environment of sample %r gave %s", item.sample_id, problem
        )
        return None
    kept = Verdict(float(verdict.reward), bool(verdict.well_formed), verdict.feedback)
    return Turn(kept, state, version)


def _problem_of(state: object, version: object, verdict: Verdict, *, limit: int) -> str:
    if not isinstance(state, bytes):
        return f"a state of type {type(state).__name__}, and not bytes"
    if len(state) > limit:
        return f"a state of {len(state)} bytes, more than rollout.max_state_bytes ({limit})"
    if not isinstance(version, int) or not 0 <= version < 2**31:
        return f"the state version {version!r}, and not a number from 0 to 2**31 - 1"
    try:
        float(verdict.reward)
        (verdict.feedback or "").encode()
    except (TypeError, ValueError) as error:
        return f"a verdict that cannot be written down: {error}"
    return ""


def _validity(captured: Sequence[CapturedCall], *, judged: bool) -> Validity:
    for call in captured:
        completion = call.completion
        if completion.logprobs.shape != completion.token_ids.shape:
            return Validity.POISONED
        if not bool(torch.isfinite(completion.logprobs).all()):
            return Validity.POISONED
    return Validity.VALID if judged else Validity.FAILED
