"""Correction of the difference between the policy that sampled the tokens and the policy that is trained on them.

The two differ by precision, by kernels, or by updates in between. Two remedies, each alone or both together: importance
weights (``rollout_is``), which a loss multiplies, and rejection (``rollout_rs``), which takes tokens or whole rows out of
the loss mask. The response mask, which says what was sampled, never changes.

Notation: log r = old_log_prob - rollout_log_prob, within +-20 per token; m = the mask that is given; a row counts if it
has a token in m. All of this is in float64 and without gradient.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from burnish.config.rejection import RejectionRule, parse_rejection
from burnish.core_algos.collectives import ONE_RANK, Collective
from burnish.protocol import DataProto
from burnish.utils.errors import ConfigError, TrainingError
from burnish.utils.torch_functional import as_mask, at_least_fp32, check_finite, zero_outside

# exp(20) = 5e8: no weight that is meant is near it, and its square and its sums stay finite.
LOG_RATIO_BOUND = 20.0


@runtime_checkable
class RolloutCorrectionSettings(Protocol):
    """What is read here of the section ``algorithm.rollout_correction``."""

    @property
    def rollout_is(self) -> str | None: ...

    @property
    def rollout_is_threshold(self) -> float: ...

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
    mask = as_mask(batch["response_mask"], batch["old_log_probs"], "response_mask")
    if "loss_mask" in batch:
        mask = mask & as_mask(batch["loss_mask"], mask, "loss_mask")
    if "valid" in batch:
        mask = mask & as_mask(batch["valid"], mask.any(dim=-1), "valid").unsqueeze(-1)
    weights, loss_mask, metrics = compute_rollout_correction_and_rejection_mask(
        batch["old_log_probs"], batch["rollout_log_probs"], mask, config
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
    min(exp(sum of log r over m), threshold), the sum within +-20. ``rollout_is_batch_normalize`` then divides by the mean
    of w over the tokens that are left in the mask, so that normalised weights do not change the size of the loss.
    Deviation: verl normalises over m, rejected tokens included, and sequence weights by a mean over rows.

    Args:
        old_log_prob: of the policy that is trained, before the update.
        rollout_log_prob: of the policy that sampled.
        response_mask: m, bool or 0/1: the response mask, or a loss mask.
        config: the section ``algorithm.rollout_correction``.

    Returns:
        weights: in fp32 or wider, zero outside m; a rejected token has one too. None without ``rollout_is``.
        mask: m without what `compute_rollout_rejection_mask` rejects; a new tensor.
        metrics: those of `compute_offpolicy_metrics` and `compute_rollout_rejection_mask`, and of w, before it is
            normalised, over the tokens of m (``rollout_corr/rollout_is_*``):

            ============================ ================================================================
            mean, std                    of w; std with divisor N
            max, min                     of exp(log r), or of exp(sum), before it is truncated
            eff_sample_size              mean(w)^2 / mean(w^2), from 0 to 1
            ratio_fraction_high, _low    share of tokens above the threshold (truncated), below 1 / threshold
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
    log_ratio = rollout_log_ratio(old_log_prob, rollout_log_prob, mask)
    metrics = _offpolicy_metrics(old_log_prob, rollout_log_prob, log_ratio, mask)
    rules = parse_rejection(config.rollout_rs, config.rollout_rs_threshold)
    kept, rejection_metrics = compute_rollout_rejection_mask(log_ratio, mask, rules)
    metrics |= rejection_metrics
    if config.rollout_is is None:
        return None, kept, metrics
    ratios = importance_ratios(log_ratio, mask, config.rollout_is)
    weights = ratios.clamp(max=config.rollout_is_threshold)
    weight_metrics = _weight_metrics(weights, ratios, mask, config.rollout_is_threshold)
    if config.rollout_is_batch_normalize:
        factor = mean_weight(weights, kept)
        weight_metrics["rollout_is_batch_norm_factor"] = factor
        weights = weights / factor
    return weights.to(at_least_fp32(old_log_prob).dtype), kept, metrics | _logged(weight_metrics)


def rollout_log_ratio(
    old_log_prob: Float[Tensor, "batch response"],
    rollout_log_prob: Float[Tensor, "batch response"],
    mask: Bool[Tensor, "batch response"],
) -> Float[Tensor, "batch response"]:
    """log r = old_log_prob - rollout_log_prob within +-20, in float64 and without gradient; 0 outside the mask."""
    old, rollout = zero_outside(mask, old_log_prob=old_log_prob.detach(), rollout_log_prob=rollout_log_prob.detach())
    # Numbers of one size have an exact difference as they are; what is summed over it is not exact in fp32.
    return (old - rollout).double().clamp_(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


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


def mean_weight(
    weights: Float[Tensor, "batch response"], mask: Bool[Tensor, "batch response"], collective: Collective = ONE_RANK
) -> Float[Tensor, ""]:
    """The mean of ``weights`` over the tokens in ``mask`` on all ranks; 1 if there are none."""
    here = torch.stack([torch.where(mask, weights, 0.0).sum(), mask.sum().to(weights.dtype)])
    total, num_tokens = collective.sum(here).unbind()
    return torch.where(num_tokens > 0, total / num_tokens.clamp(min=1), 1.0)


@torch.no_grad()
def compute_rollout_rejection_mask(
    log_ratio: Float[Tensor, "batch response"],
    mask: Bool[Tensor, "batch response"],
    rules: Sequence[RejectionRule],
) -> tuple[Bool[Tensor, "batch response"], dict[str, float]]:
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
        metrics: ``rollout_corr/rollout_rs_masked_fraction`` (share of the tokens of m that are rejected) and
            ``rollout_rs_seq_masked_fraction`` (share of the rows with a rejected token), and the same of each rule alone
            as ``rollout_rs_NAME_masked_fraction`` and so on, with the mean, max and min of its statistic
            (``rollout_rs_NAME_mean``), over tokens or rows as the rule has it; for ``seq_max_k1``, of the largest
            abs(log r). Empty without rules.
    """
    kept, metrics = mask.clone(), dict[str, Tensor]()
    rows = mask.any(dim=-1)
    for rule in rules:
        statistic, rejected = _judge(log_ratio, mask, rule)
        kept &= ~rejected
        name = f"rollout_rs_{rule.name}"
        values = _values(statistic, mask if statistic.dim() == 2 else rows)
        metrics |= {f"{name}_mean": values.mean(), f"{name}_max": values.max(), f"{name}_min": values.min()}
        metrics |= _fractions(name, mask & rejected, mask)
    if rules:
        metrics |= _fractions("rollout_rs", mask & ~kept, mask)
    return kept, _logged(metrics)


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


def k_statistic(log_ratio: Float[Tensor, "..."], estimator: str) -> Float[Tensor, "..."]:
    """k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r (Schulman's note on approximating KL divergence)."""
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(log_ratio) - log_ratio


def _outside(values: Tensor, low: float, high: float) -> Tensor:
    """Not the negation of "within": NaN is neither, and stays."""
    return (values < low) | (values > high)


@torch.no_grad()
def compute_offpolicy_metrics(
    old_log_prob: Float[Tensor, "batch response"],
    rollout_log_prob: Float[Tensor, "batch response"],
    response_mask: Shaped[Tensor, "batch response"],
) -> dict[str, float]:
    """How far the policy that sampled is from the policy that is trained.

    ``rollout_corr/...``, with log ppl_i = -(mean log-prob of the tokens of row i), d_i = -(mean log r of row i), which is
    log ppl_i of the trained policy less that of the rollout; "rows" are those with a token in m:

    =============================== ==================================================================
    kl                              mean over tokens of -log r, an estimate of KL(rollout || old)
    k3_kl                           mean over tokens of r - 1 - log r, the same without negative values
    chi2_token                      mean over tokens of r^2, less 1
    chi2_seq                        mean over rows of exp(2 sum log r), the sum within +-20, less 1
    training_ppl, rollout_ppl       mean over rows of ppl_i, log ppl_i within +-20
    training_log_ppl, rollout_...   mean over rows of log ppl_i
    log_ppl_diff, log_ppl_abs_diff  mean over rows of d_i, of abs(d_i)
    log_ppl_diff_max, _min          the largest and smallest d_i
    ppl_ratio                       mean over rows of exp(d_i)
    =============================== ==================================================================

    Where the policies agree, kl, k3_kl, chi2 and the differences are 0 and ppl_ratio is 1. An empty m counts as one token
    of probability 1 on which they agree.

    Args:
        old_log_prob: of the policy that is trained, before the update.
        rollout_log_prob: of the policy that sampled.
        response_mask: m, bool or 0/1.

    Raises:
        TrainingError: shapes that differ, a mask that is none, NaN or inf inside it.
    """
    mask = as_mask(response_mask, old_log_prob, "response_mask")
    check_finite(mask, old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob)
    log_ratio = rollout_log_ratio(old_log_prob, rollout_log_prob, mask)
    return _offpolicy_metrics(old_log_prob, rollout_log_prob, log_ratio, mask)


def _offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor, log_ratio: Tensor, mask: Tensor
) -> dict[str, float]:
    rows, lengths = mask.any(dim=-1), mask.sum(dim=-1).clamp(min=1)
    log_probs = zero_outside(mask, old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob)
    sums = (log_prob.sum(dim=-1, dtype=torch.float64) for log_prob in log_probs)
    training, rollout = (_values(-of_row / lengths, rows) for of_row in sums)
    sum_of_row = log_ratio.sum(dim=-1)
    difference = _values(-sum_of_row / lengths, rows)
    bounded_sum = _values(sum_of_row, rows).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    per_token = _values(log_ratio, mask)
    ratio_less_one = per_token.expm1()
    metrics = {
        "kl": -per_token.mean(),
        # The mean of r - 1 - log r, and of r^2 - 1 = (r - 1)^2 + 2 (r - 1).
        "k3_kl": (ratio_less_one - per_token).mean(),
        "chi2_token": ratio_less_one.square().mean() + 2 * ratio_less_one.mean(),
        "chi2_seq": (2 * bounded_sum).expm1().mean(),
        "training_ppl": training.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().mean(),
        "rollout_ppl": rollout.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().mean(),
        "training_log_ppl": training.mean(),
        "rollout_log_ppl": rollout.mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
    }
    return _logged(metrics)


def _weight_metrics(weights: Tensor, ratios: Tensor, mask: Tensor, threshold: float) -> dict[str, Tensor]:
    """As `compute_rollout_correction_and_rejection_mask` has them, for weights that are not normalised."""
    of_tokens, before = _values(weights, mask), _values(ratios, mask)
    of_rows = _values(weights.sum(dim=-1) / mask.sum(dim=-1).clamp(min=1), mask.any(dim=-1))
    return {
        "rollout_is_mean": of_tokens.mean(),
        "rollout_is_std": of_tokens.std(correction=0),
        "rollout_is_max": before.max(),
        "rollout_is_min": before.min(),
        # Weights are above 0: only an empty mask needs the bound.
        "rollout_is_eff_sample_size": of_tokens.mean().square() / of_tokens.square().mean().clamp(min=1e-300),
        "rollout_is_ratio_fraction_high": _share(mask & (ratios > threshold), mask),
        "rollout_is_ratio_fraction_low": _share(mask & (ratios < 1.0 / threshold), mask),
        "rollout_is_seq_mean": of_rows.mean(),
        "rollout_is_seq_std": of_rows.std(correction=0),
        "rollout_is_seq_max": of_rows.max(),
        "rollout_is_seq_min": of_rows.min(),
    }


def _fractions(name: str, rejected: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return {
        f"{name}_masked_fraction": _share(rejected, mask),
        f"{name}_seq_masked_fraction": _share(rejected.any(dim=-1), mask.any(dim=-1)),
    }


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """The share of the entries that are True in ``whole`` which are so in ``part`` too; 0 of nothing."""
    return part.sum().double() / whole.sum().clamp(min=1)


def _values(values: Tensor, over: Tensor) -> Tensor:
    """``values`` where ``over`` is True, in one dimension; a single 0 if there are none, so that every statistic is finite."""
    kept = values[over]
    return kept if kept.numel() else kept.new_zeros(1)


def _logged(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """With the prefix of all of them, and as numbers: brought over from a GPU at once."""
    if not metrics:
        return {}
    numbers = torch.stack([value.double() for value in metrics.values()]).tolist()
    return {f"rollout_corr/{name}": number for name, number in zip(metrics, numbers, strict=True)}
