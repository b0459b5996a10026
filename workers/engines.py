"""What a generation engine is to those who call it: requests, tokens, completions, and the verbs of every engine."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kinlog.schemas.reasons import FinishReason

__all__ = [
    "GenerationRequest",
    "GeneratedTokens",
    "Completion",
    "Engine",
    "EngineClosedError",
    "check_request",
]


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


def check_request(request: GenerationRequest, *, vocabulary_size: int, max_positions: int) -> None:
    """Refuse a request that a model of this vocabulary and this many positions cannot serve.

    Raises
    ------
    ValueError
        The prompt is empty, has ids outside the vocabulary, or leaves no room for ``max_new_tokens``; or the temperature
        is not above 0.
    """
    prompt_tokens = len(request.prompt_token_ids)
    if prompt_tokens == 0 or request.max_new_tokens < 1:
        raise ValueError(
            f"expected a prompt and room for a token, found {prompt_tokens} prompt tokens "
            f"and max_new_tokens {request.max_new_tokens}"
        )
    if not request.temperature > 0:
        raise ValueError(f"expected a temperature above 0, found {request.temperature}")
    if prompt_tokens + request.max_new_tokens > max_positions:
        raise ValueError(
            f"expected at most {max_positions} positions, found {prompt_tokens} prompt tokens + "
            f"{request.max_new_tokens} max_new_tokens: raise model.max_positions or lower generation.max_new_tokens"
        )
    smallest, largest = min(request.prompt_token_ids), max(request.prompt_token_ids)
    if smallest < 0 or largest >= vocabulary_size:
        # Inside of a batch it would fail in the decode loop, and take every other request down.
        raise ValueError(f"expected token ids in [0, {vocabulary_size}), found {smallest} to {largest}")


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
    """int32, ``(L,)``: version of the weights that sampled each token. It does not decrease, unless weights were rolled
    back between two attempts that the tokens are of."""
    finish_reason: FinishReason


class GeneratedTokens:
    """The tokens of one model call so far: an engine appends to them, and others may read them at any time.

    Parameters
    ----------
    token_ids, logprobs, weight_versions:
        What an earlier attempt generated of this very call: the engine goes on after them.

    Raises
    ------
    ValueError
        The three are not of one length.
    """

    __slots__ = ("_logprobs", "_token_ids", "_weight_versions")

    def __init__(
        self,
        token_ids: Iterable[int] = (),
        logprobs: Iterable[float] = (),
        weight_versions: Iterable[int] = (),
    ) -> None:
        self._token_ids, self._logprobs = list(token_ids), list(logprobs)
        self._weight_versions = list(weight_versions)
        if not len(self._token_ids) == len(self._logprobs) == len(self._weight_versions):
            raise ValueError(
                f"expected one log-probability and one weight version a token, found {len(self._token_ids)} tokens, "
                f"{len(self._logprobs)} log-probabilities and {len(self._weight_versions)} versions"
            )

    def __len__(self) -> int:
        # What is appended last: another thread never counts half a token.
        return len(self._weight_versions)

    def __iter__(self) -> Iterator[tuple[int, float, int]]:
        """Yield token id, log-probability and weight version of each token."""
        return zip(self._token_ids, self._logprobs, self._weight_versions, strict=False)

    @property
    def token_ids(self) -> Sequence[int]:
        """Not to be changed, nor are the others."""
        return self._token_ids

    @property
    def logprobs(self) -> Sequence[float]:
        return self._logprobs

    @property
    def weight_versions(self) -> Sequence[int]:
        return self._weight_versions

    def append(self, token_id: int, logprob: float, weight_version: int) -> None:
        """Add a token: its log-probability at the sampling temperature, and the weights that sampled it."""
        self._token_ids.append(token_id)
        self._logprobs.append(logprob)
        self._weight_versions.append(weight_version)

    def part(self, start: int = 0, end: int | None = None) -> "GeneratedTokens":
        """Return a copy of the tokens from place ``start`` to before ``end``."""
        of = slice(start, len(self) if end is None else min(end, len(self)))
        return GeneratedTokens(self._token_ids[of], self._logprobs[of], self._weight_versions[of])

    def up_to_version(self, newest: int) -> "GeneratedTokens":
        """Return a copy of the tokens before the first that weights newer than ``newest`` sampled."""
        end = next((at for at, version in enumerate(self._weight_versions) if version > newest), None)
        return self.part(0, end)

    def end(self, *, eos_id: int, max_new_tokens: int) -> FinishReason | None:
        """Return how these tokens end a completion, ``None`` if they do not."""
        if self._token_ids and self._token_ids[-1] == eos_id:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self) >= max_new_tokens else None

    def completion(self, finish_reason: FinishReason) -> Completion:
        """Return them as a completion that has ended."""
        return Completion(
            token_ids=torch.tensor(self._token_ids, dtype=torch.int64),
            logprobs=torch.tensor(self._logprobs, dtype=torch.float32),
            weight_versions=torch.tensor(self._weight_versions, dtype=torch.int32),
            finish_reason=finish_reason,
        )


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

    async def generate(self, request: GenerationRequest, tokens: GeneratedTokens | None = None) -> Completion:
        """Return the completion of ``request`` as soon as it has ended. Cancelling the await drops the request.

        Parameters
        ----------
        request:
            What to complete.
        tokens:
            Where the tokens are kept as they are generated, for those who want to see them before the end. Those that
            are in it already were generated by an earlier attempt: they are part of the completion, and it goes on
            after them.

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
