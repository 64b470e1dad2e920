"""A policy loss that fails in chosen updates, for runs that name it in their configuration."""

from burnish.core_algos.policy_losses import compute_policy_loss_vanilla

UPDATES: list[int] = []
"""Numbers of the updates so far, one micro-batch each."""
FAILS: dict[int, Exception] = {}
"""What is raised in which update, counted from 1."""


def failing(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    """PPO's loss, or an error in the updates that `FAILS` lists."""
    UPDATES.append(len(UPDATES) + 1)
    if UPDATES[-1] in FAILS:
        raise FAILS[UPDATES[-1]]
    return compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )
