"""The roles of an RL run. One worker may hold several; the resource pools say where each lives."""

from enum import Enum

from burnish.config import PPOTrainerConfig, needs_old_log_probs
from burnish.core_algos.advantages import reads_key


class Role(Enum):
    """What a group of workers does."""

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    ActorRolloutRef = "actor_rollout_ref"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "reward_model"

    def __str__(self) -> str:
        return self.value


def need_reference_policy(config: PPOTrainerConfig) -> bool:
    """A frozen reference is loaded only when a KL term reads it."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def need_critic(config: PPOTrainerConfig) -> bool:
    """A critic is trained when the estimator bootstraps from values, or when the configuration insists."""
    return bool(config.critic.enable)


def need_reward_model(config: PPOTrainerConfig) -> bool:
    """A reward model is loaded when it is switched on."""
    return config.reward.reward_model.enable


def need_greedy_baseline(config: PPOTrainerConfig) -> bool:
    """Each prompt gets a greedy response more when the estimator takes its score as the baseline."""
    return config.algorithm.adv_estimator == "remax"


def need_old_log_probs(config: PPOTrainerConfig) -> bool:
    """A pass before the update is made when the configuration asks for its log-probs, or an estimator, which may be of the
    user's own, reads them; in bypass mode they are there without one."""
    algorithm = config.algorithm
    is_read = reads_key(algorithm.adv_estimator, "old_log_probs") and not algorithm.rollout_correction.bypass_mode
    return needs_old_log_probs(config) or is_read
