"""The rows of the data plane's two partitions, their dtypes and their digests.

A row is one model call's tokens (:class:`StagedRow`) or one sibling's training example (:class:`CanonicalRow`). Its
digest covers its dtypes and every bit of its content; nothing about memory layout, and nothing about which attempt it is
of: the same example has the same digest in every attempt and every run, so that logs can be compared. Which row it is,
its key and its tag say. What the log records of a row is this digest, so it may never change for a row that some log
names: a new layout is a new domain tag.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch

from kinlog.schemas.prompts import digest_bytes
from kinlog.schemas.reasons import Partition
from kinlog.schemas.receipts import canonical_key, staging_key

__all__ = ["StagedRow", "CanonicalRow", "Row", "ROW_DTYPES", "row_digest", "MASKED_WEIGHT_VERSION"]

#: Weight version at the positions of a canonical row that the policy did not generate.
MASKED_WEIGHT_VERSION = -1

#: The one dtype of each column, for each partition. A batch takes its dtype from its first row, and the data plane
#: casts the others to it without a word (2**40 + 5 comes back as 5, 0.5 as 0): nothing outside this table is put.
#: Scalars are columns of one value a row.
ROW_DTYPES: Mapping[Partition, Mapping[str, torch.dtype]] = MappingProxyType(
    {
        Partition.STAGING: MappingProxyType(
            {
                "token_ids": torch.int64,
                "prompt_tokens": torch.int64,
                "logprobs": torch.float32,
                "weight_versions": torch.int32,
            }
        ),
        Partition.TRAINING: MappingProxyType(
            {
                "token_ids": torch.int64,
                "loss_mask": torch.bool,
                "logprobs": torch.float32,
                "weight_versions": torch.int32,
                "valid": torch.bool,
                "raw_reward": torch.float64,
                "shaped_reward": torch.float64,
                "draw_index": torch.int64,
            }
        ),
    }
)

_STAGED_DOMAIN = b"kinlog.row.staged.2"
_CANONICAL_DOMAIN = b"kinlog.row.canonical.2"


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class StagedRow:
    """The tokens of one model call, as its worker captured them.

    Parameters
    ----------
    group_id, generation, attempt, call:
        Identity: group, sibling slot, physical execution, and model call within it; all from 0.
    token_ids:
        int64, shape (P + C,): the call's prompt, then its completion.
    prompt_tokens:
        P: how many of ``token_ids`` are the prompt.
    logprobs:
        float32, shape (C,): log-probability of each completion token when it was sampled. A zero-token completion
        has shape (0,).
    weight_versions:
        int32, shape (C,): version of the weights that sampled each completion token.

    Raises
    ------
    ValueError
        When a shape, dtype, device or identity is not the above; the message names the row and the column.
    """

    partition: ClassVar[Partition] = Partition.STAGING

    group_id: int
    generation: int
    attempt: int
    call: int
    token_ids: torch.Tensor
    prompt_tokens: int
    logprobs: torch.Tensor
    weight_versions: torch.Tensor

    def __post_init__(self) -> None:
        _check_identity(
            self.key,
            group_id=self.group_id,
            generation=self.generation,
            attempt=self.attempt,
            call=self.call,
            prompt_tokens=self.prompt_tokens,
        )
        total = _check_column(self.partition, self.key, "token_ids", self.token_ids, None)
        completion = total - self.prompt_tokens
        if completion < 0:
            raise ValueError(
                f"row {self.key}: prompt_tokens is {self.prompt_tokens}, but token_ids holds only {total} tokens"
            )
        _check_column(self.partition, self.key, "logprobs", self.logprobs, completion)
        _check_column(self.partition, self.key, "weight_versions", self.weight_versions, completion)

    @property
    def key(self) -> str:
        """The row's name in the staging partition."""
        return staging_key(self.group_id, self.generation, self.attempt, self.call)

    @property
    def completion_tokens(self) -> int:
        """C: how many of ``token_ids`` the policy generated."""
        return int(self.token_ids.numel()) - self.prompt_tokens


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class CanonicalRow:
    """The training example of one sibling.

    Parameters
    ----------
    group_id, generation, attempt:
        Identity: group, sibling slot, physical execution; all from 0.
    draw_index:
        Position of the group's prompt in the run's draw order, from 0.
    token_ids:
        int64, shape (L,), L >= 1: prompt, completions and tool output, in order.
    loss_mask:
        bool, shape (L,): true where the policy generated the token at that position.
    logprobs:
        float32, shape (L,): log-probability of the token at the same position; 0 where ``loss_mask`` is false.
    weight_versions:
        int32, shape (L,): weights that generated the token at the same position; -1 where ``loss_mask`` is false.
    valid:
        Whether the row is an example. Any other keeps its sibling's place, is masked throughout, and counts neither for
        the loss nor for its group's baseline.
    raw_reward, shaped_reward:
        As the environment returned it, and after shaping. NaN and infinities are kept bit for bit.

    Raises
    ------
    ValueError
        When a shape, dtype, device or identity is not the above, or a masked position is not blank.
    """

    partition: ClassVar[Partition] = Partition.TRAINING

    group_id: int
    generation: int
    attempt: int
    draw_index: int
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    logprobs: torch.Tensor
    weight_versions: torch.Tensor
    valid: bool
    raw_reward: float
    shaped_reward: float

    def __post_init__(self) -> None:
        _check_identity(
            self.key,
            group_id=self.group_id,
            generation=self.generation,
            attempt=self.attempt,
            draw_index=self.draw_index,
        )
        length = _check_column(self.partition, self.key, "token_ids", self.token_ids, None)
        if length == 0:
            raise ValueError(f"row {self.key}: token_ids is empty; a training example has at least one token")
        for name in ("loss_mask", "logprobs", "weight_versions"):
            _check_column(self.partition, self.key, name, getattr(self, name), length)
        if not self.valid and bool(self.loss_mask.any()):
            raise ValueError(f"row {self.key}: it is not valid, and must be masked throughout")
        # A stray value under the mask would reach the loss through any reduction that multiplies by the mask (NaN
        # times zero is NaN), and would make the digest of one and the same example depend on who built it.
        blank = ~self.loss_mask
        if bool((self.logprobs[blank] != 0).any()):
            raise ValueError(f"row {self.key}: logprobs must be 0 wherever loss_mask is false")
        if bool((self.weight_versions[blank] != MASKED_WEIGHT_VERSION).any()):
            raise ValueError(
                f"row {self.key}: weight_versions must be {MASKED_WEIGHT_VERSION} wherever loss_mask is false"
            )

    @property
    def key(self) -> str:
        """The row's name in the training partition."""
        return canonical_key(self.group_id, self.generation, self.attempt)


Row = StagedRow | CanonicalRow


def row_digest(row: Row) -> bytes:
    """Return the 16-byte digest of a row's content: its columns' dtypes, and every bit of their values.

    Equal for rows that differ in memory layout only (views, strides, storage offsets). Bits count, not values: 0.0 and
    -0.0 differ, and so do two NaNs with different payloads.
    """
    if isinstance(row, StagedRow):
        return digest_bytes(
            _STAGED_DOMAIN,
            struct.pack("<q", row.prompt_tokens),
            *_column_parts("token_ids", row.token_ids),
            *_column_parts("logprobs", row.logprobs),
            *_column_parts("weight_versions", row.weight_versions),
        )
    return digest_bytes(
        _CANONICAL_DOMAIN,
        struct.pack("<q2d?", row.draw_index, row.raw_reward, row.shaped_reward, row.valid),
        *_column_parts("token_ids", row.token_ids),
        *_column_parts("loss_mask", row.loss_mask),
        *_column_parts("logprobs", row.logprobs),
        *_column_parts("weight_versions", row.weight_versions),
    )


def _column_parts(name: str, column: torch.Tensor) -> tuple[bytes, bytes]:
    array = column.detach().contiguous().numpy()
    little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return f"{name}:{column.dtype}".encode(), little_endian.tobytes()


def _check_identity(key: str, **numbers: int) -> None:
    for name, number in numbers.items():
        if type(number) is not int or number < 0:
            raise ValueError(f"row {key}: {name} must be an int of at least 0, found {number!r}")


def _check_column(partition: Partition, key: str, name: str, column: torch.Tensor, length: int | None) -> int:
    dtype = ROW_DTYPES[partition][name]
    if not isinstance(column, torch.Tensor):
        raise ValueError(f"row {key}: {name} must be a torch.Tensor, found {type(column).__name__}")
    if column.dtype != dtype:
        raise ValueError(f"row {key}: {name} must have dtype {dtype}, found {column.dtype}")
    if column.is_nested or column.layout != torch.strided or column.ndim != 1:
        raise ValueError(
            f"row {key}: {name} must be a dense tensor of one dimension, found {column.ndim} and {column.layout}"
        )
    if column.device.type != "cpu":
        # A row is digested, staged and journalled from host memory; copying it there is the worker's decision.
        raise ValueError(f"row {key}: {name} must be on the cpu, found {column.device}")
    if length is not None and column.numel() != length:
        raise ValueError(f"row {key}: {name} must have {length} values, found {column.numel()}")
    return int(column.numel())
