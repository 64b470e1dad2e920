"""One distribution for all rows: temperature, top-k and top-p; random streams."""

import pytest
import torch
from torch import Tensor

from burnish.rollout.base import SamplingParams
from burnish.rollout.native import sampler
from burnish.rollout.native.sampler import sample, stream_key, truncation_mask, uniforms
from burnish.utils.errors import RolloutError

LOGITS = torch.tensor([1.0, -0.5, 2.0, 0.3, 1.0, -3.0])
NUM_DRAWS = 20_000
# 99.99 % quantiles of chi-square for 0..5 degrees of freedom.
CHI_SQUARE_BOUND = [0.0, 15.14, 18.42, 21.11, 23.51, 25.74]


def draw(sampling: SamplingParams, logits: Tensor = LOGITS, num_draws: int = NUM_DRAWS) -> tuple[Tensor, Tensor]:
    """Many samples of one prompt at one position."""
    keys = torch.tensor([stream_key(sampling.seed, "prompt", sample_index) for sample_index in range(num_draws)])
    return sample(logits.expand(num_draws, -1), sampling, keys, torch.full((num_draws,), 7))


def expected_probs(temperature: float, top_k: int, top_p: float, logits: Tensor = LOGITS) -> list[float]:
    """By a plain loop: tokens from the most likely on, the lower id first among equals."""
    probs = (logits.double() / temperature).softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    order = order[:top_k] if top_k > 0 else order
    mass, kept, before = sum(probs[token] for token in order), [], 0.0
    for token in order:
        if before >= top_p:
            break
        kept.append(token)
        before += probs[token] / mass
    total = sum(probs[token] for token in kept)
    return [probs[token] / total if token in kept else 0.0 for token in range(len(probs))]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, -1, 1.0), (0.5, -1, 1.0), (1.5, -1, 1.0), (1.0, 2, 1.0), (0.7, 4, 1.0), (1.0, -1, 0.6), (1.3, 5, 0.8)],
)
def test_sampled_tokens_follow_the_exact_distribution(temperature: float, top_k: int, top_p: float) -> None:
    sampling = SamplingParams(max_new_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, seed=3)
    tokens, _ = draw(sampling)
    counts = tokens.bincount(minlength=len(LOGITS)).tolist()
    expected = expected_probs(temperature, top_k, top_p)
    assert all(count == 0 for count, p in zip(counts, expected, strict=True) if p == 0)
    statistic = sum((c - NUM_DRAWS * p) ** 2 / (NUM_DRAWS * p) for c, p in zip(counts, expected, strict=True) if p > 0)
    assert statistic < CHI_SQUARE_BOUND[sum(p > 0 for p in expected) - 1]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.5, -1, 1.0), (1.5, 2, 1.0), (1.5, -1, 0.5)])
def test_log_probs_are_of_the_full_distribution_even_when_it_is_truncated(
    temperature: float, top_k: int, top_p: float
) -> None:
    tokens, log_probs = draw(SamplingParams(max_new_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p))
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, (LOGITS / temperature).log_softmax(-1)[tokens])


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"do_sample": False, "temperature": 0.3}])
def test_greedy_takes_the_largest_logit_with_its_log_prob_at_temperature_one(sampling: dict) -> None:
    tokens, log_probs = draw(SamplingParams(max_new_tokens=1, **sampling), num_draws=5)
    assert tokens.tolist() == [2] * 5
    torch.testing.assert_close(log_probs, LOGITS.log_softmax(-1)[2].expand(5))


@pytest.mark.parametrize("top_k", [-1, 1, 2, 3, 6, 50])
@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.5, 0.9, 1.0])
def test_truncation_keeps_what_a_plain_loop_keeps(top_k: int, top_p: float) -> None:
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    rows = torch.cat([rows, rows.round(), torch.zeros(1, 6)])  # Rounded rows have equal logits.
    mask = truncation_mask(rows, top_k, top_p)
    mask = torch.ones_like(rows, dtype=torch.bool) if mask is None else mask
    expected = [[p > 0 for p in expected_probs(1.0, top_k, top_p, row)] for row in rows]
    assert mask.tolist() == expected


def test_uniforms_are_uniform_and_unrelated_across_keys_and_positions() -> None:
    keys = torch.tensor([stream_key(0, f"prompt {i % 50}", i // 50) for i in range(400)])
    grid = torch.stack([uniforms(keys, torch.full_like(keys, position)) for position in range(100)])
    assert grid.min() >= 0
    assert grid.max() < 1
    counts = grid.flatten().mul(20).long().bincount(minlength=20).double()
    assert ((counts - 2000) ** 2 / 2000).sum() < 51.0  # 99.99 % of chi-square with 19 degrees of freedom.
    assert len(grid.flatten().unique()) == grid.numel()
    for a, b in [(grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:])]:
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(correlation) < 0.02


def test_a_stream_depends_on_seed_uid_and_sample_and_never_on_the_process() -> None:
    keys = {stream_key(seed, uid, i) for seed in (0, 1) for uid in ("0", "1", "01") for i in range(12)}
    assert len(keys) == 72
    assert stream_key(1, "23", 4) == 7203375981290899716
    assert float(uniforms(torch.tensor([5]), torch.tensor([9]))) == pytest.approx(splitmix(5, 10), abs=0)


def splitmix(key: int, step: int) -> float:
    """SplitMix64 with Python's integers."""
    wrap = (1 << 64) - 1
    z = (key + step * 0x9E3779B97F4A7C15) & wrap
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & wrap
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & wrap
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


def test_rows_are_sampled_alike_alone_together_and_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(30, 11, generator=torch.Generator().manual_seed(1))
    keys, positions = torch.arange(30), torch.arange(30) % 4
    sampling = SamplingParams(max_new_tokens=1, top_p=0.8)
    tokens, log_probs = sample(logits, sampling, keys, positions)
    alone = [sample(logits[i : i + 1], sampling, keys[i : i + 1], positions[i : i + 1])[0].item() for i in range(30)]
    assert tokens.tolist() == alone
    monkeypatch.setattr(sampler, "_MAX_CHUNK_ELEMENTS", 50)
    chunked = sample(logits, sampling, keys, positions)
    assert torch.equal(chunked[0], tokens)
    assert torch.equal(chunked[1], log_probs)


def test_tokens_without_probability_are_never_sampled() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")])
    tokens, _ = draw(SamplingParams(max_new_tokens=1), logits)
    assert set(tokens.tolist()) == {1, 3}


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 1), (1 - 2.0**-53, 3)])
@pytest.mark.parametrize("largest", [0.0, 80.0])
def test_the_ends_of_the_unit_interval_give_the_first_and_the_last_token_that_has_probability(
    monkeypatch: pytest.MonkeyPatch, uniform: float, expected: int, largest: float
) -> None:
    monkeypatch.setattr(sampler, "uniforms", lambda keys, _: torch.full(keys.shape, uniform, dtype=torch.float64))
    logits = torch.tensor([float("-inf"), largest, 0.3, largest, float("-inf")])
    for settings in ({}, {"top_k": 3}, {"top_p": 0.999999}):
        tokens, _ = draw(SamplingParams(max_new_tokens=1, **settings), logits, 4)
        assert tokens.tolist() == [expected] * 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_row_has_a_non_finite_log_prob(bad: float) -> None:
    for temperature in (0.0, 1.0):
        _, log_probs = draw(SamplingParams(max_new_tokens=1, temperature=temperature), torch.tensor([0.0, bad, 1.0]), 3)
        assert not log_probs.isfinite().any()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be a number of at least 0; 0 decodes greedily"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_k": -2}, "top_k=-2 must be at least 1, or -1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(values: dict, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        SamplingParams(**{"max_new_tokens": 1, **values})
