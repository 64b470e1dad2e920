"""`algorithm`: advantages, KL in the reward, and what is done to a batch before the update."""
# ruff: noqa: RUF009  `key` and `section` declare dataclass fields.

from dataclasses import dataclass
from typing import Any

from burnish.config import names
from burnish.config.section import Section, key, section


@dataclass(kw_only=True, slots=True)
class KLControlConfig(Section):
    """How the coefficient of the KL penalty in the reward moves."""

    type: str = key("fixed", choices=("fixed", "adaptive"))
    """`fixed` keeps `kl_coef`; `adaptive` steers it so that the measured KL approaches `target_kl`."""
    kl_coef: float = key(0.001, ge=0)
    """Coefficient of the KL penalty in the reward; the first one when adaptive."""
    horizon: int = key(10000, ge=1)
    """Adaptive: samples over which a deviation of 100 % doubles the coefficient, about."""
    target_kl: float = key(0.1, gt=0)
    """Adaptive: the KL per token to steer towards."""


@dataclass(kw_only=True, slots=True)
class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO, arXiv:2503.14476): only groups whose metric varies are trained on."""

    enable: bool = key(False)
    """Generate until `data.train_batch_size` prompts have responses that differ."""
    metric: str | None = key(None)
    """What must vary within a group: acc, score (or seq_reward) or any number that the reward function returns."""
    max_num_gen_batches: int = key(10, ge=0)
    """Generation batches of one step, at most; then training goes on with the groups there are. 0: no such bound, but
    a whole pass over the data without one group that varies ends the run."""


@dataclass(kw_only=True, slots=True)
class PFPPOConfig(Section):
    """Resampling of the rows that are trained on, by their score (PF-PPO, arXiv:2409.06957)."""

    reweight_method: str = key("pow", choices=("pow", "max_min", "max_random"))
    """Weight of a row: `pow` abs(score)^`weight_pow`; `max_min` 1 for the best and the worst score, else 0;
    `max_random` 0.4 for the best score, else 0.1."""
    weight_pow: float = key(2.0, ge=0)
    """Exponent of `pow`."""


@dataclass(kw_only=True, slots=True)
class RolloutCorrectionConfig(Section):
    """Correction of the difference between the rollout's policy and the trainer's."""

    preset: str | None = key(None, choices=names.ROLLOUT_CORRECTION_PRESETS)
    """A named combination of the keys below; what is set beside it counts more."""
    rollout_is: str | None = key(None, choices=("token", "sequence"))
    """Importance weights per token or per sequence."""
    rollout_is_threshold: float | str = key(2.0, gt=0)
    """Importance weights are truncated here; "lower_upper", as 0.5_5.0, makes those outside of these bounds 0 instead. In a
    YAML file it stands in quotes."""
    rollout_rs: str | None = key(None)
    """Rejection sampling: a comma list of {token, seq_sum, seq_mean, seq_max}_{k1, k2, k3}; all of them must accept."""
    rollout_rs_threshold: str | None = key(None)
    """Bounds of the rejection, one for all or a comma list: for k1 "lower_upper" ratios (one number v from 1: 1/v to
    v), for k2 and k3 an upper bound. In a YAML file it stands in quotes, as YAML reads 0.5_2 as 0.52."""
    bypass_mode: bool = key(False)
    """Take the rollout's log-probs as the old ones, without a pass of the trainer."""
    loss_type: str = key("ppo_clip", choices=("ppo_clip", "reinforce"))
    """The loss in bypass mode."""
    rollout_is_batch_normalize: bool = key(False)
    """Divide the importance weights by their mean over the batch."""


@dataclass(kw_only=True, slots=True)
class AlgoConfig(Section):
    """From scores to advantages."""

    adv_estimator: str = key("gae", choices=names.ADV_ESTIMATORS, plug_in=True)
    """The advantage estimator; `gae` trains a critic, the others do without."""
    gamma: float = key(1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = key(1.0, ge=0, le=1)
    """Lambda of GAE (arXiv:1506.02438): 0 trusts the critic, 1 the returns."""
    norm_adv_by_std_in_grpo: bool = key(True)
    """GRPO divides by the group's standard deviation; false is Dr.GRPO (arXiv:2503.20783)."""
    allow_single_sample_groups: bool = key(False)
    """Let a group estimator run with `rollout.n=1`: baseline 0 and deviation 1. `grpo_passk` needs two all the same."""
    use_kl_in_reward: bool = key(False)
    """Subtract the KL to the reference policy from the reward, token by token."""
    kl_penalty: str = key("kl", choices=names.KL_PENALTIES, impossible=names.IMPOSSIBLE_KL_PENALTIES)
    """KL estimator in the reward."""
    kl_ctrl: KLControlConfig = section(KLControlConfig)
    """Coefficient of the KL in the reward."""
    gdpo_reward_keys: list[str] | None = key(None)
    """GDPO: the numbers of the reward function that are its components; `score` is the score itself."""
    gdpo_reward_weights: list[float] | None = key(None)
    """GDPO: their weights; null: 1 each."""
    use_pf_ppo: bool = key(False)
    """Resample the rows of a batch by their score before the updates."""
    pf_ppo: PFPPOConfig = section(PFPPOConfig)
    """How."""
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    """Dynamic sampling."""
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)
    """Correction of rollout log-probs."""
    custom: dict[str, Any] = key({})
    """Keys of your own estimator (`algorithm.custom.alpha=0.3`); it reads them as `config.custom["alpha"]`."""
