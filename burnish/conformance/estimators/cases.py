"""What every hyper-parameter of an advantage estimator does, as checks that state the value where the formula gives one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.conformance.batches import RaggedBatch, advantage_batch
from burnish.conformance.cases import SettingCase
from burnish.conformance.comparison import close, must
from burnish.conformance.estimators.algorithm import Estimator

_BATCH = advantage_batch(7)
_ONE_ROW_EACH = replace(_BATCH, uids=np.arange(len(_BATCH.mask)))


def _advantages(estimator: Estimator, batch: RaggedBatch = _BATCH, **settings: Any) -> Tensor:
    return estimator(batch, **settings)[0]


def _returns(estimator: Estimator, **settings: Any) -> Tensor:
    return torch.where(_BATCH.mask, estimator(_BATCH, **settings)[1], 0.0)


def _on_mask(values: Tensor) -> Tensor:
    return torch.where(_BATCH.mask, values, 0.0)


def _next_in_mask(values: Tensor) -> Tensor:
    """For every token of the mask the value at the next one of its row, 0 at the last."""
    result = torch.zeros_like(values)
    for row, mask in enumerate(_BATCH.mask):
        places = mask.nonzero().flatten()
        result[row, places[:-1]] = values[row, places[1:]]
    return result


# gamma and lambda


def _gae_gamma(estimator: Estimator) -> None:
    returns = _returns(estimator, gamma=0.0, lam=1.0)
    close("With gamma=0 nothing later counts: the return", returns, _on_mask(_BATCH.rewards))


def _gae_lam(estimator: Estimator) -> None:
    one_step = _on_mask(_BATCH.rewards + 0.9 * _next_in_mask(_BATCH.values))
    close(
        "With lam=0 it is r + gamma V of the next token: the return", _returns(estimator, gamma=0.9, lam=0.0), one_step
    )
    other_values = estimator(replace(_BATCH, values=_BATCH.values + 5.0), gamma=0.9, lam=1.0)[1]
    what = "With lam=1 the critic's values leave the return alone: the return after adding 5 to them"
    close(what, _on_mask(other_values), _returns(estimator, gamma=0.9, lam=1.0))


def _returns_gamma(estimator: Estimator) -> None:
    returns = _returns(estimator, gamma=0.0)
    close("With gamma=0 nothing later counts: the return", returns, _on_mask(_BATCH.rewards))
    recursion = _on_mask(_BATCH.rewards + 0.5 * _next_in_mask(_returns(estimator, gamma=0.5)))
    close("It is r + gamma times the next one: the return with gamma=0.5", _returns(estimator, gamma=0.5), recursion)


# The standard deviation


def _norm_by_std(estimator: Estimator) -> None:
    normalised = _advantages(estimator, norm_adv_by_std_in_grpo=True)
    plain = _advantages(estimator, norm_adv_by_std_in_grpo=False)
    deviations = torch.zeros(len(plain), 1, dtype=torch.float64)
    scores = _BATCH.rewards.sum(dim=1)
    for uid in np.unique(_BATCH.uids):
        group = torch.from_numpy(np.flatnonzero(_BATCH.uids == uid))
        if len(group) > 1:
            deviations[group] = scores[group].std() + 1e-6
    close("Times the group's standard deviation it is that without: the advantage", normalised * deviations, plain)


def _epsilon(estimator: Estimator) -> None:
    plain = _advantages(estimator, norm_adv_by_std_in_grpo=False)
    small, large = _advantages(estimator, epsilon=0.5), _advantages(estimator, epsilon=2.5)
    # plain / small = std + .5 and plain / large = std + 2.5, so their difference is 2 whatever std is.
    counts = plain != 0
    must(counts.any(), "Every advantage is 0.")
    added = plain[counts] / large[counts] - plain[counts] / small[counts]
    close("epsilon is added to the standard deviation: what 2.0 more adds", added, torch.full_like(added, 2.0), 1e-7)


# Groups of one row


def _single_rows(expected: str, value: Callable[[Tensor], Tensor]) -> SettingCase:
    def check(estimator: Estimator) -> None:
        alone = _advantages(estimator, _ONE_ROW_EACH, allow_single_sample_groups=True, num_repeat=1)
        scores = _BATCH.rewards.sum(dim=1, keepdim=True).expand(_BATCH.mask.shape)
        close(f"With one row a group, allowed, {expected}: the advantage", alone, _on_mask(value(scores)))
        for left_over in ({"allow_single_sample_groups": True, "num_repeat": 4}, {"num_repeat": 1}):
            advantages = _advantages(estimator, _ONE_ROW_EACH, **left_over)
            must(not advantages.any(), f"Rows alone in their group get an advantage that is not 0 with {left_over}.")

    return SettingCase(setting="num_repeat", check=check)


def _whitened_scores(scores: Tensor) -> Tensor:
    tokens = scores[_BATCH.mask]
    return (scores - tokens.mean()) / (tokens.var() + 1e-8).sqrt()


def _whitened_components(scores: Tensor) -> Tensor:
    return _whitened_scores(_BATCH.reward_components.sum(dim=1, keepdim=True).expand(scores.shape))


def _rewards_to_go(scores: Tensor) -> Tensor:
    return _BATCH.rewards.flip(1).cumsum(1).flip(1)


# Of single estimators


def _reward_baselines(estimator: Estimator) -> None:
    moved = replace(_BATCH, reward_baselines=_BATCH.reward_baselines + 0.5)
    want = _advantages(estimator) - _on_mask(torch.full_like(_BATCH.rewards, 0.5))
    close("A greedy reward that is 0.5 higher lowers by 0.5 the advantage", _advantages(estimator, moved), want)


def _f_norm(estimator: Estimator) -> None:
    close(
        "f_norm=4 divides by 4: four times the advantage",
        4 * _advantages(estimator, f_norm=4.0),
        _advantages(estimator),
    )


def _alpha(estimator: Estimator) -> None:
    one = _advantages(estimator, alpha=1.0)
    close("alpha=3 multiplies by 3: the advantage", _advantages(estimator, alpha=3.0), 3 * one)
    some_zero = replace(_BATCH, rewards=torch.where(torch.arange(len(one))[:, None] < 6, 0.0, _BATCH.rewards))
    rows, not_zero = len(one), int((some_zero.rewards.sum(dim=1) != 0).sum())
    want = rows / not_zero * _advantages(estimator, some_zero, alpha=1.0)
    what = f"With {not_zero} of {rows} scores not 0, alpha is {rows}/{not_zero}: the advantage"
    close(what, _advantages(estimator, some_zero), want)


def _zero_tail(clock: str) -> SettingCase:
    def check(estimator: Estimator) -> None:
        returns = _returns(estimator)
        with_tail, without = _advantages(estimator), _advantages(estimator, handle_zero_tail=False)
        tail = _alone_in_group(clock)
        must(tail.any(), "No row of the batch is alone at its end.")
        close("Where a row outlasts its group the baseline is 0: the advantage", with_tail[tail], returns[tail])
        close(
            "With handle_zero_tail=false a row alone is its own baseline: the advantage",
            without[tail],
            0 * returns[tail],
            1e-6,
        )
        close("Elsewhere handle_zero_tail changes nothing: the advantage", with_tail[~tail], without[~tail])

    return SettingCase(setting="handle_zero_tail", check=check)


def _alone_in_group(clock: str) -> Tensor:
    """Tokens after the end of the second-longest row of their group, where its returns are not all equal."""
    result = torch.zeros_like(_BATCH.mask)
    times = torch.arange(_BATCH.mask.shape[1]).expand(_BATCH.mask.shape)
    if clock == "sampled tokens":
        times = _BATCH.mask.cumsum(dim=1) - 1
    ends = torch.where(_BATCH.mask, times, -1).amax(dim=1)
    for uid in np.unique(_BATCH.uids):
        group = np.flatnonzero(_BATCH.uids == uid)
        if len(group) > 1 and uid != "0-4":  # Group 4 has equal rewards.
            second = ends[group].sort().values[-2]
            result[group] = _BATCH.mask[group] & (times[group] > second)
    return result


def _rollout_weights(estimator: Estimator) -> None:
    ones = replace(_BATCH, weights=torch.ones_like(_BATCH.weights))
    without = _advantages(estimator, rollout_is_weights=None)
    close("Without rollout weights it is as with weights of 1: the advantage", without, _advantages(estimator, ones))
    must(
        not torch.allclose(_advantages(estimator), without, atol=1e-3),
        "Rollout weights between 0.3 and 2 leave every advantage as it is without.",
    )
    doubled = replace(_BATCH, weights=2 * _BATCH.weights)
    what = "Weights that are all twice as large leave the baseline alone: the advantage"
    close(what, _advantages(estimator, doubled), _advantages(estimator), 1e-6)


def _gdpo_weights(estimator: Estimator) -> None:
    first, swapped = ([1.0, 0.0], [0.0, 1.0]), _BATCH.reward_components.flip(1)
    close(
        "The second of two components swapped is the first: the advantage",
        _advantages(estimator, gdpo_reward_weights=first[0]),
        _advantages(estimator, replace(_BATCH, reward_components=swapped), gdpo_reward_weights=first[1]),
    )
    default = _advantages(estimator, gdpo_reward_weights=None)
    close("No weights mean 1 each: the advantage", default, _advantages(estimator, gdpo_reward_weights=[1.0, 1.0]))
    opposite = _advantages(estimator, gdpo_reward_weights=[-1.0, -1.0])
    close("Weights of -1 turn the sign: the advantage", opposite, -default)


def _gdpo_norm(estimator: Estimator) -> None:
    larger = replace(
        _BATCH, reward_components=_BATCH.reward_components * torch.tensor([1000.0, 1.0], dtype=torch.float64)
    )
    what = "With the standard deviation the scale of a component does not matter: the advantage"
    close(what, _advantages(estimator, larger, epsilon=0.0), _advantages(estimator, epsilon=0.0), 1e-6)
    plain = _advantages(estimator, larger, norm_adv_by_std_in_grpo=False)
    alone = _advantages(estimator, larger, norm_adv_by_std_in_grpo=False, gdpo_reward_weights=[1.0, 0.0])
    close("Without it a component 1000 times as large decides alone: the advantage", plain, alone, 2e-2)


def _gdpo_epsilon(estimator: Estimator) -> None:
    large = _advantages(estimator, epsilon=100.0)
    plain = _advantages(estimator, norm_adv_by_std_in_grpo=False)
    what = "An epsilon far above the standard deviations leaves the whitened differences: the advantage"
    close(what, large, plain, 2e-2)


def _case(setting: str, check: Callable[[Estimator], None]) -> SettingCase:
    return SettingCase(setting=setting, check=check)


_OF_GRPO = (
    _case("norm_adv_by_std_in_grpo", _norm_by_std),
    _case("epsilon", _epsilon),
    _single_rows("baseline 0 and standard deviation 1", lambda scores: scores / (1 + 1e-6)),
)
_OF_THE_MEAN = (_single_rows("baseline 0", lambda scores: scores),)
_OF_PASSK = (
    _case("norm_adv_by_std_in_grpo", _norm_by_std),
    _case("epsilon", _epsilon),
    _single_rows("no second to be better than", lambda scores: 0 * scores),
)


def _of_token_baseline(clock: str) -> tuple[SettingCase, ...]:
    return (
        _zero_tail(clock),
        _case("rollout_is_weights", _rollout_weights),
        _single_rows("baseline 0", _rewards_to_go),
    )


SETTING_CASES: dict[str, tuple[SettingCase, ...]] = {
    "gae": (_case("gamma", _gae_gamma), _case("lam", _gae_lam)),
    "grpo": _OF_GRPO,
    "grpo_vectorized": _OF_GRPO,
    "grpo_passk": _OF_PASSK,
    "rloo": _OF_THE_MEAN,
    "rloo_vectorized": _OF_THE_MEAN,
    "reinforce_plus_plus": (_case("gamma", _returns_gamma),),
    "reinforce_plus_plus_baseline": (_single_rows("the whitened scores", _whitened_scores),),
    "remax": (_case("reward_baselines", _reward_baselines),),
    "opo": _OF_THE_MEAN,
    "gpg": (
        _case("f_norm", _f_norm),
        _case("alpha", _alpha),
        _single_rows("baseline 0", lambda scores: len(scores) / int((scores[:, 0] != 0).sum()) * scores),
    ),
    "optimal_token_baseline": _of_token_baseline("response"),
    "tir_optimal_token_baseline": _of_token_baseline("sampled tokens"),
    "gdpo": (
        _case("gdpo_reward_weights", _gdpo_weights),
        _case("norm_adv_by_std_in_grpo", _gdpo_norm),
        _case("epsilon", _gdpo_epsilon),
        _single_rows("the whitened sum of the components", _whitened_components),
    ),
}
