"""GRPO as pure functions: training rows, group-normalised advantages, and the clipped policy loss."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["TrainingRow", "PolicyLoss", "group_advantages", "policy_loss"]


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One sibling, linearized: its calls' tokens in one sequence, of which the policy's own carry loss.

    Raises
    ------
    ValueError
        Lengths or dtypes do not agree, or the first token carries loss although nothing predicts it.
    """

    group_id: int
    generation: int
    token_ids: torch.Tensor
    """int64, ``(L,)``: prompt, completion, feedback, completion, ..."""
    loss_mask: torch.Tensor
    """bool, ``(L,)``: true for tokens that the policy generated."""
    logprobs: torch.Tensor
    """float32, ``(L,)``: captured log-probability of token ``i`` given those before it; unused where the mask is
    false."""
    weight_versions: torch.Tensor
    """int32, ``(L,)``: weights that sampled token ``i``; unused where the mask is false. A rollout that was under way
    when weights were published, or that went on from an earlier attempt's tokens, is of several."""
    reward: float
    """Shaped reward."""

    def __post_init__(self) -> None:
        expected = (
            ("token_ids", torch.int64),
            ("loss_mask", torch.bool),
            ("logprobs", torch.float32),
            ("weight_versions", torch.int32),
        )
        for name, dtype in expected:
            tensor: torch.Tensor = getattr(self, name)
            if tensor.dtype is not dtype or tensor.shape != (len(self.token_ids),):
                raise ValueError(
                    f"group {self.group_id} generation {self.generation}: {name}: expected {dtype} of shape "
                    f"({len(self.token_ids)},), found {tensor.dtype} of shape {tuple(tensor.shape)}"
                )
        if len(self.loss_mask) > 0 and bool(self.loss_mask[0]):
            raise ValueError(
                f"group {self.group_id} generation {self.generation}: the first token carries loss, "
                "but nothing predicts it: expected a prompt before it"
            )

    @property
    def sampled_by(self) -> torch.Tensor:
        """int32, ``(T,)``: weights that sampled each of the tokens that carry loss."""
        return self.weight_versions[self.loss_mask]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A differentiable loss, and what it was made of."""

    loss: torch.Tensor
    """float32, ``()``: mean over tokens that carry loss; exactly 0 when there are none."""
    clip_fraction: float
    """Share of those tokens whose gradient the clip removed."""
    approx_kl: float
    """Mean of ``ratio - 1 - log(ratio)``: how far the policy is from the one that sampled. Not part of the loss."""


def group_advantages(
    rewards: torch.Tensor, group_ids: Sequence[int] | torch.Tensor, *, epsilon: float = 1e-6
) -> torch.Tensor:
    """Return ``(reward - mean of its group) / standard deviation of its group``, by group id, never by position.

    GRPO's outcome advantage (arXiv 2402.03300, section 4.1.2), with the population's standard deviation.

    Parameters
    ----------
    rewards:
        float, ``(R,)``.
    group_ids:
        R integers; equal ones are siblings, wherever they stand.
    epsilon:
        Added to the standard deviation. A group whose rewards deviate less than this teaches nothing: advantages 0.

    Returns
    -------
    advantages:
        float32, ``(R,)``; 0 throughout in groups of one, and in groups whose rewards are all equal.

    Raises
    ------
    ValueError
        The lengths differ, or a reward is not finite: its whole group's advantages would be NaN.
    """
    ids = torch.as_tensor(group_ids, dtype=torch.int64)
    if rewards.dim() != 1 or ids.shape != rewards.shape:
        raise ValueError(
            f"expected one group id a reward, found {tuple(rewards.shape)} rewards and {tuple(ids.shape)} group ids"
        )
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError("expected finite rewards, found NaN or infinity")
    values = rewards.double()
    _, group_index, sizes = torch.unique(ids, return_inverse=True, return_counts=True)
    zeros = torch.zeros(len(sizes), dtype=torch.float64)
    centred = values - (zeros.index_add(0, group_index, values) / sizes)[group_index]
    deviation = (zeros.index_add(0, group_index, centred**2) / sizes).sqrt()[group_index]
    advantages: torch.Tensor = centred / (deviation + epsilon)
    return advantages.masked_fill(deviation < epsilon, 0.0).float()


def policy_loss(
    logprobs: torch.Tensor,
    captured_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> PolicyLoss:
    """Return the clipped surrogate loss against the log-probabilities captured when the tokens were sampled.

    ``-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)`` of GRPO (arXiv 2402.03300, equation 3, without the KL
    term), with DAPO's separate upper clip and mean over tokens instead of sequences (arXiv 2503.14476, equations
    10 and 12).

    Parameters
    ----------
    logprobs:
        float32, ``(R, T)``: of the policy being trained; the loss is differentiable in it.
    captured_logprobs:
        float32, ``(R, T)``: at sampling time.
    advantages:
        float32, ``(R,)``.
    loss_mask:
        bool, ``(R, T)``: tokens outside it count for nothing, whatever their values.
    clip_ratio_low, clip_ratio_high:
        The ratio is clipped to ``[1 - low, 1 + high]``.

    Raises
    ------
    ValueError
        The shapes do not agree.
    """
    if not logprobs.shape == captured_logprobs.shape == loss_mask.shape or len(advantages) != len(logprobs):
        raise ValueError(
            f"expected equal shapes and one advantage a row, found {tuple(logprobs.shape)} logprobs, "
            f"{tuple(captured_logprobs.shape)} captured, {tuple(loss_mask.shape)} mask, {tuple(advantages.shape)} "
            "advantages"
        )
    # Masked before exp: a huge difference in padding would overflow, and infinity times zero is NaN.
    log_ratio = (logprobs - captured_logprobs).masked_fill(~loss_mask, 0.0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    weights = advantages.unsqueeze(1)
    surrogate = torch.minimum(ratio * weights, clipped * weights)
    tokens = int(loss_mask.sum())
    loss = -surrogate.masked_fill(~loss_mask, 0.0).sum() / max(tokens, 1)
    with torch.no_grad():
        removed = (clipped * weights < ratio * weights) & loss_mask
        kl = (ratio - 1.0 - log_ratio).masked_fill(~loss_mask, 0.0).sum()
    return PolicyLoss(
        loss=loss,
        clip_fraction=float(removed.sum()) / max(tokens, 1),
        approx_kl=float(kl) / max(tokens, 1),
    )
