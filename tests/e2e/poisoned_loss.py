"""A policy loss that is not a number in chosen updates, for runs that name it in their configuration."""

from burnish.core_algos.policy_losses import compute_policy_loss_vanilla

UPDATES: list[int] = []
"""Numbers of the updates so far, one micro-batch each."""
POISONED: set[int] = set()
"""Numbers of the updates whose loss is NaN, counted from 1."""


def poisoned(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    """PPO's loss, times NaN in the updates that `POISONED` lists."""
    UPDATES.append(len(UPDATES) + 1)
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )
    return loss * (float("nan") if UPDATES[-1] in POISONED else 1.0), metrics
