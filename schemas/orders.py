"""What the controller sends to its workers, and what it gets back besides seals."""

import msgspec

from kinlog.schemas.events import SiblingSealed
from kinlog.schemas.prompts import PromptRef
from kinlog.schemas.reasons import Reason

__all__ = [
    "RolloutOrder",
    "RolloutFailed",
    "FinalizeOrder",
    "FinalizeRejected",
    "TrainOrder",
    "TrainMetrics",
    "PutBack",
]


class RolloutOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a sibling, for a generation worker. The answer is the seal that it proposes, or a failure."""

    group_id: int
    generation: int
    attempt: int
    prompt: PromptRef
    seed: int
    resumable_attempts: tuple[int, ...] = ()
    """Earlier attempts, oldest first: it goes on from the newest of them that left any tokens."""
    newest_weight_version: int | None = None
    """Tokens that newer weights sampled are not gone on from. ``None``: all are."""


class RolloutFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's answer for an attempt that produced no result."""

    group_id: int
    generation: int
    attempt: int
    reason: Reason
    detail: str


class FinalizeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A group whose siblings are all sealed, for the finalizer. The answer is its canonical rows."""

    group_id: int
    prompt: PromptRef
    siblings: tuple[SiblingSealed, ...]


class FinalizeRejected(msgspec.Struct, frozen=True, kw_only=True):
    """The finalizer's answer when a sibling's staged rows are not what its receipt says."""

    group_id: int
    generation: int
    reason: Reason
    """``rows_missing`` or ``digest_mismatch``."""
    detail: str


class TrainOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step over claimed groups, in this order."""

    train_step: int
    group_ids: tuple[int, ...]
    row_keys: tuple[str, ...]
    """Keys of all canonical rows of these groups."""


class TrainMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step did."""

    train_step: int
    weight_version: int
    """Version of the weights after it."""
    loss: float
    grad_norm: float
    clip_fraction: float
    mean_raw_reward: float
    mean_shaped_reward: float
    rows: int
    mixed_rows: int
    """Rows whose tokens are of more than one version of the weights."""
    loss_tokens: int
    token_lag: float
    """Versions between the weights that sampled a token and those that were trained, mean over tokens with loss."""
    seconds: float


class PutBack(msgspec.Struct, frozen=True, kw_only=True):
    """What the row journal gave back at a restart."""

    num_rows: int = 0
    completion_tokens: int = 0
    missing: tuple[str, ...] = ()
    """Keys of the rows that no journal segment has."""
    damaged: tuple[str, ...] = ()
    """What is wrong with the segments that do not verify, and that were left alone."""
