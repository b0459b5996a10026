"""Receipts: what proves the content of a sealed sibling, as an ordered manifest of its model calls.

Staging keys are not stored: they follow from typed identity, by :func:`staging_key`.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from kinlog.schemas.prompts import Digest

__all__ = [
    "CALL_SUFFIXES",
    "MAX_MODEL_CALLS",
    "ModelCall",
    "Receipt",
    "canonical_key",
    "staging_key",
    "staging_keys",
]

#: Model calls whose receipt fits into one event for certain, with every count and version of up to 32 bits.
MAX_MODEL_CALLS = 96


class ModelCall(msgspec.Struct, frozen=True, array_like=True):
    """The facts of one model call of a rollout, and the digest of the row staged for it."""

    call: int
    """Position among the rollout's model calls, from 0."""
    parent: int
    """The call whose context this one extends; -1 for a root."""
    prompt_tokens: int
    """Tokens that it was given."""
    completion_tokens: int
    """Tokens that it generated."""
    min_weight_version: int
    """The oldest weights that generated one of them."""
    max_weight_version: int
    """The newest."""
    row_digest: Digest
    """Digest of the staged row, as ``kinlog.workers.rows`` defines it."""


class Receipt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The ordered manifest of a sealed sibling's model calls."""

    calls: tuple[ModelCall, ...]
    """In the order that they were made."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the root call's prompt, and 0 when there was no call."""
        return self.calls[0].prompt_tokens if self.calls else 0

    @property
    def completion_tokens(self) -> int:
        """Tokens that the policy generated, over all calls."""
        return sum(call.completion_tokens for call in self.calls)


class _CallSuffixes(dict[int, str]):
    """Made once for each number that occurs: a restart makes the keys of hundreds of thousands of rows."""

    def __missing__(self, call: int) -> str:
        suffix = self[call] = f".c{call}"
        return suffix


#: What the staging key of a model call's row has after the ``canonical_key`` of its attempt.
CALL_SUFFIXES: Final[Mapping[int, str]] = _CallSuffixes()


def canonical_key(group_id: int, generation: int, attempt: int) -> str:
    """Return the data plane's key of a sibling's trainable row. Deterministic, so publishing it is idempotent."""
    return f"g{group_id}.s{generation}.a{attempt}"


def staging_key(group_id: int, generation: int, attempt: int, call: int) -> str:
    """Return the data plane's key of one model call's row. For the data plane and for display: never parsed."""
    return staging_keys(group_id, generation, attempt, (call,))[0]


def staging_keys(group_id: int, generation: int, attempt: int, calls: Iterable[int]) -> list[str]:
    """Return the data plane's keys of the rows of an attempt's model calls."""
    attempt_key = canonical_key(group_id, generation, attempt)
    return [attempt_key + CALL_SUFFIXES[call] for call in calls]
