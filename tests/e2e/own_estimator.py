"""An advantage estimator of one's own that asks for log-probs by the name of its parameter."""


def by_surprise(token_level_rewards, response_mask, old_log_probs):
    """The score of a response times how improbable each token was."""
    advantages = -old_log_probs * token_level_rewards.sum(-1, keepdim=True) * response_mask
    return advantages, advantages
