"""The losses that the engine minimises, put together from the terms in `burnish.core_algos`.

A loss is a function ``(outputs, rows, global_batch_info) -> (loss, metrics)``.  Denominators come from ``global_batch_info``,
which counts over the whole optimizer step and all ranks, so a loss may be evaluated micro-batch by micro-batch and summed.
Metrics are contributions that sum to the step's value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from burnish.config import FSDPActorConfig, FSDPCriticConfig
from burnish.core_algos.aggregation import agg_loss
from burnish.core_algos.kl import kl_penalty
from burnish.core_algos.policy_losses import get_policy_loss_fn
from burnish.core_algos.value_loss import compute_value_loss
from burnish.engine import LossFn
from burnish.protocol import DataProto


def make_policy_loss(config: FSDPActorConfig) -> LossFn:
    """Policy loss - entropy_coeff * entropy + kl_loss_coef * KL, as the actor's configuration says."""
    policy_loss_fn = get_policy_loss_fn(config.policy_loss.loss_mode)

    def policy_loss(
        outputs: Mapping[str, torch.Tensor], rows: DataProto, global_batch_info: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        tensors = rows.tensors
        log_prob, loss_mask = outputs["log_probs"], tensors["loss_mask"]
        # One update per batch: the policy before the update is the policy that is being differentiated.
        old_log_prob = tensors["old_log_probs"] if "old_log_probs" in tensors else log_prob.detach()
        loss, pg_metrics = policy_loss_fn(
            old_log_prob,
            log_prob,
            tensors["advantages"],
            loss_mask,
            config.loss_agg_mode,
            replace(config, global_batch_info=global_batch_info),
            tensors.get("rollout_is_weights", None),
        )
        dp_size = global_batch_info["dp_size"]
        metrics = {"actor/pg_loss": loss.detach() / dp_size, **pg_metrics}
        entropy = agg_loss(outputs["entropy"], loss_mask, config.loss_agg_mode, **global_batch_info)
        metrics["actor/entropy"] = entropy.detach() / dp_size
        if config.entropy_coeff != 0:
            loss = loss - config.entropy_coeff * entropy
        if config.use_kl_loss:
            kl = kl_penalty(log_prob, tensors["ref_log_prob"], config.kl_loss_type, loss_mask)
            kl_loss = agg_loss(kl, loss_mask, config.loss_agg_mode, **global_batch_info)
            loss = loss + config.kl_loss_coef * kl_loss
            metrics["actor/kl_loss"] = kl_loss.detach() / dp_size
        metrics["actor/loss"] = loss.detach() / dp_size
        if "old_log_probs" not in tensors and "rollout_log_probs" in tensors:
            metrics |= _rollout_difference(log_prob, tensors["rollout_log_probs"], loss_mask, global_batch_info)
        return loss, metrics

    return policy_loss


def _rollout_difference(
    log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, mask: torch.Tensor, global_batch_info: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """How far the rollout engine's probabilities are from this forward pass's."""
    difference = torch.where(mask, (log_prob.detach().exp() - rollout_log_prob.exp()).abs(), 0.0)
    return {
        "training/rollout_probs_diff_mean": difference.sum() / global_batch_info["batch_num_tokens"],
        "training/rollout_probs_diff_max": difference.max(),
    }


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
        return loss, {"critic/vf_loss": loss.detach() / global_batch_info["dp_size"], "critic/vf_clipfrac": clipfrac}

    return value_loss
