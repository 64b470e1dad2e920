"""Importance weights of the rollout: how they are made of ratios and bounded, and what is told of them."""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from burnish.config.rejection import weight_bounds
from burnish.core_algos.collectives import ONE_RANK, Collective
from burnish.core_algos.policy_difference import LOG_RATIO_BOUND, kept_values
from burnish.utils.errors import ConfigError


def importance_ratios(
    log_ratio: Float[Tensor, "batch response"], mask: Bool[Tensor, "batch response"], rollout_is: str
) -> Float[Tensor, "batch response"]:
    """exp(log r) of each token, or for ``rollout_is=sequence`` of the row, before truncation; 0 outside the mask.

    Raises:
        ConfigError: ``rollout_is`` is neither token nor sequence.
    """
    if rollout_is == "sequence":
        log_ratio = log_ratio.sum(dim=-1, keepdim=True).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    elif rollout_is != "token":
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_is={rollout_is}: there are no such weights. Known: token, sequence."
        )
    return torch.where(mask, log_ratio.exp(), 0.0)


def bounded_weights(
    ratios: Float[Tensor, "batch response"], rollout_is_threshold: str | float
) -> Float[Tensor, "batch response"]:
    """``ratios`` truncated at the threshold; with two bounds 0 outside of them. NaN stays.

    Raises:
        ConfigError: see `burnish.config.rejection.weight_bounds`.
    """
    lower, upper = weight_bounds(rollout_is_threshold)
    if lower is None:
        return ratios.clamp(max=upper)
    return torch.where((ratios < lower) | (ratios > upper), 0.0, ratios)


def mean_weight(
    weights: Float[Tensor, "batch response"], mask: Bool[Tensor, "batch response"], collective: Collective = ONE_RANK
) -> Float[Tensor, ""]:
    """The mean of ``weights`` over the tokens in ``mask`` on all ranks; 1 if there are none, or all of them are 0."""
    here = torch.stack([torch.where(mask, weights, 0.0).sum(), mask.sum().to(weights.dtype)])
    total, num_tokens = collective.sum(here).unbind()
    return torch.where(total == 0, 1.0, total / num_tokens.clamp(min=1))


def weights_of_rows(
    weights: Tensor, ratios: Tensor, mask: Tensor, rollout_is_threshold: str | float
) -> dict[str, Tensor]:
    """Measures of each row, which `weight_metrics` reads; weights and ratios are 0 outside the mask."""
    lower, upper = weight_bounds(rollout_is_threshold)
    total = weights.sum(dim=-1)
    mean = total / mask.sum(dim=-1).clamp(min=1)
    return {
        "weight": total,
        "weight_mean": mean,
        "weight_spread": torch.where(mask, weights - mean.unsqueeze(-1), 0.0).square_().sum(dim=-1),
        "ratio_max": largest(ratios, mask),
        "ratio_min": -largest(-ratios, mask),
        "num_high": (ratios > upper).sum(dim=-1).double(),
        "num_low": (mask & (ratios < (1.0 / upper if lower is None else lower))).sum(dim=-1).double(),
    }


def weight_metrics(of_rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As `compute_rollout_correction_and_rejection_mask` has them, for weights that are not normalised."""
    length = of_rows["length"]
    counts, num_tokens = length > 0, length.sum().clamp(min=1)
    mean = of_rows["weight"].sum() / num_tokens
    # In two passes: the spread within the rows, and that of the rows' means.
    between = length * (of_rows["weight_mean"] - mean).square()
    variance = (of_rows["weight_spread"] + between).sum() / num_tokens
    seq_means = kept_values(of_rows["weight_mean"], counts)
    return {
        "rollout_is_mean": mean,
        "rollout_is_std": variance.sqrt(),
        "rollout_is_max": kept_values(of_rows["ratio_max"], counts).max(),
        "rollout_is_min": kept_values(of_rows["ratio_min"], counts).min(),
        # Of weights that are all 0, and of an empty mask.
        "rollout_is_eff_sample_size": mean.square() / (variance + mean.square()).clamp(min=1e-300),
        "rollout_is_ratio_fraction_high": of_rows["num_high"].sum() / num_tokens,
        "rollout_is_ratio_fraction_low": of_rows["num_low"].sum() / num_tokens,
        "rollout_is_seq_mean": seq_means.mean(),
        "rollout_is_seq_std": seq_means.std(correction=0),
        "rollout_is_seq_max": seq_means.max(),
        "rollout_is_seq_min": seq_means.min(),
    }


def largest(values: Tensor, mask: Tensor) -> Tensor:
    """The greatest value of each row inside the mask; -inf where it has none."""
    return torch.where(mask, values, -math.inf).amax(dim=-1)
