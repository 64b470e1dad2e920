"""Values that depend on several keys, filled in once, so that nothing else has to know how they depend."""

from burnish.config import names
from burnish.config.build import value_of
from burnish.config.profiler_checks import settle_profilers
from burnish.config.rejection import PRESETS
from burnish.config.schema import leaves
from burnish.config.settings import Settings
from burnish.config.trainer import PPOTrainerConfig
from burnish.config.values import coerce, show

_CORRECTION = "algorithm.rollout_correction"


def apply_preset(config: PPOTrainerConfig, settings: Settings) -> None:
    """Fills the keys of ``algorithm.rollout_correction`` from its preset, but those that were set beside it.

    Bounds belong to their rules: where the rules were set, the preset's bounds are left out with its rules.
    """
    correction = config.algorithm.rollout_correction
    if correction.preset is None:
        return
    source = settings.by_key[f"{_CORRECTION}.preset"].source

    def is_set(name: str) -> bool:
        # A file that names the preset means its other lines too, even those that repeat a default; a file under a
        # preset of the command line may just list every key.
        key = f"{_CORRECTION}.{name}"
        in_same_file = bool(source) and key in settings.by_key and settings.by_key[key].source == source
        return key in config.set_keys or in_same_file

    for name, value in PRESETS[correction.preset].items():
        if is_set(name) or (name == "rollout_rs_threshold" and is_set("rollout_rs")):
            continue
        leaf = leaves()[f"{_CORRECTION}.{name}"]
        setattr(correction, name, coerce(value, leaf, f"{leaf.path}={show(value)}"))


def settle(config: PPOTrainerConfig) -> None:
    """Decides what was left open: whether there is a critic, what cuts micro-batches where no size is set, and what the
    bypass mode and the token baselines bring with them."""
    if config.critic.enable is None:
        config.critic.enable = config.algorithm.adv_estimator == "gae"
    settle_profilers(config)
    actor = config.actor_rollout_ref.actor
    actor.calculate_sum_pi_squared |= config.algorithm.adv_estimator in names.TOKEN_BASELINE_ADV_ESTIMATORS
    # The loss of the bypass mode reads it, and gets the actor's section only.
    actor.policy_loss.rollout_correction = config.algorithm.rollout_correction
    if config.algorithm.rollout_correction.bypass_mode:
        actor.policy_loss.loss_mode = "bypass_mode"
    for section, switch, size in (
        ("actor_rollout_ref.actor", "use_dynamic_bsz", "ppo_micro_batch_size_per_gpu"),
        ("actor_rollout_ref.rollout", "log_prob_use_dynamic_bsz", "log_prob_micro_batch_size_per_gpu"),
        ("actor_rollout_ref.ref", "log_prob_use_dynamic_bsz", "log_prob_micro_batch_size_per_gpu"),
        ("critic", "use_dynamic_bsz", "ppo_micro_batch_size_per_gpu"),
        ("reward.reward_model", "use_dynamic_bsz", "micro_batch_size_per_gpu"),
    ):
        if value_of(config, f"{section}.{size}") is None:
            setattr(value_of(config, section), switch, True)
