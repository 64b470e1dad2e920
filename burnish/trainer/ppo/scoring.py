"""Scores of a batch, with what else the reward function returned."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from burnish.config import PPOTrainerConfig
from burnish.protocol import DataProto
from burnish.reward import RewardManager
from burnish.reward.manager import result_of
from burnish.reward.managers.base import OUTCOME_COLUMN
from burnish.reward.result import EXTRA_PREFIX
from burnish.trainer.ppo.baselines import drop_rows_without_baseline
from burnish.utils.errors import RewardError

SCORE_NAMES = ("score", "seq_reward", "seq_final_reward")
"""The names under which the score itself, summed over a response, is known."""


def score_batch(reward_fn: RewardManager, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
    """Adds ``token_level_scores``, ``valid`` and the reward's extras, whose names go to ``meta_info["reward_extra_keys"]``.

    Returns:
        the batch, and the reward's metrics: its counts, and ``reward/<extra>/mean`` of every extra that is a number.
    """
    result = result_of(reward_fn, batch)
    batch.non_tensor_batch.pop(OUTCOME_COLUMN, None)
    columns = set(batch.non_tensor_batch)
    batch = result.add_to(batch)
    extras = [key for key in batch.non_tensor_batch if key not in columns]
    batch.meta_info["reward_extra_keys"] = extras
    metrics = dict(result.metrics)
    for key in extras:
        numbers = as_numbers(batch.non_tensor_batch[key])
        if numbers is not None:
            metrics[f"reward/{key.removeprefix(EXTRA_PREFIX)}/mean"] = float(np.nanmean(numbers))
    return batch, metrics


def score_for_training(
    reward_fn: RewardManager, batch: DataProto, config: PPOTrainerConfig
) -> tuple[DataProto, dict[str, float]]:
    """As `score_batch`, and what the estimator needs of the scores: GDPO's components, ReMax's baselines.

    Raises:
        RewardError: no score at all, or a component that the reward function does not return.
    """
    batch, metrics = score_batch(reward_fn, batch)
    if config.algorithm.adv_estimator == "gdpo":
        metrics |= add_reward_components(batch, config.algorithm.gdpo_reward_keys or (), config.reward.on_error)
    if "reward_baselines" in batch.tensors:
        metrics |= drop_rows_without_baseline(batch)
    return batch, metrics


def merge_rounds(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The reward's metrics of several generation batches of one size as one: counts add up, the others are means over the
    batches that have them."""
    merged = {}
    for key in dict.fromkeys(key for metrics in rounds for key in metrics):
        values = [metrics[key] for metrics in rounds if key in metrics]
        merged[key] = sum(values) if key.endswith("_count") else sum(values) / len(values)
    return merged


def concat_scored(batches: Sequence[DataProto]) -> DataProto:
    """Scored batches as one; an extra that only some of them have is None in the rows of the others."""
    extras = list(dict.fromkeys(key for batch in batches for key in batch.meta_info["reward_extra_keys"]))
    for batch in batches:
        for key in extras:
            if key not in batch.non_tensor_batch:
                batch.non_tensor_batch[key] = np.full(len(batch), None, dtype=object)
        batch.meta_info["reward_extra_keys"] = extras
    return DataProto.concat(batches)


def as_numbers(values: np.ndarray) -> np.ndarray | None:
    """An object array of numbers, bools and Nones as float64 (None: NaN); None when it holds anything else, or no number."""
    if not all(value is None or isinstance(value, (bool, int, float, np.number, np.bool_)) for value in values):
        return None
    numbers = np.array([np.nan if value is None else _as_float(value) for value in values])
    return None if np.isnan(numbers).all() else numbers


def _as_float(number: int | float) -> float:
    try:
        return float(number)
    except OverflowError:
        # An int that no float holds.
        return math.inf if number > 0 else -math.inf


def reward_number(batch: DataProto, name: str) -> np.ndarray | None:
    """A number of a scored batch by the name that the configuration has for it, float64 [batch].

    Args:
        name: one of `SCORE_NAMES`, or an extra as the reward function calls it; ``reward``, where it returns none of this
            name, is the score too.

    Returns:
        NaN where a row has none; None where no row has one.
    """
    if name in SCORE_NAMES:
        return batch.tensors["token_level_scores"].double().sum(-1).numpy()
    values = find_extra(batch, name)
    if values is None and name == "reward":
        return reward_number(batch, "score")
    return None if values is None else as_numbers(values)


def find_extra(batch: DataProto, name: str) -> np.ndarray | None:
    """What the reward function returned under ``name``, an object array [batch]; None if it is nothing in any row."""
    # A name that was taken, by the framework or by a column of the dataset, has a prefix.
    for key in (name, EXTRA_PREFIX + name):
        if key in batch.meta_info["reward_extra_keys"]:
            return batch.non_tensor_batch[key]
    return None


def describe_numbers(batch: DataProto) -> str:
    """A sentence that lists the names that `reward_number` knows in a scored batch."""
    numbers = [
        key.removeprefix(EXTRA_PREFIX)
        for key in batch.meta_info["reward_extra_keys"]
        if as_numbers(batch.non_tensor_batch[key]) is not None
    ]
    return f"The numbers that the reward function returns are: {', '.join(['score', *numbers])}."


def add_reward_components(batch: DataProto, names: Sequence[str], on_error: str) -> dict[str, float]:
    """Adds ``reward_components`` [batch, component] of a scored batch: the numbers called ``names`` (GDPO).

    A row that lacks one of them, or has NaN or an infinity there, is not valid.

    Args:
        names: ``algorithm.gdpo_reward_keys``.
        on_error: ``reward.on_error``: "raise" makes such a row an error.

    Returns:
        the metric ``reward/gdpo_incomplete_count``: rows with a score that are lost by that.

    Raises:
        RewardError: a component that no row has, or one that a row lacks under "raise".
    """
    valid = batch.tensors["valid"]
    columns = []
    for name in names:
        numbers = reward_number(batch, name)
        if numbers is None and valid.any():
            raise RewardError(
                f"algorithm.gdpo_reward_keys={list(names)}: no response has a number {name}. {describe_numbers(batch)}"
            )
        columns.append(np.full(len(batch), np.nan) if numbers is None else numbers)
    components = torch.from_numpy(np.stack(columns, axis=1)).float()
    complete = components.isfinite().all(-1)
    incomplete = valid & ~complete
    if on_error == "raise" and incomplete.any():
        row = int(incomplete.nonzero()[0])
        values = dict(zip(names, components[row].tolist(), strict=True))
        raise RewardError(
            f"algorithm.gdpo_reward_keys={list(names)}: {int(incomplete.sum())} of {len(batch)} responses lack one "
            f"of these numbers (reward.on_error=raise); the first has {values}, where nan stands for none."
        )
    batch.tensors["reward_components"] = torch.where(complete[:, None], components, 0.0)
    batch.tensors["valid"] = valid & complete
    return {"reward/gdpo_incomplete_count": float(incomplete.sum())}
