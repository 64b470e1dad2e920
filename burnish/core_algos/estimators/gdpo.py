"""GDPO: several rewards, each normalised within its groups before they are added up."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from burnish.core_algos.estimators.base import (
    AdvantageEstimator,
    AdvantagesAndReturns,
    AdvantageSettings,
    TokenMask,
    TokenRewards,
    check_inputs,
    check_rows,
    on_every_token,
    register_adv_est,
    settle,
    single_rows_count,
    whiten_outcomes,
)
from burnish.core_algos.groups import GroupIndex, Groups
from burnish.utils.errors import TrainingError


@runtime_checkable
class GDPOSettings(AdvantageSettings, Protocol):
    """What this estimator reads of the ``algorithm`` section."""

    @property
    def gdpo_reward_weights(self) -> Sequence[float] | None: ...


@register_adv_est(AdvantageEstimator.GDPO)
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    token_level_rewards: TokenRewards,
    response_mask: TokenMask,
    index: GroupIndex,
    reward_components: Float[Tensor, "_batch _component"],
    epsilon: float | int = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: GDPOSettings | None = None,
    num_repeat: int = 1,
) -> AdvantagesAndReturns:
    """A = sum_k w_k (c_k - mean_g c_k) / (std_g c_k + epsilon), whitened over the tokens of m (arXiv:2601.05242).

    A component of equal values in a group adds exactly 0 to it. Groups in which no weighted component varies get exactly
    0 and are not in the whitening's mean and variance; so do rows alone in their group (see `settle`).

    Args:
        token_level_rewards: r [batch, response]; the components stand in for it, so its values take no part.
        response_mask: m [batch, response], bool or 0/1.
        index: uid per row.
        reward_components: c [batch, component], in the order of ``algorithm.gdpo_reward_keys``.
        epsilon: added to the standard deviation.
        norm_adv_by_std_in_grpo: whether to divide by the standard deviation (unbiased).
        config: the ``algorithm`` section, for ``gdpo_reward_weights`` (None: 1 each) and ``allow_single_sample_groups``.
        num_repeat: responses sampled per prompt.

    Returns:
        advantages, and again as returns: A on every token of m.

    Raises:
        TrainingError: see `check_inputs` and `Groups.of`; components that do not fit the rows or the weights, or are NaN or
            inf in a row with a token.
    """
    mask = check_inputs(token_level_rewards, response_mask)
    weights = _weights(config, reward_components.shape[1])
    check_rows(mask, **{f"reward_components[:, {k}]": reward_components[:, k] for k in range(len(weights))})
    groups = Groups.of(index, len(mask), mask.device)
    # What is not finite here is in a row without a token.
    components = torch.where(reward_components.isfinite(), reward_components, 0.0).to(mask.device, torch.float64)
    single = single_rows_count(config, num_repeat)
    total = torch.zeros_like(components[:, 0])
    varies = torch.zeros_like(groups.is_single)
    for weight, values in zip(weights, components.T, strict=True):
        advantages, alone = values - groups.mean(values)[groups.ids], values
        if norm_adv_by_std_in_grpo:
            advantages, alone = advantages / (groups.std(values)[groups.ids] + epsilon), values / (1 + epsilon)
        total += weight * settle(advantages, values, groups, alone if single else None)
        if weight != 0:
            varies |= ~groups.is_constant(values)
    counts = (varies | groups.is_single if single else varies)[groups.ids]
    return on_every_token(whiten_outcomes(total, mask, counts), token_level_rewards, mask)


def _weights(config: GDPOSettings | None, num_components: int) -> Sequence[float]:
    weights = None if config is None else config.gdpo_reward_weights
    if weights is None:
        weights = [1.0] * num_components
    if len(weights) != num_components or not weights:
        raise TrainingError(
            f"reward_components holds {num_components} rewards per row and gdpo_reward_weights {len(weights)} weights: "
            f"give every component of algorithm.gdpo_reward_keys one weight."
        )
    return weights
