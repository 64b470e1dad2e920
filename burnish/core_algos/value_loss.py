"""The critic's loss."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from burnish.core_algos.aggregation import GlobalBatchInfo, agg_loss, token_mean
from burnish.utils.torch_functional import as_mask, check_finite, zero_outside


def compute_value_loss(
    vpreds: Float[Tensor, "batch response"],
    returns: Float[Tensor, "batch response"],
    values: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    cliprange_value: float | int,
    loss_agg_mode: str = "token-mean",
    global_batch_info: GlobalBatchInfo | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """0.5 agg(max((v - R)^2, (clip(v, v_old +- cliprange_value) - R)^2)), PPO's (arXiv:1707.06347) for the critic.

    Args:
        vpreds: v, of the critic, with gradient.
        returns: R.
        values: v_old, of the critic before the update.
        response_mask: the loss mask, bool or 0/1.
        cliprange_value: how far v may move from v_old before its gradient is cut.
        loss_agg_mode: see `agg_loss`.
        global_batch_info: denominators of the whole optimizer step; None counts ``response_mask`` alone.

    Returns:
        loss: a scalar.
        vf_clipfrac: share of tokens where the clip is active; detached, adds up over micro-batches and ranks.

    Raises:
        TrainingError: shapes that differ, a mask that is none, or NaN or inf in returns or values inside the mask. In
            vpreds it is no error but surfaces in the loss.
    """
    info = global_batch_info or {}
    mask = as_mask(response_mask, vpreds, "response_mask")
    returns, values = returns.detach(), values.detach()
    check_finite(mask, returns=returns, values=values)
    vpreds, returns, values = zero_outside(mask, vpreds=vpreds, returns=returns, values=values)
    clipped = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    losses = (vpreds - returns).square()
    clipped_losses = (clipped - returns).square()
    loss = 0.5 * agg_loss(torch.maximum(losses, clipped_losses), mask, loss_agg_mode, **info)
    return loss, token_mean(clipped_losses > losses, mask, info.get("batch_num_tokens"))
