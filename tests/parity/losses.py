"""One batch for a policy loss of burnish and for verl's of the same name."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from burnish.config import FSDPActorConfig, RolloutCorrectionConfig
from burnish.config.actor_rollout_ref import PolicyLossConfig
from burnish.conformance.batches import RaggedBatch
from burnish.core_algos.policy_losses import get_policy_loss_fn

NAMES = (
    "vanilla",
    "gspo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "cispo",
    "dppo_tv",
    "dppo_kl",
    "dro",
    "bypass_mode",
)
OF_POLICY_LOSS = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
# What each is tried with beside its defaults, by the keys that both have.
SETTINGS: dict[str, dict[str, Any]] = {
    "vanilla": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 2.0},
    "gspo": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1},
    "sapo": {"tau_pos": 1.3, "tau_neg": 2.1},
    "gpg": {},
    # All that may be left out is: which ones are drawn is another draw in each.
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0},
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7},
    "geo_mean": {"clip_ratio_low": 0.3, "clip_ratio_high": 0.4},
    "cispo": {"clip_ratio_low": 10.0, "clip_ratio_high": 0.2},
    "dppo_tv": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 2.0},
    "dppo_kl": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 20.0},
    "dro": {},
    "bypass_mode": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
}


@dataclass
class Result:
    """A loss, its gradient by log_prob inside the mask, and its metrics."""

    loss: float
    gradient: Tensor
    metrics: dict[str, float]


def ours(
    name: str,
    batch: RaggedBatch,
    mode: str,
    *,
    weighted: bool = False,
    correction: dict[str, Any] | None = None,
    info: dict[str, Any] | None = None,
    **settings: Any,
) -> Result:
    """burnish's loss; what needs a preparation prepares itself on the batch."""
    of_loss = {key: settings.pop(key) for key in OF_POLICY_LOSS if key in settings}
    config = FSDPActorConfig(policy_loss=PolicyLossConfig(loss_mode=name, dro_beta=0.3, **of_loss), **settings)
    if correction is not None:
        config.policy_loss.rollout_correction = RolloutCorrectionConfig(**correction)
    config.global_batch_info = info or {}
    return _result(get_policy_loss_fn(name), batch, batch.mask, mode, config, weighted)


def theirs(
    core_algos: ModuleType,
    configs: ModuleType,
    name: str,
    batch: RaggedBatch,
    mode: str,
    *,
    weighted: bool = False,
    correction: dict[str, Any] | None = None,
    info: dict[str, Any] | None = None,
    **settings: Any,
) -> Result:
    """verl's."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig as TheirCorrection

    of_loss = {key: settings.pop(key) for key in OF_POLICY_LOSS if key in settings}
    if correction is not None:
        of_loss["rollout_correction"] = TheirCorrection(**correction)
    config = configs.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=configs.PolicyLossConfig(loss_mode=name, dro_beta=0.3, **of_loss),
        global_batch_info=info or {},
        **settings,
    )
    mask = batch.mask.to(batch.log_probs.dtype)
    return _result(core_algos.get_policy_loss_fn(name), batch, mask, mode, config, weighted)


def _result(loss_fn: Any, batch: RaggedBatch, mask: Tensor, mode: str, config: Any, weighted: bool) -> Result:
    log_prob = batch.log_probs.clone().requires_grad_()
    loss, metrics = loss_fn(
        batch.old_log_probs, log_prob, batch.advantages, mask, mode, config, batch.weights if weighted else None
    )
    loss.backward()
    assert log_prob.grad is not None
    return Result(
        loss=loss.item(),
        gradient=torch.where(batch.mask, log_prob.grad, 0.0),
        metrics={key: float(value) for key, value in metrics.items()},
    )
