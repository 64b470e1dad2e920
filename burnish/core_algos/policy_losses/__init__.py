"""Policy losses: from log-probs and advantages to a loss whose gradient improves the policy.

Every loss has one signature, ``(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
rollout_is_weights=None) -> (loss, metrics)``. The mask it gets is the loss mask. Denominators are those of the whole
optimizer step (``config.global_batch_info``, see `burnish.core_algos.aggregation`); metrics are detached scalars that
the engine adds up over micro-batches and ranks. What a loss must decide over the whole mini-batch, it decides before the
first micro-batch, in its preparation (`preparation_of`).
"""

from burnish.core_algos.policy_losses.base import (
    POLICY_LOSSES,
    LossAndMetrics,
    PolicyLossSettings,
    Prepare,
    clamped_log_ratio,
    clip_range,
    get_policy_loss_fn,
    loss_inputs,
    ppo_terms,
    preparation_of,
    ratio_bound,
    register_policy_loss,
    required,
    token_metrics,
    weighted,
)
from burnish.core_algos.policy_losses.bypass import compute_policy_loss_bypass_mode
from burnish.core_algos.policy_losses.covariance import (
    compute_policy_loss_clip_cov,
    compute_policy_loss_kl_cov,
    prepare_clip_cov,
    prepare_kl_cov,
)
from burnish.core_algos.policy_losses.dppo import compute_policy_loss_dppo_kl, compute_policy_loss_dppo_tv
from burnish.core_algos.policy_losses.reinforce import (
    compute_policy_loss_cispo,
    compute_policy_loss_dro,
    compute_policy_loss_gpg,
)
from burnish.core_algos.policy_losses.sequence import (
    compute_policy_loss_geo_mean,
    compute_policy_loss_gspo,
    compute_policy_loss_sapo,
)
from burnish.core_algos.policy_losses.vanilla import (
    compute_policy_loss,
    compute_policy_loss_clip,
    compute_policy_loss_vanilla,
)

__all__ = [
    "POLICY_LOSSES",
    "LossAndMetrics",
    "PolicyLossSettings",
    "Prepare",
    "clamped_log_ratio",
    "clip_range",
    "compute_policy_loss",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "get_policy_loss_fn",
    "loss_inputs",
    "ppo_terms",
    "preparation_of",
    "prepare_clip_cov",
    "prepare_kl_cov",
    "ratio_bound",
    "register_policy_loss",
    "required",
    "token_metrics",
    "weighted",
]
