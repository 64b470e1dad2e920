"""What a configuration amounts to, decided in one place for the trainer, the plan, the checks and the notices."""

from burnish.config import names
from burnish.config.trainer import PPOTrainerConfig


def needs_old_log_probs(config: PPOTrainerConfig) -> bool:
    """Whether the trainer computes the log-probs of a batch before its first update.

    In bypass mode the rollout's own are taken. Otherwise they are needed where the policy moves between sampling and
    an update, and where something before the updates reads them: a KL in the reward, a correction of the rollout's
    log-probs, an estimator that reads the sum of squared probabilities. With one update per batch and none of these,
    they are the update's own.
    """
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    correction = algorithm.rollout_correction
    if correction.bypass_mode:
        return False
    return (
        actor.ppo_mini_batch_size < config.data.train_batch_size
        or actor.ppo_epochs > 1
        or algorithm.use_kl_in_reward
        or correction.rollout_is is not None
        or correction.rollout_rs is not None
        or actor.calculate_sum_pi_squared
    )


def policy_loss(config: PPOTrainerConfig) -> str:
    """The name of the policy loss that is used; the bypass mode brings its own."""
    bypass = config.algorithm.rollout_correction.bypass_mode
    return "bypass_mode" if bypass else config.actor_rollout_ref.actor.policy_loss.loss_mode


def clip_loss(config: PPOTrainerConfig) -> str:
    """As `policy_loss`, with the bypass mode replaced by the loss that it hands its log-probs to."""
    loss = policy_loss(config)
    if loss != "bypass_mode":
        return loss
    return "vanilla" if config.algorithm.rollout_correction.loss_type == "ppo_clip" else "reinforce"


def loss_agg_mode(config: PPOTrainerConfig) -> str:
    """How the policy loss is aggregated; some losses weigh every sequence alike, whatever the key says."""
    if policy_loss(config) in names.SEQUENCE_MEAN_POLICY_LOSSES:
        return "seq-mean-token-mean"
    return config.actor_rollout_ref.actor.loss_agg_mode
