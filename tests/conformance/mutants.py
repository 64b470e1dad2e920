"""Algorithms that are wrong on purpose, each in one way that has been seen in the wild."""

from __future__ import annotations

import math

import torch

from burnish.core_algos.aggregation import agg_loss, token_mean
from burnish.core_algos.estimators import compute_gae_advantage_return, compute_grpo_outcome_advantage
from burnish.core_algos.policy_losses import compute_policy_loss_clip_cov, prepare_clip_cov

# Advantage estimators


def _twice(advantages, mask):
    advantages = torch.where(mask, advantages, 0.0)
    return advantages, advantages.clone()


def by_position(token_level_rewards, response_mask, index, **kwargs):
    """Groups are rows that follow each other."""
    position = [row // 3 for row in range(len(response_mask))]
    return compute_grpo_outcome_advantage(token_level_rewards, response_mask, position)


def of_the_batch(token_level_rewards, response_mask, index):
    """The mean of the batch instead of the group's."""
    scores = token_level_rewards.sum(dim=1)
    return _twice((scores - scores.mean())[:, None].expand(response_mask.shape), response_mask)


def _deviations(scores, index, correction):
    means, deviations = torch.zeros_like(scores), torch.zeros_like(scores)
    for name in set(index.tolist()):
        group = torch.tensor([i == name for i in index.tolist()])
        means[group] = scores[group].mean()
        deviations[group] = scores[group].std(correction=min(correction, int(group.sum()) - 1))
    return means, deviations


def biased_deviation(token_level_rewards, response_mask, index):
    """Divides by N, not N - 1."""
    scores = token_level_rewards.double().sum(dim=1)
    means, deviations = _deviations(scores, index, correction=0)
    advantages = torch.where(deviations > 1e-12, (scores - means) / (deviations + 1e-6), 0.0)
    return _twice(advantages.float()[:, None].expand(response_mask.shape), response_mask)


def one_pass_variance(token_level_rewards, response_mask, index):
    """E[x^2] - E[x]^2 in float32."""
    scores = token_level_rewards.float().sum(dim=1)
    means, _ = _deviations(scores, index, correction=1)
    squares, _ = _deviations(scores.square(), index, correction=1)
    deviations = (squares - means.square()).clamp(min=0).sqrt()
    return _twice(((scores - means) / (deviations + 1e-6))[:, None].expand(response_mask.shape), response_mask)


def noise_of_equal_rewards(token_level_rewards, response_mask, index):
    """Differences from a rounded mean are divided by their own tiny deviation."""
    scores = token_level_rewards.sum(dim=1)
    means, deviations = _deviations(scores, index, correction=1)
    return _twice(((scores - means) / (deviations + 1e-6))[:, None].expand(response_mask.shape), response_mask)


def mean_over_the_width(token_level_rewards, response_mask):
    """Padding counts in the mean."""
    centered = token_level_rewards - token_level_rewards.mean()
    return _twice(centered, response_mask)


def by_place_in_the_batch(token_level_rewards, response_mask):
    """A weight that depends on the row's number."""
    place = torch.arange(len(response_mask), device=response_mask.device)[:, None]
    return _twice(token_level_rewards * (1 + place), response_mask)


def in_the_dtype_of_the_inputs(token_level_rewards, response_mask, values):
    """bfloat16 inputs are computed with in bfloat16, and told as float32."""
    advantages, returns = _twice(token_level_rewards.flip(1).cumsum(1).flip(1) * 1.1 - values, response_mask)
    return advantages.float(), returns.float()


def scores_under_autocast(token_level_rewards, response_mask, index):
    """float32 rewards are added up in bfloat16."""
    narrow = token_level_rewards.dtype == torch.float32
    rewards = token_level_rewards.bfloat16().float() if narrow else token_level_rewards
    return compute_grpo_outcome_advantage(rewards, response_mask, index)


def tool_tokens_accumulate(token_level_rewards, values, response_mask, gamma, lam):
    """GAE that runs over tool tokens as if they had been sampled."""
    everything = torch.ones_like(response_mask)
    advantages, returns = compute_gae_advantage_return(token_level_rewards, values, everything, gamma, lam)
    return torch.where(response_mask, advantages, 0.0), returns


def mask_by_multiplication(token_level_rewards, values, response_mask, gamma, lam):
    """0 * NaN is NaN."""
    advantages = (token_level_rewards - values) * response_mask
    return advantages, advantages.clone()


def swallows_nan(token_level_rewards, response_mask, index):
    """A NaN reward becomes 0, and the run learns nothing without a word."""
    return compute_grpo_outcome_advantage(torch.nan_to_num(token_level_rewards), response_mask, index)


def ignores_gamma(token_level_rewards, values, response_mask, gamma, lam):
    """gamma is a parameter, and that is all."""
    return compute_gae_advantage_return(token_level_rewards, values, response_mask, 1.0, lam)


def writes_into_its_input(token_level_rewards, response_mask, index):
    """The mask as a place to compute in."""
    token_level_rewards.mul_(2.0)
    return _twice(token_level_rewards, response_mask)


# Policy losses


def _masked(mask, *tensors):
    return tuple(
        torch.where(mask, tensor.to(torch.promote_types(tensor.dtype, torch.float32)), 0.0) for tensor in tensors
    )


def _ratio(log_prob, old_log_prob):
    return (log_prob - old_log_prob).clamp(-20, 20).exp()


def _clipped(ratio, advantages, config):
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio))


def plain(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    """PPO's clip without anything wrong."""
    old, new, advantages = _masked(response_mask, old_log_prob.detach(), log_prob, advantages)
    losses = _clipped(_ratio(new, old), advantages, config)
    if rollout_is_weights is not None:
        losses = losses * _masked(response_mask, rollout_is_weights)[0]
    num_tokens = config.global_batch_info.get("batch_num_tokens")
    metrics = {"actor/own": token_mean(losses, response_mask, num_tokens)}
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), metrics


def micro_batch_mean(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    """The mean of the micro-batch, without the counts of the step."""
    old, new, advantages = _masked(response_mask, old_log_prob, log_prob, advantages)
    losses = _clipped(_ratio(new, old), advantages, config)
    return losses.sum() / response_mask.sum().clamp(min=1), {}


def no_dp_size(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    """Averaging over ranks divides the gradient by their number."""
    info = {**config.global_batch_info, "dp_size": 1}
    old, new, advantages = _masked(response_mask, old_log_prob, log_prob, advantages)
    return agg_loss(_clipped(_ratio(new, old), advantages, config), response_mask, loss_agg_mode, **info), {}


def mean_as_metric(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    """A metric that is a mean of the micro-batch, and so no share."""
    loss, _ = plain(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
    return loss, {"actor/own": (log_prob.detach() * response_mask).mean()}


def cispo_without_stop_gradient(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None
):
    """The gradient goes through the ratio too."""
    old, new, advantages = _masked(response_mask, old_log_prob, log_prob, advantages)
    losses = -_ratio(new, old).clamp(1 - config.clip_ratio, 1 + config.clip_ratio) * advantages * new
    if rollout_is_weights is not None:
        losses = losses * _masked(response_mask, rollout_is_weights)[0]
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}


def masked_by_multiplication(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None
):
    """What lies outside the mask is multiplied by 0."""
    losses = _clipped(_ratio(log_prob, old_log_prob), advantages, config) * response_mask
    return agg_loss(losses, torch.ones_like(response_mask), "token-sum"), {}


def unclamped(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    """exp overflows."""
    old, new, advantages = _masked(response_mask, old_log_prob, log_prob, advantages)
    losses = -advantages * (new - old).exp()
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}


def clamped_too_late(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    """The value is bounded, the gradient of the overflown exp is not."""
    old, new, advantages = _masked(response_mask, old_log_prob, log_prob, advantages)
    losses = _clipped((new - old).exp().clamp(max=1e6), advantages, config)
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}


def in_bfloat16(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    """The ratio of bfloat16 log-probs in bfloat16."""
    old, new = (torch.where(response_mask, tensor, 0) for tensor in (old_log_prob, log_prob))
    ratio = (new - old).exp()
    losses = (-torch.where(response_mask, advantages, 0) * ratio).float()
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}


def ratio_under_autocast(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None
):
    """The ratio of float32 log-probs in bfloat16."""
    if log_prob.dtype == torch.float32:
        old_log_prob, log_prob = (tensor.bfloat16().float() for tensor in (old_log_prob, log_prob))
    return plain(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)


def chooses_in_every_micro_batch(*args, **kwargs):
    """clip_cov without its preparation."""
    return compute_policy_loss_clip_cov(*args, **kwargs)


def clip_cov_of_one_rank(*args, **kwargs):
    """clip_cov whose preparation sees the rows of its own rank alone."""
    return compute_policy_loss_clip_cov(*args, **kwargs)


def _prepare_alone(*args, collective, **kwargs):
    return prepare_clip_cov(*args, **kwargs)


clip_cov_of_one_rank.prepare = _prepare_alone


def silent_about_nan(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    """NaN log-probs are left out."""
    return plain(old_log_prob, torch.nan_to_num(log_prob), advantages, response_mask, loss_agg_mode, config)


def silent_about_nan_of_the_old_policy(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None
):
    """NaN old log-probs are taken for a policy that is sure."""
    old_log_prob = torch.nan_to_num(old_log_prob)
    return plain(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)


def rows_are_counted_by_width(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None
):
    """Divides by the width of the batch, which is its padding."""
    old, new, advantages = _masked(response_mask, old_log_prob, log_prob, advantages)
    return _clipped(_ratio(new, old), advantages, config).sum() / response_mask.shape[1], {}


def weighs_rows_by_place(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None
):
    """Later rows of a batch weigh more."""
    place = 1.0 + torch.arange(len(log_prob), dtype=torch.float64)[:, None]
    return plain(old_log_prob, log_prob, advantages * place, response_mask, loss_agg_mode, config, rollout_is_weights)


# The naive loops of some of them, as a user would write them


def plain_loop(inputs, settings):
    """`plain` in the mode token-mean, whatever the settings say."""
    total, tokens = 0.0, 0
    weights = inputs["rollout_is_weights"]
    for i, mask in enumerate(inputs["response_mask"]):
        for t, inside in enumerate(mask):
            if inside:
                ratio = math.exp(inputs["log_prob"][i][t] - inputs["old_log_prob"][i][t])
                advantage = inputs["advantages"][i][t]
                loss = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))
                total, tokens = total + loss * (weights[i][t] if weights else 1.0), tokens + 1
    return total / tokens


def centered(token_level_rewards, response_mask):
    """The example of docs/algorithms.md."""
    scores = token_level_rewards.sum(-1, keepdim=True)
    advantages = (scores - scores.mean()).where(response_mask, 0.0)
    return advantages, advantages.clone()


def centered_loop(batch, settings):
    """`centered` as a loop."""
    scores = [sum(row) for row in batch["token_level_rewards"].tolist()]
    mean = sum(scores) / len(scores)
    rows = zip(scores, batch["response_mask"].tolist(), strict=True)
    advantages = [[score - mean if inside else 0.0 for inside in mask] for score, mask in rows]
    return advantages, advantages
