"""Correction of the difference between the policy that sampled the tokens and the policy that is trained on them.

The two differ by precision, by kernels, or by updates in between. Two remedies, each alone or both together: importance
weights (``rollout_is``), which a loss multiplies, and rejection (``rollout_rs``), which takes tokens or whole rows out of
the loss mask. The response mask, which says what was sampled, never changes.

Notation: log r = old_log_prob - rollout_log_prob, within +-20 per token; m = the mask that is given; a row counts if it
has a token in m. All of this is in float64, without gradient, and a block of rows at a time.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from burnish.config.rejection import RejectionRule, parse_rejection
from burnish.core_algos.importance_weights import (
    bounded_weights,
    importance_ratios,
    largest,
    weight_metrics,
    weights_of_rows,
)
from burnish.core_algos.masks import loss_mask_of
from burnish.core_algos.policy_difference import (
    difference_metrics,
    difference_of_rows,
    joined,
    k_statistic,
    kept_values,
    logged,
    map_rows,
    rollout_log_ratio,
)
from burnish.protocol import DataProto
from burnish.utils.errors import TrainingError
from burnish.utils.torch_functional import as_mask, at_least_fp32, check_finite


@runtime_checkable
class RolloutCorrectionSettings(Protocol):
    """What is read here of the section ``algorithm.rollout_correction``."""

    @property
    def rollout_is(self) -> str | None: ...

    @property
    def rollout_is_threshold(self) -> str | float: ...

    @property
    def rollout_rs(self) -> str | None: ...

    @property
    def rollout_rs_threshold(self) -> str | float | None: ...

    @property
    def rollout_is_batch_normalize(self) -> bool: ...


def compute_rollout_correction_and_add_to_batch(
    data: DataProto, config: RolloutCorrectionSettings
) -> tuple[DataProto, dict[str, float]]:
    """Adds ``loss_mask`` without what ``rollout_rs`` rejects, and ``rollout_is_weights`` where ``rollout_is`` is set.

    The loss mask starts from the one in the batch, or else from ``response_mask``, without the rows that are not
    ``valid``. If everything is rejected it comes out empty, and the metrics say so.

    Args:
        data: holds ``old_log_probs``, ``rollout_log_probs``, ``response_mask``, maybe ``loss_mask`` and ``valid``.
        config: the section ``algorithm.rollout_correction``.

    Returns:
        ``data`` itself, and the metrics of `compute_rollout_correction_and_rejection_mask`.

    Raises:
        TrainingError: the batch has no log-probs of the one policy or the other, or they hold NaN or inf inside the mask.
    """
    batch = data.tensors
    for key, source in (
        ("rollout_log_probs", "the rollout returns them with actor_rollout_ref.rollout.calculate_log_probs=true"),
        ("old_log_probs", "the trainer computes them before the update"),
    ):
        if key not in batch:
            held = ", ".join(sorted(map(str, batch.keys())))
            raise TrainingError(
                f"The batch has no {key!r} (it holds {held}), so the two policies cannot be compared: {source}."
            )
    weights, loss_mask, metrics = compute_rollout_correction_and_rejection_mask(
        batch["old_log_probs"], batch["rollout_log_probs"], loss_mask_of(batch, batch["old_log_probs"]), config
    )
    batch["loss_mask"] = loss_mask
    if weights is not None:
        batch["rollout_is_weights"] = weights
    return data, metrics


@torch.no_grad()
def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Float[Tensor, "batch response"],
    rollout_log_prob: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
    config: RolloutCorrectionSettings,
) -> tuple[Float[Tensor, "batch response"] | None, Bool[Tensor, "batch response"], dict[str, float]]:
    """Importance weights, the mask without what is rejected, and how far the two policies are apart.

    w = min(exp(log r), ``rollout_is_threshold``) for ``rollout_is=token``; for ``sequence`` every token of a row gets
    min(exp(sum of log r over m), threshold), the sum within +-20. With two bounds, "lower_upper", weights outside of them are
    0 instead (IcePop). ``rollout_is_batch_normalize`` then divides by the mean
    of w over the tokens that are left in the mask, so that normalised weights do not change the size of the loss.
    Deviation: verl normalises over m, rejected tokens included, and sequence weights by a mean over rows.

    Args:
        old_log_prob: of the policy that is trained, before the update.
        rollout_log_prob: of the policy that sampled.
        response_mask: m, bool or 0/1: the response mask, or a loss mask.
        config: the section ``algorithm.rollout_correction``.

    Returns:
        weights: in fp32 or wider, zero outside m; a rejected token has one too. None without ``rollout_is``.
        mask: m without what `reject` rejects; a new tensor.
        metrics: those of `compute_offpolicy_metrics` and `rejection_metrics`, and of w, before it is
            normalised, over the tokens of m (``rollout_corr/rollout_is_*``):

            ============================ ================================================================
            mean, std                    of w; std with divisor N
            max, min                     of exp(log r), or of exp(sum), before it is truncated
            eff_sample_size              mean(w)^2 / mean(w^2), from 0 to 1
            ratio_fraction_high, _low    share of tokens above the threshold (truncated), below 1 / threshold, or
                                         above the upper and below the lower of two bounds (both 0)
            seq_mean, _std, _max, _min   of the means of w over the tokens of each row
            batch_norm_factor            what w was divided by, if it was
            ============================ ================================================================

            All are finite; 0 if m is empty.

    Raises:
        ConfigError: an unknown ``rollout_is``, or see `parse_rejection`.
        TrainingError: shapes that differ, a mask that is none, NaN or inf inside it.
    """
    mask = as_mask(response_mask, old_log_prob, "response_mask")
    check_finite(mask, old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob)
    rules = parse_rejection(config.rollout_rs, config.rollout_rs_threshold)

    def correct(rows: slice) -> tuple[Tensor | None, Tensor, dict[str, Tensor]]:
        return _correct_rows(old_log_prob[rows], rollout_log_prob[rows], mask[rows], rules, config)

    blocks = map_rows(correct, mask)
    of_rows = joined([measures for _, _, measures in blocks])
    kept = torch.cat([kept for _, kept, _ in blocks])
    metrics = difference_metrics(of_rows) | rejection_metrics(of_rows, rules)
    if config.rollout_is is None:
        return None, kept, metrics
    weights = torch.cat([weights for weights, _, _ in blocks if weights is not None])
    of_weights = weight_metrics(of_rows)
    if config.rollout_is_batch_normalize:
        total = of_rows["kept_weight"].sum()
        factor = torch.where(total == 0, 1.0, total / of_rows["num_kept"].sum().clamp(min=1))
        of_weights["rollout_is_batch_norm_factor"] = factor
        weights = weights / factor.to(weights.dtype)
    return weights, kept, metrics | logged(of_weights)


def _correct_rows(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor,
    rules: Sequence[RejectionRule],
    config: RolloutCorrectionSettings,
) -> tuple[Tensor | None, Tensor, dict[str, Tensor]]:
    """(weights before they are normalised, what is kept of the mask, measures [rows]) of a block of rows."""
    log_ratio = rollout_log_ratio(old_log_prob, rollout_log_prob, mask)
    of_rows = difference_of_rows(log_ratio, old_log_prob, rollout_log_prob, mask)
    kept, of_rules = reject(log_ratio, mask, rules)
    of_rows |= of_rules
    if config.rollout_is is None:
        return None, kept, of_rows
    ratios = importance_ratios(log_ratio, mask, config.rollout_is)
    weights = bounded_weights(ratios, config.rollout_is_threshold)
    of_rows |= weights_of_rows(weights, ratios, mask, config.rollout_is_threshold)
    of_rows |= {"kept_weight": torch.where(kept, weights, 0.0).sum(dim=-1), "num_kept": kept.sum(dim=-1).double()}
    return weights.to(at_least_fp32(old_log_prob).dtype), kept, of_rows


@torch.no_grad()
def reject(
    log_ratio: Float[Tensor, "batch response"],
    mask: Bool[Tensor, "batch response"],
    rules: Sequence[RejectionRule],
) -> tuple[Bool[Tensor, "batch response"], dict[str, Float[Tensor, " batch"]]]:
    """The mask without what any of ``rules`` rejects; every rule looks at the whole mask.

    A rule has a statistic: k1 = -log r, k2 = (log r)^2 / 2 or k3 = r - 1 - log r. ``token`` compares that of each token
    with the bounds and rejects tokens; ``seq_sum`` and ``seq_mean`` compare its sum or mean over the tokens of the row,
    and ``seq_max`` that of every token, and reject whole rows. The bounds of k1 are ratios: lower <= r <= upper, where r
    is exp(log r) of the token, exp(sum of log r) or exp(mean of log r) of the row. k2 and k3 must not exceed upper. So
    ``seq_max`` rejects a row where ``token`` rejects a token, and with bounds 1/v to v its k1 looks at the largest
    abs(log r). Deviation: verl's k1 compares 1/r with the bounds, which differs where they are not 1/v to v.

    A token of NaN is never rejected, nor is its row: NaN must not vanish, but surface in the loss.

    Args:
        log_ratio: log r, 0 outside the mask (see `rollout_log_ratio`).
        mask: m.
        rules: from `burnish.config.rejection.parse_rejection`.

    Returns:
        mask: a new tensor.
        of_rows: measures of each row, which `rejection_metrics` reads.
    """
    kept, of_rows = mask.clone(), dict[str, Tensor]()
    for rule in rules:
        statistic, rejected = _judge(log_ratio, mask, rule)
        kept &= ~rejected
        of_rows |= {
            f"{rule.name}_sum": statistic if statistic.dim() == 1 else statistic.sum(dim=-1),
            f"{rule.name}_max": statistic if statistic.dim() == 1 else largest(statistic, mask),
            f"{rule.name}_min": statistic if statistic.dim() == 1 else -largest(-statistic, mask),
            f"{rule.name}_rejected": (mask & rejected).sum(dim=-1).double(),
        }
    of_rows["rejected"] = (mask & ~kept).sum(dim=-1).double()
    return kept, of_rows


def rejection_metrics(
    of_rows: Mapping[str, Float[Tensor, " batch"]], rules: Sequence[RejectionRule]
) -> dict[str, float]:
    """What rejection took, and what it looked at; empty without rules.

    Args:
        of_rows: from `reject` and `difference_of_rows`.
        rules: those that were given to `reject`.

    Returns:
        ``rollout_corr/rollout_rs_masked_fraction`` (share of the tokens of m that are rejected) and
        ``rollout_rs_seq_masked_fraction`` (share of the rows with a rejected token), and the same of each rule alone as
        ``rollout_rs_NAME_masked_fraction`` and so on, with the mean, max and min of its statistic (``rollout_rs_NAME_mean``),
        over tokens or rows as the rule has it; for ``seq_max_k1``, of the largest abs(log r).
    """
    length = of_rows["length"]
    counts = length > 0
    metrics: dict[str, Tensor] = {}
    for rule in rules:
        name = f"rollout_rs_{rule.name}"
        of_what = length.sum() if rule.level == "token" else counts.sum()
        metrics |= {
            f"{name}_mean": kept_values(of_rows[f"{rule.name}_sum"], counts).sum() / of_what.clamp(min=1),
            f"{name}_max": kept_values(of_rows[f"{rule.name}_max"], counts).max(),
            f"{name}_min": kept_values(of_rows[f"{rule.name}_min"], counts).min(),
        }
        metrics |= _fractions(name, of_rows[f"{rule.name}_rejected"], length)
    if rules:
        metrics |= _fractions("rollout_rs", of_rows["rejected"], length)
    return logged(metrics)


def _fractions(name: str, rejected: Tensor, length: Tensor) -> dict[str, Tensor]:
    return {
        f"{name}_masked_fraction": rejected.sum() / length.sum().clamp(min=1),
        f"{name}_seq_masked_fraction": (rejected > 0).sum() / (length > 0).sum().clamp(min=1),
    }


def _judge(log_ratio: Tensor, mask: Tensor, rule: RejectionRule) -> tuple[Tensor, Tensor]:
    """The rule's statistic, of each token or of each row, and the entries [batch, response] that it rejects."""
    # 0 outside the mask, as log r is, and 0 lies within all bounds.
    per_token = k_statistic(log_ratio, rule.estimator)
    low, high = (-math.inf, rule.upper) if rule.lower is None else (-math.log(rule.upper), -math.log(rule.lower))
    if rule.level == "token":
        return per_token, _outside(per_token, low, high)
    if rule.level == "seq_max":
        statistic = per_token.abs().amax(dim=-1)
        # The maximum is NaN if one token is.
        rejected = _outside(per_token, low, high).any(dim=-1) & ~statistic.isnan()
    else:
        statistic = per_token.sum(dim=-1)
        if rule.level == "seq_mean":
            statistic = statistic / mask.sum(dim=-1).clamp(min=1)
        rejected = _outside(statistic, low, high)
    return statistic, rejected.unsqueeze(-1).expand_as(mask)


def _outside(values: Tensor, low: float, high: float) -> Tensor:
    """Not the negation of "within": NaN is neither, and stays."""
    return (values < low) | (values > high)
