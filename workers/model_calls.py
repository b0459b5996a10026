"""The model calls of one sibling: each numbered, seeded and captured as it is made, whoever makes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kinlog.schemas.prompts import digest_bytes
from kinlog.schemas.reasons import FinishReason
from kinlog.schemas.receipts import MAX_MODEL_CALLS
from kinlog.schemas.settings import GenerationSettings
from kinlog.workers.engines import Completion, Engine, GeneratedTokens, GenerationRequest
from kinlog.workers.environments import Verdict

__all__ = [
    "CallProgress",
    "CapturedCall",
    "EarlierCall",
    "ModelCalls",
    "TooManyCallsError",
    "Turn",
    "prompt_digest",
]

_PROMPT_DOMAIN = b"kinlog.prompt.1"


class TooManyCallsError(ValueError):
    """A rollout made more model calls than one event can hold the receipt of."""


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """One model call of a rollout, as it was made."""

    call: int
    """Position among the rollout's calls, from 0, in the order in which they ended."""
    parent: int
    """The call whose prompt and completion this one's prompt begins with, token by token; -1 when there is none."""
    prompt_token_ids: torch.Tensor
    """int64, ``(P,)``: all that the policy read, earlier calls included."""
    completion: Completion


@dataclass(frozen=True, slots=True)
class Turn:
    """What the environment said after a model call, and where it stood then."""

    verdict: Verdict
    state: bytes
    """The environment's own; see :class:`kinlog.workers.environments.ResumableEpisode`."""
    state_version: int


@dataclass(frozen=True, slots=True)
class EarlierCall:
    """A model call of an earlier attempt of the sibling, as far as it got."""

    prompt_digest: bytes
    """Of the prompt's token ids: these tokens are used again after the very same prompt only."""
    tokens: GeneratedTokens
    finish_reason: FinishReason | None
    """``None``: it had not ended."""
    turn: Turn | None
    """``None``: it had not been judged, or the environment cannot give its state."""


class CallProgress(Protocol):
    """Who is told of model calls while they are made, to keep their tokens for another attempt."""

    def begin_call(self, call: int, prompt_digest: bytes, tokens: GeneratedTokens) -> None:
        """A call is about to be made. ``tokens`` grows while it is."""
        ...

    def end_call(self, call: int, finish_reason: FinishReason) -> None:
        """It has ended: its tokens are complete."""
        ...

    def end_turn(self, call: int, turn: Turn) -> None:
        """It has been judged."""
        ...


def prompt_digest(prompt_token_ids: Sequence[int]) -> bytes:
    """Return the digest of a prompt's token ids."""
    return digest_bytes(_PROMPT_DOMAIN, torch.tensor(prompt_token_ids, dtype=torch.int64).numpy().tobytes())


class ModelCalls:
    """Makes a sibling's model calls, and keeps what they were.

    Calls may be made side by side. Each call's seed follows from the sibling's and from how many were begun before.

    Parameters
    ----------
    engine:
        Who answers.
    settings:
        Sampling.
    seed:
        The sibling's seed.
    progress:
        Who is told of what is generated. For a rollout that makes its calls one after the other.
    earlier:
        The calls of an earlier attempt that are to be used again, in order.
    """

    def __init__(
        self,
        engine: Engine,
        settings: GenerationSettings,
        *,
        seed: int,
        progress: CallProgress | None = None,
        earlier: Sequence[EarlierCall] = (),
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._seed = seed
        self._progress = progress
        self._begun = 0
        self.earlier = tuple(earlier)
        """What is left to be used again stands at the place of the next call."""
        self.captured: list[CapturedCall] = []
        """In the order in which they ended."""
        self.resumed_tokens = 0
        """Tokens of these calls that an earlier attempt had generated."""

    async def make(
        self, prompt_token_ids: Sequence[int], *, max_new_tokens: int | None = None
    ) -> CapturedCall:
        """Make the next call. It begins with what the earlier attempt generated after the same prompt, if anything.

        Parameters
        ----------
        prompt_token_ids:
            All that the policy is to read.
        max_new_tokens:
            Less than the settings' limit, when the agent asks for less.

        Raises
        ------
        ValueError
            The engine cannot serve the request.
        TooManyCallsError
            The rollout has made as many calls as it may.
        """
        limit = self._settings.max_new_tokens
        limit = limit if max_new_tokens is None else min(limit, max_new_tokens)
        call = self._begin()
        digest = prompt_digest(prompt_token_ids)
        tokens = self._generated_before(call, digest).part(0, limit)
        self.resumed_tokens += len(tokens)
        if self._progress is not None:
            self._progress.begin_call(call, digest, tokens)
        completion = await self._engine.generate(
            GenerationRequest(
                prompt_token_ids=prompt_token_ids,
                max_new_tokens=limit,
                temperature=self._settings.temperature,
                seed=_call_seed(self._seed, call),
            ),
            tokens,
        )
        if self._progress is not None:
            self._progress.end_call(call, completion.finish_reason)
        return self._capture(prompt_token_ids, completion)

    def take_over(self, prompt_token_ids: Sequence[int], earlier: EarlierCall) -> CapturedCall:
        """Let a call of the earlier attempt that has ended, and been judged, count as made."""
        assert earlier.finish_reason is not None
        assert earlier.turn is not None
        call = self._begin()
        self.resumed_tokens += len(earlier.tokens)
        if self._progress is not None:
            self._progress.begin_call(call, earlier.prompt_digest, earlier.tokens)
            self._progress.end_call(call, earlier.finish_reason)
            self._progress.end_turn(call, earlier.turn)
        return self._capture(prompt_token_ids, earlier.tokens.completion(earlier.finish_reason))

    def end_turn(self, turn: Turn) -> None:
        """Say that the last call was judged."""
        if self._progress is not None:
            self._progress.end_turn(self.captured[-1].call, turn)

    def _begin(self) -> int:
        if self._begun >= MAX_MODEL_CALLS:
            raise TooManyCallsError(
                f"expected at most {MAX_MODEL_CALLS} model calls in one rollout, found one more: end the episode sooner"
            )
        self._begun += 1
        return self._begun - 1

    def _generated_before(self, call: int, digest: bytes) -> GeneratedTokens:
        if call >= len(self.earlier):
            return GeneratedTokens()
        earlier = self.earlier[call]
        if earlier.prompt_digest != digest:
            # The conversation went another way this time: nothing after this is the same either.
            self.earlier = self.earlier[:call]
            return GeneratedTokens()
        return earlier.tokens

    def _capture(self, prompt_token_ids: Sequence[int], completion: Completion) -> CapturedCall:
        prompt = torch.tensor(prompt_token_ids, dtype=torch.int64)
        captured = CapturedCall(len(self.captured), self._parent_of(prompt), prompt, completion)
        self.captured.append(captured)
        return captured

    def _parent_of(self, prompt: torch.Tensor) -> int:
        """Return the call that the prompt continues: of several, the longest, and of those the last."""
        parent, longest = -1, 0
        for captured in self.captured:
            read = len(captured.prompt_token_ids)
            length = read + len(captured.completion.token_ids)
            if (
                max(longest, 1) <= length <= len(prompt)
                and torch.equal(prompt[:read], captured.prompt_token_ids)
                and torch.equal(prompt[read:length], captured.completion.token_ids)
            ):
                parent, longest = captured.call, length
        return parent


def _call_seed(seed: int, call: int) -> int:
    # 63 bits, mixed: neighbouring siblings' calls must not share a seed, as seed + call would make them.
    digest = digest_bytes(seed.to_bytes(16, "little", signed=True), call.to_bytes(8, "little"))
    return int.from_bytes(digest[:8], "little") >> 1
