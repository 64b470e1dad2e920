"""Scores of a batch, with what else the reward function returned."""

from collections.abc import Sequence

import numpy as np

from burnish.protocol import DataProto
from burnish.reward import RewardManager


def score_batch(reward_fn: RewardManager, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
    """Adds ``token_level_scores``, ``valid`` and the reward's extras, whose names go to ``meta_info["reward_extra_keys"]``.

    Returns:
        the batch, and the reward's metrics: its counts, and ``reward/<extra>/mean`` of every extra that is a number.
    """
    columns = set(batch.non_tensor_batch)
    result = reward_fn(batch)
    batch = result.add_to(batch)
    extras = [key for key in batch.non_tensor_batch if key not in columns]
    batch.meta_info["reward_extra_keys"] = extras
    metrics = dict(result.metrics)
    for key in extras:
        numbers = as_numbers(batch.non_tensor_batch[key])
        if numbers is not None:
            metrics[f"reward/{key.removeprefix('reward_extra/')}/mean"] = float(np.nanmean(numbers))
    return batch, metrics


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
    numbers = np.array([np.nan if value is None else float(value) for value in values])
    return None if np.isnan(numbers).all() else numbers
