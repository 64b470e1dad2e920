"""The checks of an advantage estimator. Each takes an `Estimator` and raises a `Violation` that says what is wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from burnish.conformance.batches import RaggedBatch, advantage_batch, literal_batch
from burnish.conformance.comparison import close, must, unchanged
from burnish.conformance.estimators.algorithm import Estimator, algorithm_config, same_result
from burnish.conformance.references import ESTIMATOR_SETTINGS
from burnish.core_algos.advantages import compute_advantage
from burnish.protocol import DataProto
from burnish.utils.errors import TrainingError
from burnish.utils.foreign_code import Caught

_SEEDS = range(5)
_SETTINGS = {"gamma": 0.97, "lam": 0.9, "gdpo_reward_weights": [1.0, 0.5]}


def hand_answer(estimator: Estimator) -> None:
    """The result is the one worked out on paper."""
    for answer in estimator.hand:
        got = estimator(answer.batch, **answer.settings)
        close("The hand-computed answer, the advantage", got[0], answer.advantages, answer.tolerance)
        if answer.returns is not None:
            inside = torch.where(answer.batch.mask, got[1], 0.0)
            close("The hand-computed answer, the return", inside, answer.returns, answer.tolerance)


def naive_loop(estimator: Estimator) -> None:
    """The result equals that of loops over rows and tokens, alone and in the advantage stage."""
    for seed in _SEEDS:
        batch = advantage_batch(seed)
        want = estimator.expected(batch, **_SETTINGS)
        same_result(f"On random batch {seed}", estimator(batch, **_SETTINGS), want, batch.mask)
        alone = {**_SETTINGS, "allow_single_sample_groups": True, "num_repeat": 1}
        singles = replace(batch, uids=np.arange(len(batch.mask)))
        got = estimator(singles, **alone)
        same_result(
            f"On random batch {seed} with one row in every group", got, estimator.expected(singles, **alone), batch.mask
        )
        _in_the_advantage_stage(estimator, seed)


def _in_the_advantage_stage(estimator: Estimator, seed: int) -> None:
    """Rows that do not count are in no statistic and get zeros."""
    batch = advantage_batch(seed)
    rng = np.random.default_rng(seed)
    valid = rng.random(len(batch.mask)) > 0.2
    loss_mask = batch.mask.clone()
    loss_mask[rng.random(len(batch.mask)) < 0.2] = False
    counts = valid & loss_mask.any(dim=1).numpy()
    rewards = torch.where(torch.from_numpy(valid)[:, None], batch.rewards, math.nan)
    data = as_data(replace(batch, rewards=rewards), loss_mask=loss_mask, valid=torch.from_numpy(valid))
    names = ("gamma", "lam", "num_repeat", "norm_adv_by_std_in_grpo")
    settings = {**ESTIMATOR_SETTINGS, **_SETTINGS}
    compute_advantage(
        data,
        estimator.name,
        config=algorithm_config(settings, estimator.custom),
        **{name: settings[name] for name in names},
    )
    want = [torch.zeros(batch.mask.shape, dtype=torch.float64) for _ in range(2)]
    for place, kept in zip(want, estimator.expected(batch.take(np.flatnonzero(counts)), **_SETTINGS), strict=True):
        place[torch.from_numpy(counts)] = kept
    got = (data.tensors["advantages"], data.tensors["returns"])
    same_result(f"In the advantage stage, on random batch {seed}", got, (want[0], want[1]), batch.mask)


def as_data(batch: RaggedBatch, **tensors: Tensor) -> DataProto:
    """The batch as it reaches the advantage stage."""
    keyed = batch.keyed()
    uids = keyed.pop("index")
    return DataProto.from_dict(tensors={**keyed, **tensors}, non_tensors={"uid": uids})


def padding(estimator: Estimator) -> None:
    """Columns of padding change nothing and get zeros."""
    for seed in _SEEDS:
        batch = advantage_batch(seed)
        want = estimator(batch, **_SETTINGS)
        wide = batch.pad(4, value=3.0)
        advantages, returns = estimator(wide, **_SETTINGS)
        must(not advantages[:, batch.mask.shape[1] :].any(), "Columns of padding get advantages that are not 0.")
        got = (advantages[:, : batch.mask.shape[1]], returns[:, : batch.mask.shape[1]])
        same_result("With four columns of padding", got, want, batch.mask)


def row_order(estimator: Estimator) -> None:
    """Every row keeps its advantage wherever it lies in the batch."""
    for seed in _SEEDS:
        batch = advantage_batch(seed)
        want = estimator(batch, **_SETTINGS)
        order = np.random.default_rng(seed).permutation(len(batch.mask))
        got = estimator(batch.take(order), **_SETTINGS)
        same_result("With the rows in another order", got, (want[0][order], want[1][order]), batch.mask[order])


def group_interleaving(estimator: Estimator) -> None:
    """Groups are found by their names: neither where their rows lie nor what the names are matters."""
    for seed in _SEEDS:
        batch = advantage_batch(seed)
        want = estimator(batch, **_SETTINGS)
        order = np.argsort(batch.uids, kind="stable")
        got = estimator(batch.take(order), **_SETTINGS)
        what = "With the rows of each group behind each other instead of interleaved"
        same_result(what, got, (want[0][order], want[1][order]), batch.mask[order])
        names = np.unique(batch.uids, return_inverse=True)[1]
        renamed = replace(batch, uids=np.array([f"{9 - name}-x" for name in names], dtype=object))
        same_result("With other names of the groups", estimator(renamed, **_SETTINGS), want, batch.mask)


def fp32(estimator: Estimator) -> None:
    """float32 inputs give what float64 gives for the same numbers."""
    _in_dtype(estimator, torch.float32)


def bf16(estimator: Estimator) -> None:
    """bfloat16 inputs are computed with in float32 or wider, and give what float64 gives for the same numbers."""
    _in_dtype(estimator, torch.bfloat16)


def _in_dtype(estimator: Estimator, dtype: torch.dtype) -> None:
    for seed in _SEEDS:
        batch = advantage_batch(seed).to(dtype)
        got = estimator(batch, **_SETTINGS)
        for name, tensor in zip(("advantages", "returns"), got, strict=True):
            must(tensor.dtype in (torch.float32, torch.float64), f"For {dtype} inputs {name} are {tensor.dtype}.")
        want = estimator(batch.to(torch.float64), **_SETTINGS)
        same_result(f"In {dtype} on random batch {seed}, compared with float64", got, want, batch.mask, 2e-5)


def extremes(estimator: Estimator) -> None:
    """Nothing outside the mask counts, NaN inside it surfaces, and large or equal rewards leave no rounding noise."""
    batch = advantage_batch(0)
    want = estimator(batch, **_SETTINGS)
    unchanged("The estimator", batch, advantage_batch(0))
    for rubbish in (math.nan, math.inf, -math.inf):
        filled = batch.fill_outside(rubbish)
        if not estimator.masks_rewards:
            filled = replace(filled, rewards=batch.rewards)
        got = estimator(filled, **_SETTINGS)
        must(got[0].isfinite().all(), f"{rubbish} outside the mask makes advantages that are not finite.")
        same_result(f"With {rubbish} outside the mask", got, want, batch.mask)
    row, token = batch.mask.nonzero()[-1].tolist()
    for field in _reads(estimator):
        broken = getattr(batch, field).clone()
        broken[(row, token) if broken.shape == batch.mask.shape else row] = math.nan
        with Caught() as caught:
            advantages, _ = estimator(replace(batch, **{field: broken}), **_SETTINGS)
        if caught.error is None:
            must(advantages.isnan().any(), f"NaN inside the mask of {field} does not surface.")
        else:
            must(
                isinstance(caught.error, TrainingError),
                f"NaN inside the mask of {field} ends in {type(caught.error).__name__}, not in a TrainingError.",
            )
    _large_rewards(estimator)
    if estimator.zero_for_equal_rewards:
        _equal_rewards(estimator)


def _reads(estimator: Estimator) -> list[str]:
    """The fields of a batch that must be finite inside the mask for this estimator."""
    keys = {
        "rewards": "token_level_rewards",
        "values": "values",
        "old_log_probs": "old_log_probs",
        "sum_pi_squared": "sum_pi_squared",
        "weights": "rollout_is_weights",
        "reward_baselines": "reward_baselines",
        "reward_components": "reward_components",
    }
    return [field for field, key in keys.items() if key in estimator.parameters]


def _large_rewards(estimator: Estimator) -> None:
    """A one-pass variance, or a sum in too few bits, loses the difference between 10000 and 10001."""
    batch = advantage_batch(1)
    last = batch.rewards != 0
    shifted = replace(
        batch,
        rewards=torch.where(last, 10000.0 + (batch.rewards > 0.2).double(), 0.0),
        reward_components=10000.0 + (batch.reward_components > 0.2).double(),
        reward_baselines=torch.full_like(batch.reward_baselines, 10000.0),
        values=torch.full_like(batch.values, 10000.0),
    ).to(torch.float32)
    exact = shifted.to(torch.float64)
    want = estimator.expected(exact) if estimator.reference else estimator(exact)
    close(
        "For rewards around 10000 in float32, compared with float64, the advantage",
        estimator(shifted)[0],
        want[0],
        5e-3,
    )


def _equal_rewards(estimator: Estimator) -> None:
    for reward in (0.1, 0.2, 0.7, 1 / 3):
        for size in (3, 5, 7, 64):
            batch = literal_batch(
                [[1, 1]] * (size + 2),
                uids=["equal"] * size + ["mixed"] * 2,
                rewards=[[0.0, reward]] * size + [[0.0, 0.0], [0.0, 1.0]],
                reward_components=[[reward]] * size + [[0.0], [1.0]],
                old_log_probs=[[-0.5, -1.0]] * (size + 2),
                sum_pi_squared=[[0.6, 0.5]] * (size + 2),
                weights=[[1.0, 1.0]] * (size + 2),
            ).to(torch.float32)
            advantages, _ = estimator(batch, gdpo_reward_weights=[1.0])
            largest = float(advantages[:size].abs().max())
            must(
                largest == 0.0,
                f"A group of {size} rewards that are all {reward:.3g} gets an advantage of {largest:.1e}, not exactly 0.",
            )
            must(advantages[size:].any(), "A group of rewards 0 and 1 beside one of equal rewards gets no advantage.")
