"""Random batches as they come in training: rows of different lengths with gaps of tool tokens, groups interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

_FAR_SHARE = 0.25


@dataclass(frozen=True)
class RaggedBatch:
    """Everything that an estimator or a loss reads, in float64; outside the mask it holds finite rubbish.

    Tensors are [batch, response] except ``reward_baselines`` [batch] and ``reward_components`` [batch, component].
    Rewards are zero outside the mask: a score sits on the last sampled token, other rewards on sampled tokens.
    """

    uids: np.ndarray
    mask: Tensor
    rewards: Tensor
    values: Tensor
    vpreds: Tensor
    returns: Tensor
    old_log_probs: Tensor
    log_probs: Tensor
    ref_log_probs: Tensor
    rollout_log_probs: Tensor
    advantages: Tensor
    weights: Tensor
    sum_pi_squared: Tensor
    noise: Tensor
    reward_baselines: Tensor
    reward_components: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> RaggedBatch:
        """The batch with ``change`` applied to every tensor that has an entry per token."""
        return self._with_changed(_PER_TOKEN, change)

    def map_all(self, change: Callable[[Tensor], Tensor]) -> RaggedBatch:
        """The batch with ``change`` applied to every tensor; the uids stay."""
        return self._with_changed((*_PER_TOKEN, *_PER_ROW), change)

    def take(self, rows: Sequence[int] | np.ndarray) -> RaggedBatch:
        """The rows of these numbers, in this order."""
        order = np.asarray(rows, dtype=np.int64)
        chosen = self.map_all(lambda tensor: tensor[torch.from_numpy(order)])
        return replace(chosen, uids=self.uids[order])

    def to(self, dtype: torch.dtype) -> RaggedBatch:
        """The batch with every tensor but the mask rounded to ``dtype``."""
        return self.map_all(lambda tensor: tensor if tensor.dtype == torch.bool else tensor.to(dtype))

    def fill_outside(self, value: float) -> RaggedBatch:
        """The batch with ``value`` outside the mask of every tensor but the mask."""
        return self.map(lambda x: x if x.dtype == torch.bool else torch.where(self.mask, x, value))

    def pad(self, columns: int, value: float) -> RaggedBatch:
        """The batch with columns of padding appended, which hold ``value`` (and no reward)."""

        def widened(tensor: Tensor) -> Tensor:
            fill = False if tensor.dtype == torch.bool else value
            return torch.cat([tensor, torch.full((len(tensor), columns), fill, dtype=tensor.dtype)], dim=1)

        wide = self.map(widened)
        return replace(wide, rewards=torch.where(wide.mask, wide.rewards, 0.0))

    def keyed(self) -> dict[str, Any]:
        """The batch by the names of batch keys, which are those of an estimator's parameters; ``index`` is the uids."""
        return {
            "token_level_rewards": self.rewards,
            "response_mask": self.mask,
            "index": self.uids,
            "values": self.values,
            "old_log_probs": self.old_log_probs,
            "sum_pi_squared": self.sum_pi_squared,
            "rollout_is_weights": self.weights,
            "rollout_log_probs": self.rollout_log_probs,
            "ref_log_prob": self.ref_log_probs,
            "reward_baselines": self.reward_baselines,
            "reward_components": self.reward_components,
        }

    def _with_changed(self, names: Sequence[str], change: Callable[[Tensor], Tensor]) -> RaggedBatch:
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in names}
        return replace(self, **changed)


_PER_ROW = ("reward_baselines", "reward_components")
_PER_TOKEN = tuple(field.name for field in fields(RaggedBatch) if field.name not in ("uids", *_PER_ROW))


def ragged_batch(
    seed: int,
    group_sizes: Sequence[int] = (3, 3, 3, 3),
    width: int = 9,
    *,
    constant_groups: Sequence[int] = (),
    empty_rows: int = 0,
    process_rewards: bool = False,
) -> RaggedBatch:
    """A batch of this seed.

    Args:
        group_sizes: rows of each group; the groups are dealt out in turn, so they lie interleaved.
        width: tokens of the longest response, at most.
        constant_groups: numbers of the groups whose rewards are all equal.
        empty_rows: rows, the first ones, without a token in the mask.
        process_rewards: every other row also has rewards on its other sampled tokens.
    """
    rng = np.random.default_rng(seed)
    groups = _dealt(group_sizes)
    num_rows = len(groups)
    mask = np.stack([_mask_row(rng, width) for _ in range(num_rows)])
    mask[:empty_rows] = False
    scores = rng.choice([0.0, 0.25, 1.0], size=num_rows) + 0.1 * rng.normal(size=num_rows)
    components = np.stack([scores, rng.normal(size=num_rows)], axis=1)
    constant = np.isin(groups, constant_groups)
    scores[constant], components[constant] = 0.7, (0.7, 0.1)
    every_other = np.arange(num_rows) % 2 == 1
    rewards = _rewards(rng, mask, scores, every_other & ~constant if process_rewards else np.zeros_like(constant))

    def noise(scale: float = 1.0) -> np.ndarray:
        return scale * rng.normal(size=mask.shape)

    def near(log_probs: np.ndarray) -> np.ndarray:
        """Log-probs of a policy that has moved: mostly a little, somewhere far."""
        far = rng.random(mask.shape) < _FAR_SHARE
        return -np.abs(log_probs + np.where(far, noise(1.5), noise(0.25)))

    old = -rng.exponential(1.3, size=mask.shape) - 0.05
    probability = np.exp(old)
    values = noise()
    arrays = {
        "mask": mask,
        "rewards": rewards,
        "values": values,
        "vpreds": values + noise(0.6),
        "returns": noise(),
        "old_log_probs": old,
        "log_probs": near(old),
        "ref_log_probs": near(old),
        "rollout_log_probs": near(old),
        "advantages": noise(),
        "weights": rng.uniform(0.3, 2.0, size=mask.shape),
        # Of all tokens: at least the square of the sampled one's probability.
        "sum_pi_squared": probability**2 + (1 - probability) ** 2 * rng.random(mask.shape),
        "noise": rng.random(mask.shape),
        "reward_baselines": rng.normal(size=num_rows),
        "reward_components": components,
    }
    uids = np.array([f"0-{group}" for group in groups], dtype=object)
    return RaggedBatch(uids=uids, **{name: torch.from_numpy(array) for name, array in arrays.items()})


def literal_batch(mask: Sequence[Sequence[int]], **known: Any) -> RaggedBatch:
    """A batch whose fields are given as nested lists; zeros in the fields that are not, and one group of all rows."""
    rows = torch.tensor(mask, dtype=torch.bool)
    zeros = dict.fromkeys(_PER_TOKEN, torch.zeros(rows.shape, dtype=torch.float64)) | {
        "reward_baselines": torch.zeros(len(rows), dtype=torch.float64),
        "reward_components": torch.zeros(len(rows), 1, dtype=torch.float64),
    }
    uids = np.array(known.pop("uids", ["a"] * len(rows)), dtype=object)
    given = {name: torch.tensor(values, dtype=torch.float64) for name, values in known.items()}
    return RaggedBatch(uids=uids, **{**zeros, "mask": rows, **given})


def advantage_batch(seed: int) -> RaggedBatch:
    """Groups of unequal size, among them a row alone and a group of equal rewards; some rows have process rewards."""
    return ragged_batch(seed, (4, 3, 5, 1, 2, 3), constant_groups=(4,), process_rewards=True)


def loss_batch(seed: int) -> RaggedBatch:
    """Rows for a loss, two of them without a token that counts."""
    return ragged_batch(seed, (3, 3, 3), width=8, empty_rows=2)


def _dealt(group_sizes: Sequence[int]) -> list[int]:
    """The group of each row, dealt out in turn: sizes (2, 1, 2) give 0 1 2 0 2."""
    return [group for turn in range(max(group_sizes)) for group, size in enumerate(group_sizes) if turn < size]


def _rewards(rng: np.random.Generator, mask: np.ndarray, scores: np.ndarray, with_process: np.ndarray) -> np.ndarray:
    """The score on the last token of the mask; in the rows of ``with_process`` small rewards on the other ones."""
    rewards = np.zeros(mask.shape)
    for row, inside in enumerate(mask):
        sampled = np.flatnonzero(inside)
        if with_process[row]:
            rewards[row, sampled] = 0.1 * rng.normal(size=len(sampled))
        rewards[row, sampled[-1:]] = scores[row]
    return rewards


def _mask_row(rng: np.random.Generator, width: int) -> np.ndarray:
    row = np.zeros(width, dtype=bool)
    row[: int(rng.integers(1, width + 1))] = True
    for _ in range(int(rng.integers(0, 3))):
        start = int(rng.integers(0, width))
        row[start : start + 2] = False
    if not row.any():
        row[0] = True
    return row
