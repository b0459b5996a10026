import dataclasses
import math

import pytest
import torch

from kinlog.workers.grpo import group_advantages, policy_loss

pytest_plugins = ["kinlog_policy_fixtures"]

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}


def loss_of(ratios, advantages, mask=None):
    ratios = torch.tensor(ratios)
    logprobs = ratios.log().requires_grad_()
    mask = torch.ones_like(ratios, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return logprobs, policy_loss(logprobs, torch.zeros_like(ratios), torch.tensor(advantages), mask, **CLIP)


def test_advantages_are_normalised_within_each_group():
    advantages = group_advantages(torch.tensor([1.0, 0.0, 5.0, 9.0]), [7, 7, 3, 3])
    torch.testing.assert_close(advantages, torch.tensor([1.0, -1.0, -1.0, 1.0]))


def test_advantages_follow_the_group_id_wherever_siblings_stand():
    rewards, group_ids = torch.tensor([1.0, 5.0, 0.0, 9.0, 2.0]), torch.tensor([7, 3, 7, 3, 7])
    order = torch.tensor([4, 2, 0, 3, 1])
    torch.testing.assert_close(
        group_advantages(rewards, group_ids)[order], group_advantages(rewards[order], group_ids[order])
    )


def test_group_of_one_and_group_of_equals_teach_nothing():
    advantages = group_advantages(torch.tensor([0.3, 0.1, 0.1, 0.1]), [1, 2, 2, 2])
    assert advantages.tolist() == [0.0] * 4


def test_group_ids_beyond_32_bits_are_kept_apart():
    advantages = group_advantages(torch.tensor([1.0, 0.0]), [5, 5 + 2**40])
    assert advantages.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_reward_that_is_not_finite_is_refused(reward):
    with pytest.raises(ValueError, match="finite"):
        group_advantages(torch.tensor([reward, 0.0]), [1, 1])


def test_rewards_without_group_ids_are_refused():
    with pytest.raises(ValueError, match="one group id a reward"):
        group_advantages(torch.tensor([1.0, 0.0]), [1])


def test_unclipped_loss_is_the_negated_mean_of_ratio_times_advantage():
    _, result = loss_of([[1.1, 0.9]], [2.0])
    assert result.loss.item() == pytest.approx(-2.0)
    assert result.clip_fraction == 0.0


def test_clip_stops_the_gradient_only_where_the_policy_already_moved_that_way():
    logprobs, result = loss_of([[1.5, 0.5], [1.5, 0.5]], [1.0, -1.0])
    result.loss.backward()
    assert (logprobs.grad != 0).tolist() == [[False, True], [True, False]]
    assert result.loss.item() == pytest.approx(-(1.28 + 0.5 - 1.5 - 0.8) / 4)
    assert result.clip_fraction == 0.5


def test_masked_tokens_count_for_nothing_whatever_their_values():
    _, masked = loss_of([[1.1, math.inf]], [1.0], mask=[[True, False]])
    _, plain = loss_of([[1.1]], [1.0])
    assert masked.loss.item() == plain.loss.item()
    assert math.isfinite(masked.approx_kl)


def test_batch_without_loss_tokens_has_zero_loss_and_gradient():
    logprobs, result = loss_of([[1.1, 2.0]], [1.0], mask=[[False, False]])
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert logprobs.grad.abs().sum() == 0.0


def test_approx_kl_is_zero_on_policy_and_positive_off_it():
    assert loss_of([[1.0, 1.0]], [1.0])[1].approx_kl == 0.0
    assert loss_of([[1.2, 0.8]], [1.0])[1].approx_kl > 0.0


def test_shapes_that_do_not_agree_are_refused():
    with pytest.raises(ValueError, match="equal shapes"):
        policy_loss(torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2), torch.ones(2, 3).bool(), **CLIP)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": torch.zeros(2)}, "logprobs: expected"),
        ({"loss_mask": torch.ones(6)}, "loss_mask: expected"),
        ({"loss_mask": torch.ones(7, dtype=torch.bool)}, "the first token carries loss"),
    ],
)
def test_row_whose_parts_do_not_agree_is_refused_by_identity(rows, change, message):
    with pytest.raises(ValueError, match=f"group 11 generation 0: {message}"):
        dataclasses.replace(rows[0], **change)
