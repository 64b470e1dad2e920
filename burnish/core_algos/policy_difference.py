"""How far the policy that sampled the tokens is from the policy that is trained on them.

Notation: log r = old_log_prob - rollout_log_prob, within +-20 per token; m = the mask that is given; a row counts if it
has a token in m. All of this is without gradient, and in float64, a few rows at a time: everything here is made of sums
over rows, and a matrix of long responses in float64 is large.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from burnish.core_algos.blocks import over_blocks
from burnish.utils.torch_functional import as_mask, check_finite, zero_outside

# exp(20) = 5e8: no ratio that is meant is near it, and its square and its sums stay finite.
LOG_RATIO_BOUND = 20.0

_ELEMENTS = 1 << 20
"""Elements that are looked at at once: few enough that float64 copies of them are small beside the batch."""

Result = TypeVar("Result")


def map_rows(work: Callable[[slice], Result], matrix: Shaped[Tensor, "batch response"]) -> list[Result]:
    """What ``work`` makes of the rows of ``matrix``, in their order, as `over_blocks` calls it: a block of about a million
    elements at a time, one row at least, and one block without a row if there is none."""
    results: dict[int, Result] = {}

    def keep(rows: slice) -> None:
        results[rows.start] = work(rows)

    over_blocks(keep, max(1, len(matrix)), max(1, _ELEMENTS // max(1, matrix.shape[1])), matrix.device)
    return [results[start] for start in sorted(results)]


def rollout_log_ratio(
    old_log_prob: Float[Tensor, "batch response"],
    rollout_log_prob: Float[Tensor, "batch response"],
    mask: Bool[Tensor, "batch response"],
) -> Float[Tensor, "batch response"]:
    """log r = old_log_prob - rollout_log_prob within +-20, in float64 and without gradient; 0 outside the mask."""
    old, rollout = zero_outside(mask, old_log_prob=old_log_prob.detach(), rollout_log_prob=rollout_log_prob.detach())
    # Numbers of one size have an exact difference as they are; what is summed over it is not exact in fp32.
    return (old - rollout).double().clamp_(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def k_statistic(log_ratio: Float[Tensor, "..."], estimator: str) -> Float[Tensor, "..."]:
    """k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r (Schulman's note on approximating KL divergence)."""
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(log_ratio) - log_ratio


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

    def measure(rows: slice) -> dict[str, Tensor]:
        of_rows = (old_log_prob[rows], rollout_log_prob[rows], mask[rows])
        return difference_of_rows(rollout_log_ratio(*of_rows), *of_rows)

    return difference_metrics(joined(map_rows(measure, mask)))


def difference_of_rows(
    log_ratio: Float[Tensor, "batch response"],
    old_log_prob: Float[Tensor, "batch response"],
    rollout_log_prob: Float[Tensor, "batch response"],
    mask: Bool[Tensor, "batch response"],
) -> dict[str, Float[Tensor, " batch"]]:
    """Of each row: its tokens in the mask, and sums over them, which `difference_metrics` reads."""
    old, rollout = zero_outside(mask, old_log_prob=old_log_prob.detach(), rollout_log_prob=rollout_log_prob.detach())
    ratio_less_one = log_ratio.expm1()
    excess = ratio_less_one.sum(dim=-1)
    return {
        "length": mask.sum(dim=-1).double(),
        "log_ratio": log_ratio.sum(dim=-1),
        # Of r - 1 - log r, and of r^2 - 1 = (r - 1)^2 + 2 (r - 1).
        "k3": (ratio_less_one - log_ratio).sum(dim=-1),
        "chi2": ratio_less_one.square_().sum(dim=-1) + 2 * excess,
        "training": old.sum(dim=-1, dtype=torch.float64),
        "rollout": rollout.sum(dim=-1, dtype=torch.float64),
    }


def difference_metrics(of_rows: Mapping[str, Float[Tensor, " batch"]]) -> dict[str, float]:
    """The metrics of `compute_offpolicy_metrics`."""
    counts = of_rows["length"] > 0
    num_tokens = of_rows["length"].sum().clamp(min=1)
    length, log_ratio, training, rollout = (
        kept_values(of_rows[name], counts) for name in ("length", "log_ratio", "training", "rollout")
    )
    length = length.clamp(min=1)
    difference, training, rollout = -log_ratio / length, -training / length, -rollout / length
    bounded_sum = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return logged(
        {
            "kl": -log_ratio.sum() / num_tokens,
            "k3_kl": of_rows["k3"].sum() / num_tokens,
            "chi2_token": of_rows["chi2"].sum() / num_tokens,
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
    )


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What blocks of rows have measured, as one tensor [batch] for each name."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def kept_values(values: Float[Tensor, " batch"], counts: Bool[Tensor, " batch"]) -> Float[Tensor, " kept"]:
    """``values`` where ``counts``; a single 0 if there are none, so that every statistic is finite."""
    kept = values[counts]
    return kept if kept.numel() else kept.new_zeros(1)


def logged(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """With the prefix of all of them, and as numbers: brought over from a GPU at once."""
    if not metrics:
        return {}
    numbers = torch.stack([value.double() for value in metrics.values()]).tolist()
    return {f"rollout_corr/{name}": number for name, number in zip(metrics, numbers, strict=True)}
