"""What all estimators share: their names, the registry, what they refuse, and the rules for groups.

Notation: m = response mask, r_t = rewards per token, s = sum_t r_t, g = group (rows of one uid).
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from burnish.core_algos.blocks import over_rows, row_lengths, zeroed_outside
from burnish.core_algos.groups import GroupIndex, Groups
from burnish.utils.errors import TrainingError
from burnish.utils.foreign_code import form
from burnish.utils.registry import Registry
from burnish.utils.torch_functional import as_mask, at_least_fp32, check_finite, check_shapes

TokenRewards = Float[Tensor, "batch response"]
AdvantagesAndReturns = tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]
# The sizes of the other inputs are compared with the rewards' by the estimators themselves, in production too, and by
# a message that names the input. The underscores keep the annotations from getting there first.
TokenMask = Shaped[Tensor, "_batch _response"]
PerToken = Float[Tensor, "_batch _response"]
PerRow = Float[Tensor, "_batch"]


class AdvantageEstimator(StrEnum):
    """Names of the built-in estimators, as in ``algorithm.adv_estimator``."""

    GAE = "gae"
    GRPO = "grpo"
    GRPO_VECTORIZED = "grpo_vectorized"
    GRPO_PASSK = "grpo_passk"
    RLOO = "rloo"
    RLOO_VECTORIZED = "rloo_vectorized"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    OPO = "opo"
    GPG = "gpg"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"
    GDPO = "gdpo"


@runtime_checkable
class AdvantageSettings(Protocol):
    """What estimators read of the ``algorithm`` section."""

    @property
    def gamma(self) -> float: ...

    @property
    def allow_single_sample_groups(self) -> bool: ...


ADV_ESTIMATORS: Registry[Callable[..., AdvantagesAndReturns]] = Registry(
    "advantage estimator", "algorithm.adv_estimator"
)


def register_adv_est(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that registers an estimator under ``name`` (a string or an `AdvantageEstimator`)."""
    return ADV_ESTIMATORS.register(str(name))


def get_adv_estimator_fn(name: str) -> Callable[..., AdvantagesAndReturns]:
    """The estimator called ``name``, or the one at ``package.module:attribute``.

    Raises:
        ConfigError: no such estimator; lists the choices.
    """
    return ADV_ESTIMATORS.get(str(name))


def check_advantages(name: str, got: Any, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """What the estimator called ``name`` returned, if it is two tensors of this shape.

    Raises:
        TrainingError: it is not; says what it is.
    """
    is_right = isinstance(got, tuple | list) and len(got) == 2
    if not is_right or not all(isinstance(part, Tensor) and part.shape == shape for part in got):
        raise TrainingError(
            f"The advantage estimator {name} returned {form(got)}. It must return (advantages, returns), two tensors "
            f"[batch, response], here of shape {tuple(shape)}."
        )
    return got[0], got[1]


def check_inputs(
    token_level_rewards: TokenRewards, response_mask: TokenMask, **per_token: PerToken
) -> Bool[Tensor, "batch response"]:
    """The response mask as a bool tensor, after a look at everything that has one entry per token.

    Args:
        token_level_rewards: r.
        response_mask: m, bool or 0/1.
        per_token: further inputs of the estimator, by the names of its parameters.

    Raises:
        TrainingError: an input of another shape than the rewards, a mask that holds other values than 0 and 1 or not a
            single 1, NaN or inf inside the mask; it names the input.
    """
    mask = as_mask(response_mask, token_level_rewards, "response_mask")
    check_any_token(mask)
    check_shapes(token_level_rewards, **per_token)
    refuse_non_finite(mask, token_level_rewards=token_level_rewards, **per_token)
    return mask


def check_any_token(mask: Bool[Tensor, "batch response"]) -> None:
    """Refuses a response mask without a single 1.

    Raises:
        TrainingError: it names the mask.
    """
    if not mask.any():
        raise TrainingError(
            f"response_mask holds no 1 in {len(mask)} rows of {mask.shape[1]} tokens: "
            f"mark the tokens that the policy sampled; without one there is nothing to give an advantage to."
        )


def refuse_non_finite(mask: Bool[Tensor, "*shape"], **tensors: Float[Tensor, "*shape"]) -> None:
    """Refuses NaN and inf inside ``mask``, whatever the device.

    Raises:
        TrainingError: it names the tensor and the place.
    """
    for name, tensor in tensors.items():
        # A sum reads the tensor once and is finite nearly always; only else is it worth looking where, and what is masked.
        if not tensor.sum().isfinite():
            check_finite(mask.cpu(), **{name: tensor.cpu()})


def check_rows(mask: Bool[Tensor, "batch response"], **per_row: PerRow) -> None:
    """Refuses inputs with another number of rows than ``mask``, and NaN and inf in rows that have a token.

    Raises:
        TrainingError: it names the input.
    """
    for name, tensor in per_row.items():
        if len(tensor) != len(mask):
            raise TrainingError(f"{name} has {len(tensor)} rows for a batch of {len(mask)}: pass one entry per row.")
        refuse_non_finite(mask.any(dim=-1), **{name: tensor})


def outcome_scores(token_level_rewards: TokenRewards, mask: Bool[Tensor, "batch response"]) -> Float[Tensor, " batch"]:
    """s = sum_t r_t in float64. Not masked, but what is not finite outside the mask is padding and no reward."""
    rewards = at_least_fp32(token_level_rewards)
    scores = rewards.sum(dim=-1)
    if not scores.isfinite().all():
        scores = torch.where(mask | rewards.isfinite(), rewards, 0.0).sum(dim=-1)
    return scores.double()


def grouped_outcomes(
    token_level_rewards: TokenRewards, response_mask: TokenMask, index: GroupIndex
) -> tuple[Bool[Tensor, "batch response"], Float[Tensor, " batch"], Groups]:
    """What an estimator that compares rows begins with: m, s and the groups, after `check_inputs`.

    Raises:
        TrainingError: see `check_inputs` and `Groups.of`.
    """
    mask = check_inputs(token_level_rewards, response_mask)
    scores = outcome_scores(token_level_rewards, mask)
    return mask, scores, Groups.of(index, len(scores), scores.device)


def single_rows_count(config: AdvantageSettings | None, num_repeat: int) -> bool:
    """Whether a row alone in its group is what was asked for, and not what abstained siblings left behind."""
    return config is not None and config.allow_single_sample_groups and num_repeat == 1


def settle(
    advantages: Float[Tensor, " batch"],
    scores: Float[Tensor, " batch"],
    groups: Groups,
    alone: Float[Tensor, " batch"] | None,
) -> Float[Tensor, " batch"]:
    """Gives the rows that have nothing to be compared with their advantage.

    Groups of equal scores (max == min) get exactly 0: float noise divided by a tiny deviation is not an advantage.
    So does a row that is alone in its group, being what its siblings left behind; where single rows are wanted
    (one response per prompt and ``algorithm.allow_single_sample_groups``) it gets ``alone`` instead.
    """
    settled = torch.where(groups.is_constant(scores)[groups.ids], 0.0, advantages)
    return settled if alone is None else torch.where(groups.is_single[groups.ids], alone, settled)


def whiten_outcomes(
    advantages: Float[Tensor, " batch"],
    mask: Bool[Tensor, "batch response"],
    counts: Bool[Tensor, " batch"],
) -> Float[Tensor, " batch"]:
    """Whitens what every token of a row shares over the tokens of m: (A - mean) * rsqrt(var + 1e-8), var unbiased.

    A row weighs as much as it has tokens, so this equals whitening the broadcast matrix, without making one.

    Args:
        advantages: A, one per row.
        mask: m.
        counts: the rows in the mean and the variance; the others get exactly 0.
    """
    num_tokens = torch.where(counts, row_lengths(mask), 0).double()
    total = num_tokens.sum()
    # Shifted by one of the values first: equal ones have a mean without rounding then, and become exactly 0.
    centered = advantages - advantages[num_tokens.argmax()]
    centered = centered - (num_tokens * centered).sum() / total.clamp(min=1)
    variance = (num_tokens * centered.square()).sum() / (total - 1).clamp(min=1)
    return torch.where(counts, centered * torch.rsqrt(torch.where(total < 2, 0.0, variance) + 1e-8), 0.0)


def on_every_token(
    advantages: Float[Tensor, " batch"], like: TokenRewards, mask: Bool[Tensor, "batch response"]
) -> AdvantagesAndReturns:
    """The advantage of its row on every token of m, as advantages and as returns."""
    advantages = advantages.to(torch.promote_types(like.dtype, torch.float32)).unsqueeze(-1).expand_as(like)
    # Two tensors, not one under two names: whoever changes the advantages in place must not change the returns.
    first, second = torch.empty_like(like, dtype=advantages.dtype), torch.empty_like(like, dtype=advantages.dtype)

    def spread(rows: slice) -> None:
        first[rows] = second[rows] = zeroed_outside(mask[rows], advantages[rows])

    over_rows(spread, mask)
    return first, second
