"""Every algorithm once more, as a naive loop over rows and tokens in float64.

They are written from the definitions and share nothing with the code that they judge: nothing in them is vectorised, masked
or clever. Rows are lists, a masked-out token is left out.
"""

from burnish.conformance.references import estimators, losses, token_baselines
from burnish.conformance.references.aggregation import AGGREGATION_REFERENCES, aggregate
from burnish.conformance.references.correction import CORRECTION_SETTINGS, accepted, importance_weights
from burnish.conformance.references.estimators import ESTIMATOR_SETTINGS, EstimatorReference
from burnish.conformance.references.kl import KL_REFERENCES
from burnish.conformance.references.losses import LOSS_SETTINGS, LossReference

ESTIMATOR_REFERENCES: dict[str, EstimatorReference] = {
    "gae": estimators.gae,
    "grpo": estimators.grpo,
    "grpo_vectorized": estimators.grpo,
    "grpo_passk": estimators.grpo_passk,
    "rloo": estimators.rloo,
    "rloo_vectorized": estimators.rloo,
    "reinforce_plus_plus": estimators.reinforce_plus_plus,
    "reinforce_plus_plus_baseline": estimators.reinforce_plus_plus_baseline,
    "remax": estimators.remax,
    "opo": estimators.opo,
    "gpg": estimators.gpg,
    "optimal_token_baseline": token_baselines.optimal_token_baseline,
    "tir_optimal_token_baseline": token_baselines.tir_optimal_token_baseline,
    "gdpo": estimators.gdpo,
}

LOSS_REFERENCES: dict[str, LossReference] = {
    "vanilla": losses.vanilla,
    "gspo": losses.gspo,
    "sapo": losses.sapo,
    "gpg": losses.gpg,
    "clip_cov": losses.clip_cov,
    "kl_cov": losses.kl_cov,
    "geo_mean": losses.geo_mean,
    "cispo": losses.cispo,
    "dppo_tv": losses.dppo_tv,
    "dppo_kl": losses.dppo_kl,
    "dro": losses.dro,
    "bypass_mode": losses.bypass_mode,
}

__all__ = [
    "AGGREGATION_REFERENCES",
    "CORRECTION_SETTINGS",
    "ESTIMATOR_REFERENCES",
    "ESTIMATOR_SETTINGS",
    "KL_REFERENCES",
    "LOSS_REFERENCES",
    "LOSS_SETTINGS",
    "accepted",
    "aggregate",
    "importance_weights",
]
