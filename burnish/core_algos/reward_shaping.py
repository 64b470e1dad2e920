"""What is added to a score before anything else reads it."""

from jaxtyping import Float, Int
from torch import Tensor

from burnish.utils.errors import ConfigError


def overlong_penalty(
    lengths: Int[Tensor, " batch"], max_resp_len: int, buffer_len: int, penalty_factor: float | int
) -> Float[Tensor, " batch"]:
    """min(-(length - (max_resp_len - buffer_len)) / buffer_len * penalty_factor, 0): DAPO's soft punishment of long
    responses (arXiv:2503.14476).

    0 up to ``max_resp_len - buffer_len`` tokens, from there a straight line to ``-penalty_factor`` at ``max_resp_len``.
    A response that is longer still, as one with tool output can be, goes on along that line.

    Args:
        lengths: tokens of each response, up to and including the last one that the policy sampled.
        max_resp_len: the length limit (``reward.reward_kwargs.max_resp_len``).
        buffer_len: tokens before the limit over which the penalty grows (``overlong_buffer_cfg.len``).
        penalty_factor: the penalty at the limit.

    Returns:
        what to add to the scores, float32, at most 0.

    Raises:
        ConfigError: the buffer is empty or longer than the limit.
    """
    if not 0 < buffer_len <= max_resp_len:
        raise ConfigError(
            f"reward.reward_kwargs.overlong_buffer_cfg.len={buffer_len}: the buffer lies before the length limit, "
            f"reward.reward_kwargs.max_resp_len={max_resp_len}. Set it between 1 and {max_resp_len}."
        )
    exceeding = lengths.float() - (max_resp_len - buffer_len)
    return (-exceeding / buffer_len * penalty_factor).clamp(max=0.0)
