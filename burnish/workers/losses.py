"""The losses that the engine minimises, put together from the terms in `burnish.core_algos`.

A loss is a function ``(outputs, rows, global_batch_info) -> (loss, metrics)``.  Denominators come from ``global_batch_info``,
which counts over the whole optimizer step and all ranks, so a loss may be evaluated micro-batch by micro-batch and summed.
Metrics are contributions that sum to the step's value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from burnish.config import FSDPActorConfig, FSDPCriticConfig
from burnish.core_algos.aggregation import agg_loss, token_mean
from burnish.core_algos.kl import kl_penalty
from burnish.core_algos.policy_losses import get_policy_loss_fn
from burnish.core_algos.policy_losses.base import check_loss
from burnish.core_algos.value_loss import compute_value_loss
from burnish.engine import LossFn
from burnish.protocol import DataProto
from burnish.workers.preparation import prepared_arguments


def make_policy_loss(config: FSDPActorConfig) -> LossFn:
    """Policy loss - entropy_coeff * entropy + kl_loss_coef * KL, as the actor's configuration says.

    Where no pass of the trainer has compared its probabilities with the rollout's, the loss measures the difference: on the
    tokens that are trained on, and on the policy before the first update only (`merge_updates` keeps the first
    mini-batch's).
    """
    policy_loss_fn = get_policy_loss_fn(config.policy_loss.loss_mode)

    def policy_loss(
        outputs: Mapping[str, torch.Tensor], rows: DataProto, global_batch_info: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        tensors = rows.tensors
        log_prob, loss_mask = outputs["log_probs"], tensors["loss_mask"]
        # One update per batch: the policy before the update is the policy that is being differentiated. If it is NaN that
        # is to surface in the gradient, which skips the update, and not to be refused as a constant.
        old_log_prob = tensors.get("old_log_probs", torch.nan_to_num(log_prob.detach()))
        prepared = prepared_arguments(tensors)
        weights = prepared.pop("rollout_is_weights", tensors.get("rollout_is_weights", None))
        got = policy_loss_fn(
            old_log_prob,
            log_prob,
            tensors["advantages"],
            loss_mask,
            config.loss_agg_mode,
            replace(config, global_batch_info=global_batch_info),
            weights,
            **prepared,
        )
        loss, pg_metrics = check_loss(config.policy_loss.loss_mode, got, learns=log_prob.requires_grad)
        dp_size = global_batch_info["dp_size"]
        metrics = {"actor/pg_loss": loss.detach() / dp_size, **pg_metrics}
        entropy = agg_loss(outputs["entropy"], loss_mask, config.loss_agg_mode, **global_batch_info)
        metrics["actor/entropy"] = entropy.detach() / dp_size
        if "top1_log_probs" in outputs:
            is_top1 = log_prob.detach() == outputs["top1_log_probs"]
            metrics["actor/top1_agreement"] = token_mean(is_top1, loss_mask, global_batch_info["batch_num_tokens"])
        if config.entropy_coeff != 0:
            loss = loss - config.entropy_coeff * entropy
        if config.use_kl_loss:
            kl = kl_penalty(log_prob, tensors["ref_log_prob"], config.kl_loss_type, loss_mask)
            kl_loss = agg_loss(kl, loss_mask, config.loss_agg_mode, **global_batch_info)
            loss = loss + config.kl_loss_coef * kl_loss
            metrics["actor/kl_loss"] = kl_loss.detach() / dp_size
        metrics["actor/loss"] = loss.detach() / dp_size
        # In bypass mode the old log-probs are the rollout's own.
        not_compared = "old_log_probs" not in tensors or config.policy_loss.loss_mode == "bypass_mode"
        if not_compared and "rollout_log_probs" in tensors:
            metrics |= _rollout_moments(log_prob, tensors["rollout_log_probs"], loss_mask, global_batch_info)
        return loss, metrics

    return policy_loss


_MOMENT = "training/rollout_moment/"


def _rollout_moments(
    log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, mask: torch.Tensor, global_batch_info: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """How far the rollout engine's probabilities are from this forward pass's: sums that `rollout_difference` reads."""
    ours, theirs = (torch.where(mask, x.detach().double().exp(), 0.0) for x in (log_prob, rollout_log_prob))
    difference = (ours - theirs).abs()
    moments = {
        "difference": difference,
        "difference^2": difference.square(),
        "ours": ours,
        "ours^2": ours.square(),
        "theirs": theirs,
        "theirs^2": theirs.square(),
        "ours theirs": ours * theirs,
    }
    shares = {_MOMENT + name: x.sum() / global_batch_info["batch_num_tokens"] for name, x in moments.items()}
    return shares | {"training/rollout_probs_diff_max": difference.max()}


def rollout_difference(metrics: Mapping[str, float]) -> dict[str, float]:
    """``metrics`` of an update with the moments of the two engines' probabilities replaced by what they amount to."""
    moments = {key.removeprefix(_MOMENT): value for key, value in metrics.items() if key.startswith(_MOMENT)}
    kept = {key: value for key, value in metrics.items() if not key.startswith(_MOMENT)}
    if not moments:
        return kept

    def covariance(a: str, b: str, product: str) -> float:
        return moments[product] - moments[a] * moments[b]

    variance = covariance("difference", "difference", "difference^2")
    kept["training/rollout_probs_diff_mean"] = moments["difference"]
    kept["training/rollout_probs_diff_std"] = math.sqrt(max(variance, 0.0))
    spread = covariance("ours", "ours", "ours^2") * covariance("theirs", "theirs", "theirs^2")
    if spread > 0:
        correlation = covariance("ours", "theirs", "ours theirs") / math.sqrt(spread)
        kept["training/rollout_actor_probs_pearson_corr"] = correlation
    return kept


def make_value_loss(config: FSDPCriticConfig) -> LossFn:
    """The clipped value loss of PPO."""

    def value_loss(
        outputs: Mapping[str, torch.Tensor], rows: DataProto, global_batch_info: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        tensors = rows.tensors
        loss, clipfrac = compute_value_loss(
            outputs["values"],
            tensors["returns"],
            tensors["values"],
            tensors["loss_mask"],
            config.cliprange_value,
            config.loss_agg_mode,
            global_batch_info=global_batch_info,
        )
        predicted = token_mean(outputs["values"], tensors["loss_mask"], global_batch_info["batch_num_tokens"])
        return loss, {
            "critic/vf_loss": loss.detach() / global_batch_info["dp_size"],
            "critic/vf_clipfrac": clipfrac,
            "critic/vpred_mean": predicted,
        }

    return value_loss
