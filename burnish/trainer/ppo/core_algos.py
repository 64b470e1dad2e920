"""Every algorithm under one name; they live in `burnish.core_algos`, one file per subject."""

from burnish.core_algos.advantages import compute_advantage
from burnish.core_algos.aggregation import LOSS_AGG_MODES, GlobalBatchInfo, agg_loss
from burnish.core_algos.estimators import (
    AdvantageEstimator,
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_rloo_outcome_advantage,
    get_adv_estimator_fn,
    register_adv_est,
)
from burnish.core_algos.kl import (
    KL_PENALTIES,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    get_kl_controller,
    kl_penalty,
)
from burnish.core_algos.policy_losses import (
    compute_policy_loss,
    compute_policy_loss_clip,
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
    register_policy_loss,
)
from burnish.core_algos.value_loss import compute_value_loss

__all__ = [
    "KL_PENALTIES",
    "LOSS_AGG_MODES",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "GlobalBatchInfo",
    "agg_loss",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_policy_loss",
    "compute_policy_loss_clip",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "register_adv_est",
    "register_policy_loss",
]
