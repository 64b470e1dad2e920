"""Advantage estimators as naive loops, written from their definitions in docs/algorithms.md.

Each is ``(batch, settings) -> (advantages, returns)``: the batch by batch key with ``index`` for the uids, the settings by
name (`ESTIMATOR_SETTINGS` where one is not given). Rows all count and have a token in the mask. Advantages are zero outside
the mask; what returns are there is not defined, and they are zero here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from burnish.conformance.references.loops import (
    Arguments,
    Matrix,
    Row,
    kept,
    lists,
    mean,
    siblings,
    spread,
    standard_deviation,
    whiten,
)

EstimatorReference = Callable[[Arguments, Mapping[str, Any]], tuple[Matrix, Matrix]]

ESTIMATOR_SETTINGS: dict[str, Any] = {
    "gamma": 1.0,
    "lam": 1.0,
    "num_repeat": 4,
    "epsilon": 1e-6,
    "norm_adv_by_std_in_grpo": True,
    "allow_single_sample_groups": False,
    "f_norm": 1.0,
    "alpha": None,
    "handle_zero_tail": True,
    "gdpo_reward_weights": None,
}


def _scores(batch: Arguments) -> Row:
    return [sum(row) for row in lists(batch["token_level_rewards"])]


def alone_counts(settings: Mapping[str, Any]) -> bool:
    """Whether a row alone in its group is a group, with baseline 0 and standard deviation 1."""
    return settings["allow_single_sample_groups"] and settings["num_repeat"] == 1


def _varied_rows(values: list[Any], index: list[Any], settings: Mapping[str, Any]) -> list[int]:
    """The rows whose group says something: its values differ, or it is a row alone where that is allowed."""
    rows = []
    for row in range(len(index)):
        group = [values[i] for i in siblings(index, row)]
        if len(group) == 1:
            if alone_counts(settings):
                rows.append(row)
        elif any(value != group[0] for value in group):
            rows.append(row)
    return rows


def _against_group(values: Row, index: list[Any], settings: Mapping[str, Any], baseline: Callable[..., float]) -> Row:
    """value - baseline(row, the rows of its group), 0 where the group says nothing, baseline 0 for a row alone."""
    result = [0.0] * len(values)
    for row in _varied_rows(values, index, settings):
        group = siblings(index, row)
        result[row] = values[row] - (baseline(row, group) if len(group) > 1 else 0.0)
    return result


def _by_deviation(advantages: Row, values: Row, index: list[Any], settings: Mapping[str, Any]) -> Row:
    """Divided by the standard deviation of the group (1 for a row alone) + epsilon, unless that is switched off."""
    if not settings["norm_adv_by_std_in_grpo"]:
        return advantages
    result = []
    for row, advantage in enumerate(advantages):
        group = [values[i] for i in siblings(index, row)]
        deviation = standard_deviation(group) if len(group) > 1 else 1.0
        result.append(advantage / (deviation + settings["epsilon"]))
    return result


def _outcome(per_row: Row, batch: Arguments) -> tuple[Matrix, Matrix]:
    advantages = spread(per_row, lists(batch["response_mask"]))
    return advantages, [list(row) for row in advantages]


def rewards_to_go(batch: Arguments, gamma: float) -> Matrix:
    """sum of gamma^j r over the tokens of the mask that follow, tokens outside it left out."""
    result = []
    for rewards, mask in zip(lists(batch["token_level_rewards"]), lists(batch["response_mask"]), strict=True):
        tokens = kept(mask)
        row = [0.0] * len(mask)
        for i, t in enumerate(tokens):
            row[t] = sum(gamma ** (j - i) * rewards[tokens[j]] for j in range(i, len(tokens)))
        result.append(row)
    return result


def gae(batch: Arguments, settings: Mapping[str, Any]) -> tuple[Matrix, Matrix]:
    """Sums of discounted deltas over the tokens of the mask, as if the others were not there; whitened."""
    rewards, values, mask = (lists(batch[key]) for key in ("token_level_rewards", "values", "response_mask"))
    gamma, lam = settings["gamma"], settings["lam"]
    advantages, returns = [], []
    for r, v, m in zip(rewards, values, mask, strict=True):
        tokens = kept(m)
        deltas = []
        for i, t in enumerate(tokens):
            next_value = v[tokens[i + 1]] if i + 1 < len(tokens) else 0.0
            deltas.append(r[t] + gamma * next_value - v[t])
        row, target = [0.0] * len(m), [0.0] * len(m)
        for i, t in enumerate(tokens):
            row[t] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(tokens)))
            target[t] = row[t] + v[t]
        advantages.append(row)
        returns.append(target)
    return whiten(advantages, mask), returns


def grpo(batch: Arguments, settings: Mapping[str, Any]) -> tuple[Matrix, Matrix]:
    """(s - mean of the group) / (standard deviation of the group + epsilon)."""
    scores, index = _scores(batch), lists(batch["index"])
    centered = _against_group(scores, index, settings, lambda row, group: mean([scores[i] for i in group]))
    return _outcome(_by_deviation(centered, scores, index, settings), batch)


def grpo_passk(batch: Arguments, settings: Mapping[str, Any]) -> tuple[Matrix, Matrix]:
    """The best row of a group gets its lead over the second; the others, and a row alone, get 0."""
    scores, index = _scores(batch), lists(batch["index"])
    leads = [0.0] * len(scores)
    for row in range(len(scores)):
        others = [scores[i] for i in siblings(index, row) if i != row]
        if others and scores[row] > max(others):
            leads[row] = scores[row] - max(others)
    return _outcome(_by_deviation(leads, scores, index, settings), batch)


def rloo(batch: Arguments, settings: Mapping[str, Any]) -> tuple[Matrix, Matrix]:
    """s - mean of the others."""
    scores, index = _scores(batch), lists(batch["index"])

    def others(row: int, group: list[int]) -> float:
        return mean([scores[i] for i in group if i != row])

    return _outcome(_against_group(scores, index, settings, others), batch)


def reinforce_plus_plus(batch: Arguments, settings: Mapping[str, Any]) -> tuple[Matrix, Matrix]:
    """Discounted returns; whitened over the batch."""
    returns = rewards_to_go(batch, settings["gamma"])
    return whiten(returns, lists(batch["response_mask"])), returns


def reinforce_plus_plus_baseline(batch: Arguments, settings: Mapping[str, Any]) -> tuple[Matrix, Matrix]:
    """s - mean of the group on every token; whitened over the rows whose group varies."""
    scores, index, mask = _scores(batch), lists(batch["index"]), lists(batch["response_mask"])
    centered = _against_group(scores, index, settings, lambda row, group: mean([scores[i] for i in group]))
    advantages = whiten(spread(centered, mask), mask, _varied_rows(scores, index, settings))
    return advantages, [list(row) for row in advantages]


def remax(batch: Arguments, settings: Mapping[str, Any]) -> tuple[Matrix, Matrix]:
    """Rewards to come less the reward of the greedy response."""
    mask, baselines = lists(batch["response_mask"]), lists(batch["reward_baselines"])
    returns = rewards_to_go(batch, 1.0)
    advantages = [
        [g - baseline if inside else 0.0 for g, inside in zip(row, m, strict=True)]
        for row, m, baseline in zip(returns, mask, baselines, strict=True)
    ]
    return advantages, returns


def opo(batch: Arguments, settings: Mapping[str, Any]) -> tuple[Matrix, Matrix]:
    """s less the mean of the group weighted by the rows' lengths."""
    scores, index = _scores(batch), lists(batch["index"])
    lengths = [len(kept(row)) for row in lists(batch["response_mask"])]

    def by_length(row: int, group: list[int]) -> float:
        return sum(lengths[i] * scores[i] for i in group) / sum(lengths[i] for i in group)

    return _outcome(_against_group(scores, index, settings, by_length), batch)


def gpg(batch: Arguments, settings: Mapping[str, Any]) -> tuple[Matrix, Matrix]:
    """alpha (s - mean of the group) / f_norm; alpha = rows / rows whose score is not 0, when it is not given."""
    scores, index = _scores(batch), lists(batch["index"])
    alpha = settings["alpha"]
    if alpha is None:
        alpha = len(scores) / max(1, sum(score != 0 for score in scores))
    centered = _against_group(scores, index, settings, lambda row, group: mean([scores[i] for i in group]))
    return _outcome([alpha * advantage / settings["f_norm"] for advantage in centered], batch)


def gdpo(batch: Arguments, settings: Mapping[str, Any]) -> tuple[Matrix, Matrix]:
    """GRPO of every component of the reward, their weighted sum, whitened over the rows whose group varies."""
    components, index, mask = (lists(batch[key]) for key in ("reward_components", "index", "response_mask"))
    weights = settings["gdpo_reward_weights"] or [1.0] * len(components[0])
    total = [0.0] * len(components)
    for number, weight in enumerate(weights):
        values = [row[number] for row in components]

        def group_mean(row: int, group: list[int], values: Row = values) -> float:
            return mean([values[i] for i in group])

        centered = _against_group(values, index, settings, group_mean)
        for row, advantage in enumerate(_by_deviation(centered, values, index, settings)):
            total[row] += weight * advantage
    advantages = whiten(spread(total, mask), mask, _varied_rows(components, index, settings))
    return advantages, [list(row) for row in advantages]
