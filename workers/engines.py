"""What a generation engine is to those who call it: requests, completions, and the verbs of every engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kinlog.schemas.reasons import FinishReason

__all__ = ["GenerationRequest", "Completion", "Engine", "EngineClosedError"]


class EngineClosedError(RuntimeError):
    """The engine was closed before it answered. Send the request to another one."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One model call."""

    prompt_token_ids: Sequence[int]
    max_new_tokens: int
    """Limit on the completion, its end token included."""
    temperature: float
    seed: int
    """The request's own: the sampled tokens follow from weights, prompt and seed, not from its neighbours."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What the policy generated in one model call.

    The end token is part of the completion when it was sampled, since its probability is the policy's choice and is
    trained on: the shortest answer, ``finish_reason`` ``stop`` at once, is one token whose text is empty.
    """

    token_ids: torch.Tensor
    """int64, ``(L,)``."""
    logprobs: torch.Tensor
    """float32, ``(L,)``: natural log-probability of each token at the sampling temperature, under the weights that
    sampled it."""
    weight_versions: torch.Tensor
    """int32, ``(L,)``: version of the weights that sampled each token; not decreasing."""
    finish_reason: FinishReason


class Engine(Protocol):
    """A generation engine. Its methods belong to one event loop."""

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine: every further call raises it. ``None`` while it works."""
        ...

    async def generate(self, request: GenerationRequest) -> Completion:
        """Return the completion of ``request`` as soon as it has ended. Cancelling the await drops the request.

        Raises
        ------
        ValueError
            The request cannot be served by this model, whoever serves it.
        EngineClosedError
            The engine was closed first.
        """
        ...

    async def update_weights(self, state_dict: Mapping[str, torch.Tensor], version: int) -> None:
        """Take ``state_dict`` (parameters by name) as the weights of ``version``, between two tokens.

        Requests under way go on with the new weights; their earlier tokens keep the older version.
        """
        ...

    async def close(self) -> None:
        """Fail what is pending with :class:`EngineClosedError`, and free the engine's resources."""
        ...
