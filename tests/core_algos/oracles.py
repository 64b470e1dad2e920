"""The formulas once more, as naive loops over rows and tokens in float64, and the random batches they are compared on.

Written from the definitions, not from the code under test: nothing here is vectorised, masked or clever.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

Matrix = list[list[float]]


@dataclass
class RaggedBatch:
    """Rows of different lengths with gaps of tool tokens, groups interleaved, and finite rubbish outside the mask."""

    rewards: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor
    old_log_probs: torch.Tensor
    log_probs: torch.Tensor
    ref_log_probs: torch.Tensor
    advantages: torch.Tensor
    uids: np.ndarray

    def map(self, change) -> "RaggedBatch":
        """The batch with ``change`` applied to every tensor."""
        tensors = {name: change(value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return RaggedBatch(**tensors, uids=self.uids)


def ragged_batch(seed: int, num_groups: int = 4, group_size: int = 3, width: int = 9) -> RaggedBatch:
    """A batch in float64; the score of a row sits on its last token of the mask."""
    rng = np.random.default_rng(seed)
    num_rows = num_groups * group_size
    mask = np.zeros((num_rows, width), dtype=bool)
    rewards = np.zeros((num_rows, width))
    for row in range(num_rows):
        length = int(rng.integers(1, width + 1))
        mask[row, :length] = True
        for _ in range(int(rng.integers(0, 3))):
            start = int(rng.integers(0, width))
            mask[row, start : start + 2] = False
        if not mask[row].any():
            mask[row, 0] = True
        rewards[row, np.flatnonzero(mask[row])[-1]] = rng.choice([0.0, 0.25, 1.0]) + 0.1 * rng.normal()

    def noise(scale: float = 1.0) -> torch.Tensor:
        return torch.from_numpy(scale * rng.normal(size=(num_rows, width)))

    uids = np.array([f"0-{row % num_groups}" for row in range(num_rows)], dtype=object)
    old = noise() - 2.0
    return RaggedBatch(
        rewards=torch.from_numpy(rewards),
        values=noise(),
        mask=torch.from_numpy(mask),
        old_log_probs=old,
        log_probs=old + noise(0.4),
        ref_log_probs=old + noise(0.4),
        advantages=noise(),
        uids=uids,
    )


def gae(rewards: Matrix, values: Matrix, mask: Matrix, gamma: float, lam: float) -> Matrix:
    """Unwhitened, by deleting the masked-out tokens and summing the discounted deltas."""
    result = []
    for r, v, m in zip(rewards, values, mask, strict=True):
        kept = [t for t in range(len(m)) if m[t]]
        deltas = []
        for i, t in enumerate(kept):
            next_value = v[kept[i + 1]] if i + 1 < len(kept) else 0.0
            deltas.append(r[t] + gamma * next_value - v[t])
        row = [0.0] * len(m)
        for i, t in enumerate(kept):
            row[t] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(kept)))
        result.append(row)
    return result


def discounted_returns(rewards: Matrix, mask: Matrix, gamma: float) -> Matrix:
    """By deleting the masked-out tokens and summing the discounted rewards."""
    result = []
    for r, m in zip(rewards, mask, strict=True):
        kept = [t for t in range(len(m)) if m[t]]
        row = [0.0] * len(m)
        for i, t in enumerate(kept):
            row[t] = sum(gamma ** (j - i) * r[kept[j]] for j in range(i, len(kept)))
        result.append(row)
    return result


def whiten(matrix: Matrix, mask: Matrix) -> Matrix:
    kept = [x for row, m in zip(matrix, mask, strict=True) for x, inside in zip(row, m, strict=True) if inside]
    mean = sum(kept) / len(kept)
    variance = sum((x - mean) ** 2 for x in kept) / (len(kept) - 1) if len(kept) > 1 else 0.0
    return [
        [(x - mean) / math.sqrt(variance + 1e-8) if inside else 0.0 for x, inside in zip(row, m, strict=True)]
        for row, m in zip(matrix, mask, strict=True)
    ]


def siblings(uids, row: int) -> list[int]:
    return [other for other in range(len(uids)) if uids[other] == uids[row]]


def spread(per_row: list[float], mask: Matrix) -> Matrix:
    return [[a if inside else 0.0 for inside in m] for a, m in zip(per_row, mask, strict=True)]


def grpo(rewards: Matrix, mask: Matrix, uids, by_std: bool) -> Matrix:
    scores = [sum(row) for row in rewards]
    advantages = []
    for row, score in enumerate(scores):
        group = [scores[i] for i in siblings(uids, row)]
        mean = sum(group) / len(group)
        if max(group) == min(group):
            advantages.append(0.0)
            continue
        std = math.sqrt(sum((s - mean) ** 2 for s in group) / (len(group) - 1))
        advantages.append((score - mean) / (std + 1e-6) if by_std else score - mean)
    return spread(advantages, mask)


def rloo(rewards: Matrix, mask: Matrix, uids) -> Matrix:
    scores = [sum(row) for row in rewards]
    advantages = []
    for row, score in enumerate(scores):
        others = [scores[i] for i in siblings(uids, row) if i != row]
        constant = all(other == score for other in others)
        advantages.append(0.0 if constant else score - sum(others) / len(others))
    return spread(advantages, mask)


def aggregate(loss: Matrix, mask: Matrix, mode: str, scale: float) -> float:
    rows = [
        [x for x, inside in zip(row, m, strict=True) if inside] for row, m in zip(loss, mask, strict=True) if any(m)
    ]
    if mode == "token-mean":
        return sum(sum(row) for row in rows) / sum(len(row) for row in rows)
    if mode == "seq-mean-token-sum":
        return sum(sum(row) for row in rows) / len(rows)
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    if mode == "seq-mean-token-sum-norm":
        return sum(sum(row) / scale for row in rows) / len(rows)
    assert mode == "token-sum"
    return sum(sum(row) for row in rows)


def vanilla_token_loss(old: float, new: float, advantage: float, low: float, high: float, c: float) -> float:
    ratio = math.exp(min(max(new - old, -20.0), 20.0))
    clipped = min(max(ratio, 1.0 - low), 1.0 + high)
    loss = max(-advantage * ratio, -advantage * clipped)
    return min(loss, -advantage * c) if advantage < 0 else loss


def vanilla(old: Matrix, new: Matrix, advantages: Matrix, low: float, high: float, c: float) -> Matrix:
    return [
        [vanilla_token_loss(o, n, a, low, high, c) for o, n, a in zip(*row, strict=True)]
        for row in zip(old, new, advantages, strict=True)
    ]


def value_loss(predicted: Matrix, returns: Matrix, old: Matrix, cliprange: float) -> Matrix:
    def token(v: float, target: float, before: float) -> float:
        clipped = min(max(v, before - cliprange), before + cliprange)
        return 0.5 * max((v - target) ** 2, (clipped - target) ** 2)

    return [[token(*x) for x in zip(*row, strict=True)] for row in zip(predicted, returns, old, strict=True)]


def kl_value(d: float, name: str) -> float:
    base = name.removesuffix("+")
    if base in ("kl", "k1"):
        return d
    if base == "abs":
        return abs(d)
    if base in ("mse", "k2"):
        return d * d / 2
    x = min(max(-d, -20.0), 20.0)
    return min(max(math.exp(x) - x - 1, -10.0), 10.0)
