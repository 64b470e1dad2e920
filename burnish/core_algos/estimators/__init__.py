"""Advantage estimators: from rewards per token to (advantages, returns), both zero outside the response mask.

An estimator is a function that names what it needs as its parameters: keys of the batch (``token_level_rewards``,
``response_mask``, ``values``, ...), ``index`` (the ``uid`` of each row), or a setting (``gamma``, ``lam``,
``num_repeat``, ``norm_adv_by_std_in_grpo``, ``config``). `burnish.core_algos.advantages.compute_advantage` hands
them over, and only those rows that count: a row whose reward abstained never reaches an estimator.

What all of them share is in `base`; each other file has a family of them.
"""

from burnish.core_algos.estimators.base import (
    ADV_ESTIMATORS,
    AdvantageEstimator,
    AdvantagesAndReturns,
    AdvantageSettings,
    get_adv_estimator_fn,
    outcome_scores,
    register_adv_est,
)
from burnish.core_algos.estimators.gae import compute_gae_advantage_return
from burnish.core_algos.estimators.gdpo import compute_gdpo_outcome_advantage
from burnish.core_algos.estimators.group import (
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from burnish.core_algos.estimators.reinforce import (
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
)
from burnish.core_algos.estimators.token_baseline import (
    compute_optimal_token_baseline_advantage,
    compute_tir_optimal_token_baseline_advantage,
)

__all__ = [
    "ADV_ESTIMATORS",
    "AdvantageEstimator",
    "AdvantageSettings",
    "AdvantagesAndReturns",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_tir_optimal_token_baseline_advantage",
    "get_adv_estimator_fn",
    "outcome_scores",
    "register_adv_est",
]
