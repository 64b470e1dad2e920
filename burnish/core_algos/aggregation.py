"""From a loss per token to one number: the only place where a loss denominator is computed.

A denominator counts the whole optimizer step over all ranks, not the micro-batch at hand, so that the gradient does not
depend on how the step is cut into micro-batches or spread over ranks. They are counted once per step and handed to
every loss as ``global_batch_info``.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from burnish.utils.errors import ConfigError, TrainingError
from burnish.utils.torch_functional import as_mask, zero_outside

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum")


GlobalBatchInfo = Mapping[str, Any]
"""What a loss needs to know of the optimizer step that its micro-batch is a part of; all keys may be absent, and all but the
first None:

dp_size            ranks whose gradients are averaged: the loss is multiplied by it, so that the average is the sum
batch_num_tokens   tokens in the loss mask, over the whole optimizer step and all ranks
global_batch_size  rows with a token in the loss mask, over the whole optimizer step and all ranks
loss_scale_factor  divisor of seq-mean-token-sum-norm: ``actor.loss_scale_factor``, or ``data.max_response_length``
"""


def agg_loss(
    loss_mat: Float[Tensor, "batch response"],
    loss_mask: Shaped[Tensor, "batch response"],
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | float | Tensor | None = None,
    global_batch_size: int | float | Tensor | None = None,
    loss_scale_factor: int | float | None = None,
) -> Float[Tensor, ""]:
    """Aggregates the loss of the tokens in ``loss_mask`` (l), times ``dp_size``.

    ========================= ======================================================
    token-mean                sum(L l) / N_tokens
    seq-mean-token-sum        sum_i sum_t L l / N_seq
    seq-mean-token-mean       sum_i (sum_t L l / sum_t l) / N_seq
    seq-mean-token-sum-norm   sum(L l) / (N_seq * loss_scale_factor)  (arXiv:2503.20783)
    token-sum                 sum(L l)
    ========================= ======================================================

    Args:
        loss_mat: loss per token; may hold anything outside the mask.
        loss_mask: bool or 0/1.
        loss_agg_mode: one of `LOSS_AGG_MODES`.
        dp_size: ranks whose gradients are averaged.
        batch_num_tokens: N_tokens of the optimizer step over all ranks; None counts ``loss_mask`` alone.
        global_batch_size: N_seq of the optimizer step over all ranks; None counts the rows of ``loss_mask``.
        loss_scale_factor: None takes the width of ``loss_mask``, which depends on the padding: name it in training.

    Raises:
        ConfigError: an unknown mode.
        TrainingError: the mask is no mask, or is empty while its own count is the denominator.
    """
    mask = as_mask(loss_mask, loss_mat, "loss_mask")
    (kept,) = zero_outside(mask, loss_mat=loss_mat)
    if loss_agg_mode == "token-sum":
        return kept.sum() * dp_size
    if loss_agg_mode == "token-mean":
        return kept.sum() / _denominator(batch_num_tokens, mask) * dp_size
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ConfigError(f"loss_agg_mode={loss_agg_mode}: there is no such mode. Known: {', '.join(LOSS_AGG_MODES)}.")
    row_losses = kept.sum(dim=-1)
    if loss_agg_mode == "seq-mean-token-mean":
        row_losses = row_losses / mask.sum(dim=-1).clamp(min=1)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        row_losses = row_losses / (mask.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    return row_losses.sum() / _denominator(global_batch_size, mask.any(dim=-1)) * dp_size


def token_mean(
    values: Shaped[Tensor, "batch response"],
    loss_mask: Shaped[Tensor, "batch response"],
    batch_num_tokens: int | float | Tensor | None = None,
) -> Float[Tensor, ""]:
    """sum(values l) / N_tokens: this micro-batch's share of a metric, detached.

    The shares of all micro-batches and ranks add up to the mean over the tokens of the optimizer step; there is no
    ``dp_size`` in them, since metrics are summed over ranks where gradients are averaged. 0 for an empty mask.

    Args:
        values: per token; bool counts.
        loss_mask: bool or 0/1.
        batch_num_tokens: N_tokens of the optimizer step over all ranks; None counts ``loss_mask`` alone.
    """
    mask = as_mask(loss_mask, values, "loss_mask")
    (kept,) = zero_outside(mask, values=values.detach())
    return kept.sum() / (mask.sum().clamp(min=1) if batch_num_tokens is None else batch_num_tokens)


def _denominator(global_count: int | float | Tensor | None, counted: Tensor) -> int | float | Tensor:
    if global_count is not None:
        return global_count
    if not torch.any(counted):
        raise TrainingError(
            "loss_mask is empty (a loss calls it response_mask): there is no token to average over. Give the counts of the "
            "whole optimizer step (batch_num_tokens, global_batch_size) if this is a micro-batch of padding."
        )
    return counted.sum()
