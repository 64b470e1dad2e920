"""The advantage stage: a look at what came in, the correction of the rollout, the KL in the reward, and the
estimator. What is switched off passes the batch on as it is."""

from burnish.config import AlgoConfig, PPOTrainerConfig, RolloutCorrectionConfig
from burnish.core_algos.advantages import compute_advantage
from burnish.core_algos.kl import KLController, apply_kl_penalty
from burnish.core_algos.policy_difference import compute_offpolicy_metrics
from burnish.core_algos.rollout_correction import (
    compute_rollout_correction_and_add_to_batch,
)
from burnish.protocol import DataProto
from burnish.utils.torch_functional import check_finite

MODEL_OUTPUTS = ("rollout_log_probs", "old_log_probs", "ref_log_prob", "values")


def advantages_of(
    batch: DataProto, config: PPOTrainerConfig, kl_ctrl: KLController
) -> tuple[DataProto, dict[str, float]]:
    """Adds ``token_level_rewards``, ``advantages``, ``returns`` and ``loss_mask`` to a scored batch.

    Args:
        config: the whole configuration.
        kl_ctrl: gives the coefficient of the KL in the reward, and is told the KL.

    Returns:
        the batch, and the metrics of all this.

    Raises:
        TrainingError: NaN or inf in what advantages are made of, or the estimator lacks something.
    """
    algorithm = config.algorithm
    check_batch_is_finite(batch)
    # Before all statistics: rows that are rejected are in no baseline, and in no KL that steers its coefficient.
    batch, correction_metrics = correct_rollout(batch, algorithm.rollout_correction)
    batch, kl_metrics = add_rewards(batch, algorithm, kl_ctrl)
    batch = compute_advantage(
        batch,
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        num_repeat=config.actor_rollout_ref.rollout.n,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        config=algorithm,
    )
    return batch, correction_metrics | kl_metrics


def check_batch_is_finite(batch: DataProto) -> None:
    """Nothing that advantages are made of is NaN or infinite, in rows that count.

    Raises:
        TrainingError: names the batch key, how many entries are wrong and where the first one is.
    """
    tensors = batch.tensors
    of_valid_rows = tensors["valid"][:, None].expand_as(tensors["response_mask"])
    # Scores may lie on any token of their row, so the response mask has no say there.
    check_finite(of_valid_rows, token_level_scores=tensors["token_level_scores"])
    outputs = {key: tensors[key] for key in MODEL_OUTPUTS if key in tensors}
    check_finite(of_valid_rows & tensors["response_mask"], **outputs)


def add_rewards(batch: DataProto, config: AlgoConfig, kl_ctrl: KLController) -> tuple[DataProto, dict[str, float]]:
    """Adds ``token_level_rewards``: the scores, less the KL to the reference if ``algorithm.use_kl_in_reward``.

    Returns:
        the batch, and the metrics of the KL.
    """
    if config.use_kl_in_reward:
        return apply_kl_penalty(batch, kl_ctrl, config.kl_penalty)
    batch.tensors["token_level_rewards"] = batch.tensors["token_level_scores"]
    return batch, {}


def correct_rollout(batch: DataProto, config: RolloutCorrectionConfig) -> tuple[DataProto, dict[str, float]]:
    """Importance weights and rejection, where ``algorithm.rollout_correction`` asks for them.

    Returns:
        the batch, with ``loss_mask`` and maybe ``rollout_is_weights`` where anything is corrected, and how far the rollout's
        policy is from the trainer's: ``rollout_corr/*``. In bypass mode the loss does all this; without old log-probs
        there is nothing to compare.
    """
    if config.bypass_mode or "old_log_probs" not in batch.tensors:
        return batch, {}
    if config.rollout_is or config.rollout_rs:
        return compute_rollout_correction_and_add_to_batch(batch, config)
    tensors = batch.tensors
    mask = tensors["response_mask"] & tensors["valid"][:, None]
    return batch, compute_offpolicy_metrics(tensors["old_log_probs"], tensors["rollout_log_probs"], mask)
