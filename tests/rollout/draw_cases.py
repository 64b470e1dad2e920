"""Batches of rows that each draw in their own way, and what a plain float64 loop over one row draws."""

import math

import torch
from torch import Tensor

from burnish.rollout.native.sampler import SamplingRows, stream_key

BOUNDARY = 1e-6
"""Rounding of fp32 may decide for a uniform number, or a mass, this close to a boundary."""


def sampling_rows(num_rows: int, *, device: str = "cpu", seed: int = 0, **values) -> SamplingRows:
    """Rows with streams of their own; ``values`` of numbers hold for all rows, tensors by row, the rest is off."""
    dtypes = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "may_stop": True}
    fields = {"stop_ids": torch.full((num_rows, 2), -1), "seen": None, **off, **values}
    fields.setdefault("keys", torch.tensor([stream_key(seed, "row", row) for row in range(num_rows)]))
    fields.setdefault("positions", torch.arange(num_rows) % 13)
    for name in off:
        tensor = torch.as_tensor(fields[name]).expand(num_rows)
        fields[name] = tensor.to(torch.bool if name == "may_stop" else dtypes.get(name, torch.float32)).contiguous()
    fields["stop_ids"] = torch.as_tensor(fields["stop_ids"]).int().expand(num_rows, -1).contiguous()
    return SamplingRows(**{k: v if v is None else v.to(device) for k, v in fields.items()})


def mixed_rows(num_rows: int, vocab: int, *, seed: int = 0, device: str = "cpu", max_top_k: int = 40) -> SamplingRows:
    """Every parameter is off in some rows and at random values in the others, independently."""
    g = torch.Generator().manual_seed(seed)

    def some(off: float, values: Tensor) -> Tensor:
        return torch.where(torch.rand(num_rows, generator=g) < 0.4, off, values)

    temperature = some(1.0, 0.2 + 1.5 * torch.rand(num_rows, generator=g))
    temperature[torch.rand(num_rows, generator=g) < 0.15] = 0.0
    return sampling_rows(
        num_rows,
        seed=seed,
        device=device,
        temperature=temperature,
        top_k=some(0.0, torch.randint(1, max_top_k, (num_rows,), generator=g).float()),
        top_p=some(1.0, 0.05 + 0.94 * torch.rand(num_rows, generator=g)),
        min_p=some(0.0, 0.3 * torch.rand(num_rows, generator=g)),
        repetition_penalty=some(1.0, 0.7 + torch.rand(num_rows, generator=g)),
        stop_ids=torch.randint(-1, vocab, (num_rows, 3), generator=g),
        may_stop=torch.rand(num_rows, generator=g) < 0.6,
        seen=torch.rand(num_rows, vocab, generator=g) < 0.2,
    )


def uniform_of(key: int, position: int) -> float:
    """SplitMix64 with Python's integers."""
    wrap = (1 << 64) - 1
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) & wrap
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & wrap
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & wrap
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


def softmax(values: list[float], temperature: float) -> list[float]:
    largest = max(values)
    weights = [math.exp((value - largest) / temperature) for value in values]
    return [weight / math.fsum(weights) for weight in weights]


def changed_logits(logits: Tensor, rows: SamplingRows, row: int) -> list[float]:
    """Logits of one row after the repetition penalty and without forbidden stop tokens."""
    values, penalty = logits[row].tolist(), rows.repetition_penalty[row]
    for token, value in enumerate(values):
        if rows.seen is not None and rows.seen[row, token]:
            # Divided in fp32, so that equal logits stay equal.
            x = logits[row, token]
            value = (x / penalty if x > 0 else x * penalty).item()
        values[token] = value
    if not rows.may_stop[row]:
        for token in rows.stop_ids[row].tolist():
            if 0 <= token < len(values):
                values[token] = -math.inf
    return values


def expected_distribution(logits: Tensor, rows: SamplingRows, row: int) -> tuple[list[float], float]:
    """The probabilities that a row draws from, and how close a mass is to where top-p or min-p cut.

    Tokens from the most likely on, the lower id first among equals.
    """
    values, temperature = changed_logits(logits, rows, row), rows.temperature[row].item()
    if temperature == 0:
        return softmax(values, 1.0), 1.0
    probs, margin = softmax(values, temperature), 1.0
    order = sorted(range(len(probs)), key=lambda token: (-values[token], token))
    top_k, top_p, min_p = rows.top_k[row].item(), rows.top_p[row].item(), rows.min_p[row].item()
    order = order[:top_k] if top_k > 0 else order
    mass, kept, before = math.fsum(probs[token] for token in order), [], 0.0
    for token in order:
        if top_p < 1:
            margin = min(margin, abs(before - top_p))
            if before >= top_p:
                break
        kept.append(token)
        before += probs[token] / mass
    if min_p > 0:
        ratios = {token: probs[token] / probs[order[0]] for token in kept}
        margin = min([margin, *(abs(ratio - min_p) for ratio in ratios.values())])
        kept = [token for token in kept if ratios[token] >= min_p]
    total = math.fsum(probs[token] for token in kept)
    chosen = set(kept)
    return [p / total if token in chosen else 0.0 for token, p in enumerate(probs)], margin


def expected_token(logits: Tensor, rows: SamplingRows, row: int) -> tuple[int, bool]:
    """The token of a row, and whether rounding may make it another one."""
    if rows.temperature[row] == 0:
        values = changed_logits(logits, rows, row)
        return values.index(max(values)), False
    probs, margin = expected_distribution(logits, rows, row)
    uniform, cumulative, token = uniform_of(rows.keys[row].item(), rows.positions[row].item()), 0.0, None
    for candidate, p in enumerate(probs):
        cumulative += p
        margin = min(margin, abs(cumulative - uniform)) if p else margin
        if token is None and cumulative > uniform:
            token = candidate
    return max(range(len(probs)), key=probs.__getitem__) if token is None else token, margin < BOUNDARY
