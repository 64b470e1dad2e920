"""The policy losses once more, token by token and row by row in float64, from the definitions alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass

Matrix = list[list[float]]


@dataclass(frozen=True)
class Keys:
    """The numbers a loss reads, with other values than the defaults, so that a wrong one shows."""

    low: float = 0.15
    high: float = 0.28
    c: float = 1.3
    tau_pos: float = 0.9
    tau_neg: float = 1.4
    beta: float = 0.3


def ratio_of(old: float, new: float) -> float:
    return math.exp(min(max(new - old, -20.0), 20.0))


def clip(x: float, lowest: float, highest: float) -> float:
    return min(max(x, lowest), highest)


def ppo(old: float, new: float, a: float, k: Keys) -> float:
    ratio = ratio_of(old, new)
    return max(-a * ratio, -a * clip(ratio, 1 - k.low, 1 + k.high))


def vanilla(old: float, new: float, a: float, k: Keys) -> float:
    return min(ppo(old, new, a, k), -a * k.c) if a < 0 else ppo(old, new, a, k)


def sapo(old: float, new: float, a: float, k: Keys) -> float:
    tau = k.tau_pos if a > 0 else k.tau_neg
    return -a * 4 / tau / (1 + math.exp(-tau * (ratio_of(old, new) - 1)))


def gpg(old: float, new: float, a: float, k: Keys) -> float:
    return -new * a


def cispo(old: float, new: float, a: float, k: Keys) -> float:
    return -clip(ratio_of(old, new), 1 - k.low, 1 + k.high) * a * new


def dro(old: float, new: float, a: float, k: Keys) -> float:
    return -(new * a - 0.5 * k.beta * (new - old) ** 2)


def dppo_tv(old: float, new: float, a: float, k: Keys) -> float:
    moved = math.exp(new) - math.exp(old)
    valid = moved <= k.high if a > 0 else moved >= -k.low
    return -a * min(ratio_of(old, new), k.c) * new if valid else 0.0


def dppo_kl(old: float, new: float, a: float, k: Keys) -> float:
    p_old, p = math.exp(old), math.exp(new)
    kl = p_old * (old - new) + (1 - p_old) * math.log((1 - p_old) / (1 - p))
    valid = kl <= k.high or p <= p_old if a > 0 else kl <= k.low or p >= p_old
    return -a * min(ratio_of(old, new), k.c) * new if valid else 0.0


TOKEN_LOSSES: dict[str, Callable[[float, float, float, Keys], float]] = {
    "vanilla": vanilla, "sapo": sapo, "gpg": gpg, "cispo": cispo, "dro": dro, "dppo_tv": dppo_tv, "dppo_kl": dppo_kl,
}  # fmt: skip


def per_token(name: str, old: Matrix, new: Matrix, advantages: Matrix, k: Keys) -> Matrix:
    loss = TOKEN_LOSSES[name]
    return [[loss(o, n, a, k) for o, n, a in zip(*row, strict=True)] for row in zip(old, new, advantages, strict=True)]


def gspo(old: Matrix, new: Matrix, advantages: Matrix, weights: Matrix, mask: Matrix, k: Keys) -> float:
    rows = []
    for o, n, a, w, m in zip(old, new, advantages, weights, mask, strict=True):
        kept = [t for t in range(len(m)) if m[t]]
        s = sum(n[t] - o[t] for t in kept) / len(kept)
        rows.append(sum(w[t] * ppo(0.0, min(s, 10.0), a[t], k) for t in kept) / len(kept))
    return sum(rows) / len(rows)


def geo_mean(old: Matrix, new: Matrix, advantages: Matrix, weights: Matrix, mask: Matrix, k: Keys) -> float:
    rows = []
    for o, n, a, w, m in zip(old, new, advantages, weights, mask, strict=True):
        kept = [t for t in range(len(m)) if m[t]]
        bounded = [min(n[t] - o[t], k.high) if a[t] > 0 else max(n[t] - o[t], -k.low) for t in kept]
        ratio = math.exp(sum(bounded) / len(kept))
        weight = math.prod(w[t] for t in kept) ** (1 / len(kept))
        rows.append(-sum(a[t] for t in kept) / len(kept) * ratio * weight)
    return sum(rows) / len(rows)


def covariances(new: Matrix, advantages: Matrix, mask: Matrix) -> dict[tuple[int, int], float]:
    """(A - mean A)(log_prob - mean log_prob) by (row, token), of the tokens of the mask."""
    tokens = [(i, t) for i, row in enumerate(mask) for t, inside in enumerate(row) if inside]
    mean_a = sum(advantages[i][t] for i, t in tokens) / len(tokens)
    mean_n = sum(new[i][t] for i, t in tokens) / len(tokens)
    return {(i, t): (advantages[i][t] - mean_a) * (new[i][t] - mean_n) for i, t in tokens}
