"""Every row draws from exactly the distribution that its own parameters define, whatever the other rows do."""

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from burnish.rollout.native import sampler, truncation
from burnish.rollout.native.sampler import Draw, SamplingRows, draw
from tests.rollout.draw_cases import (
    expected_distribution,
    expected_token,
    mixed_rows,
    sampling_rows,
    softmax,
)
from tests.rollout.kernels.cases import on_both_cpu_backends

pytestmark = on_both_cpu_backends
LOGITS = torch.tensor([1.0, -0.5, 2.0, 0.3, 1.0, -3.0, 0.0, 1.6])
SEEN = torch.tensor([0, 1, 1, 0, 0, 0, 1, 0]).bool()
NUM_DRAWS = 8_000
# 99.99 % quantiles of chi-square for 0..7 degrees of freedom.
CHI_SQUARE_BOUND = [0.0, 15.14, 18.42, 21.11, 23.51, 25.74, 27.86, 29.88]

CASES = {
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "penalty": {"repetition_penalty": 1.7, "seen": SEEN},
    "reward for repetition": {"repetition_penalty": 0.5, "seen": SEEN},
    "min_new_tokens": {"may_stop": False, "stop_ids": [[2, -1, 7]]},
    "top_k, top_p": {"top_k": 5, "top_p": 0.6, "temperature": 1.3},
    "top_p, min_p": {"top_p": 0.95, "min_p": 0.2},
    "top_k, min_p": {"top_k": 4, "min_p": 0.4, "temperature": 0.8},
    "all": {
        "temperature": 1.4,
        "top_k": 6,
        "top_p": 0.9,
        "min_p": 0.12,
        "repetition_penalty": 1.3,
        "seen": SEEN,
        "may_stop": False,
        "stop_ids": [[0, 0, -1]],
    },
}


def many(values: dict, num_draws: int = NUM_DRAWS) -> tuple[Tensor, SamplingRows]:
    """One row, many times, each with its own stream."""
    values = dict(values)
    if "seen" in values:
        values["seen"] = values["seen"].expand(num_draws, -1)
    return LOGITS.repeat(num_draws, 1), sampling_rows(num_draws, **values)


def slice_rows(rows: SamplingRows, index) -> SamplingRows:
    return SamplingRows(*(None if field is None else field[index] for field in rows))


def assert_same(a: Draw, b: Draw) -> None:
    """To the bit."""
    assert torch.equal(a.tokens, b.tokens)
    torch.testing.assert_close(a.log_probs, b.log_probs, rtol=0, atol=0, equal_nan=True)
    if a.truncated_log_probs is not None and b.truncated_log_probs is not None:
        torch.testing.assert_close(a.truncated_log_probs, b.truncated_log_probs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", CASES)
def test_tokens_follow_the_exact_distribution(case):
    logits, rows = many(CASES[case])
    tokens = draw(logits, rows, truncates=set(CASES[case]) != {"temperature"}).tokens
    expected, _ = expected_distribution(logits, rows, 0)
    counts = tokens.bincount(minlength=len(expected)).tolist()
    assert all(count == 0 for count, p in zip(counts, expected, strict=True) if p == 0)
    pairs = [(count, NUM_DRAWS * p) for count, p in zip(counts, expected, strict=True) if p > 0]
    assert sum((count - mean) ** 2 / mean for count, mean in pairs) < CHI_SQUARE_BOUND[len(pairs) - 1]


@pytest.mark.parametrize("case", CASES)
def test_log_probs_are_of_the_full_and_of_the_truncated_distribution_and_both_sum_to_one(case):
    logits, rows = many(CASES[case], 2_000)
    drawn = draw(logits, rows, truncates=True)
    full = torch.tensor(softmax(LOGITS.tolist(), rows.temperature[0].item()))
    torch.testing.assert_close(drawn.log_probs, full.log()[drawn.tokens], rtol=0, atol=2e-6)
    kept, _ = expected_distribution(logits, rows, 0)
    by_token = dict(zip(drawn.tokens.tolist(), drawn.truncated_log_probs.tolist(), strict=True))
    unseen = sum(p for token, p in enumerate(kept) if token not in by_token)
    assert unseen < 0.002
    assert sum(math.exp(value) for value in by_token.values()) == pytest.approx(1 - unseen, abs=1e-6)
    assert all(math.exp(value) == pytest.approx(kept[token], abs=1e-6) for token, value in by_token.items())


@cache
def drawn_by_a_plain_loop(vocab, scale, rounded):
    """Logits, and with rows of all kinds and with rows that truncate nothing: the rows, and what each of them draws."""
    num_rows = 50
    logits = scale * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab))
    logits = (logits * 4 / scale).round() / 4 * scale if rounded else logits  # Many equal logits.
    rows = mixed_rows(num_rows, vocab, seed=vocab + rounded, max_top_k=vocab + 9)
    plain = rows._replace(seen=None, repetition_penalty=torch.ones(num_rows), may_stop=torch.ones(num_rows).bool())
    plain = plain._replace(top_k=rows.top_k * 0, top_p=torch.ones(num_rows), min_p=rows.min_p * 0)
    return logits, *((kind, [expected_token(logits, kind, row) for row in range(num_rows)]) for kind in (rows, plain))


@pytest.mark.parametrize("vocab", [5, 256, 300, 515])
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("rounded", [False, True])
def test_rows_of_all_kinds_draw_what_a_plain_loop_draws(vocab, scale, rounded):
    logits, (rows, expected), (plain, expected_plain) = drawn_by_a_plain_loop(vocab, scale, rounded)
    tokens = draw(logits.clone(), rows, truncates=True).tokens.tolist()
    wrong = [row for row, (token, _) in enumerate(expected) if tokens[row] != token]
    assert [row for row in wrong if not expected[row][1]] == []
    assert len(wrong) <= 1
    tokens = draw(logits.clone(), plain, truncates=False).tokens.tolist()
    assert [row for row, (token, close) in enumerate(expected_plain) if tokens[row] != token and not close] == []


@pytest.mark.parametrize("truncates", [False, True])
def test_a_row_is_drawn_alike_alone_in_any_order_and_in_chunks(truncates, monkeypatch):
    num_rows, vocab = 60, 700
    logits = 3 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(2))
    rows = mixed_rows(num_rows, vocab)
    together = draw(logits, rows, truncates=truncates)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(3))
    shuffled = draw(logits[order], slice_rows(rows, order), truncates=truncates)
    assert_same(shuffled, Draw(*(None if part is None else part[order] for part in together)))
    for row in range(num_rows):
        one = slice(row, row + 1)
        alone = draw(logits[one], slice_rows(rows, one), truncates=truncates)
        assert_same(alone, Draw(*(None if part is None else part[one] for part in together)))
    monkeypatch.setattr(sampler, "_MAX_CHUNK_ELEMENTS", 7 * vocab + 1)
    assert_same(draw(logits, rows, truncates=truncates), together)


def test_a_row_that_nothing_truncates_does_not_notice_that_others_are():
    logits = 3 * torch.randn(40, 600, generator=torch.Generator().manual_seed(5))
    rows = mixed_rows(40, 600)
    plain = slice(0, 20)
    for name in ("top_k", "min_p"):
        getattr(rows, name)[plain] = 0
    for name in ("top_p", "repetition_penalty", "may_stop"):
        getattr(rows, name)[plain] = 1
    among = draw(logits, rows, truncates=True)
    alone = draw(logits[plain], slice_rows(rows, plain), truncates=False)
    assert alone.truncated_log_probs is None
    assert_same(alone, Draw(*(part[plain] for part in among)))
    torch.testing.assert_close(among.truncated_log_probs[plain], alone.log_probs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("truncates", [False, True])
def test_a_greedy_row_takes_the_lowest_id_of_the_largest_logits(truncates):
    logits = torch.zeros(4, 700)
    for row, best in enumerate([(3, 500), (255, 256), (699,), range(700)]):
        logits[row, list(best)] = 1.0
    drawn = draw(logits, sampling_rows(4, temperature=0.0, top_k=2, top_p=0.1, min_p=0.5), truncates=truncates)
    assert drawn.tokens.tolist() == [3, 255, 699, 0]
    torch.testing.assert_close(drawn.log_probs, logits.log_softmax(-1).amax(-1))
    if truncates:  # Nothing of what it drew from is cut off.
        torch.testing.assert_close(drawn.truncated_log_probs, drawn.log_probs)


def test_a_greedy_row_heeds_penalties_and_forbidden_stops():
    logits = torch.tensor([[1.0, 4.0, 3.0, 2.0]])
    rows = sampling_rows(
        1,
        temperature=0.0,
        repetition_penalty=2.0,
        seen=torch.tensor([[False, False, True, False]]),
        stop_ids=[[1]],
        may_stop=False,
    )
    drawn = draw(logits, rows, truncates=True)
    assert drawn.tokens.tolist() == [3]
    torch.testing.assert_close(drawn.log_probs, logits.log_softmax(-1)[:, 3])
    changed = torch.tensor([[1.0, -math.inf, 1.5, 2.0]])
    torch.testing.assert_close(drawn.truncated_log_probs, changed.log_softmax(-1)[:, 3])


@pytest.mark.parametrize("truncates", [False, True])
def test_a_non_finite_row_has_nan_log_probs_and_disturbs_nobody(truncates):
    vocab = 600
    logits = torch.randn(24, vocab, generator=torch.Generator().manual_seed(7))
    rows = mixed_rows(24, vocab, seed=4)
    healthy = draw(logits, rows, truncates=truncates)
    bad = logits.clone()
    bad[0], bad[3, 5], bad[4, vocab - 1], bad[9], bad[10] = math.nan, math.nan, math.inf, -math.inf, math.inf
    drawn, broken = draw(bad, rows, truncates=truncates), torch.tensor([0, 3, 4, 9, 10])
    fine = torch.ones(24, dtype=torch.bool).index_fill(0, broken, False)
    assert drawn.log_probs[broken].isnan().all()
    assert drawn.tokens.min() >= 0
    assert drawn.tokens.max() < vocab
    assert_same(*(Draw(*(None if p is None else p[fine] for p in each)) for each in (drawn, healthy)))


def test_a_row_from_which_nothing_can_be_drawn_has_nan_log_probs():
    logits = torch.tensor([[1.0, 2.0, -math.inf]])
    drawn = draw(logits, sampling_rows(1, stop_ids=[[0, 1]], may_stop=False), truncates=True)
    assert drawn.log_probs.isnan().all()
    assert drawn.truncated_log_probs.isnan().all()


def test_stop_ids_that_pad_repeat_or_lie_outside_the_vocabulary_forbid_nothing_else():
    logits, rows = many({"may_stop": False, "stop_ids": [[-1, 8, 0, 0, 100]]}, 2_000)
    assert set(draw(logits, rows, truncates=True).tokens.tolist()) == {1, 2, 3, 4, 5, 6, 7}
    allowed = rows._replace(may_stop=torch.ones(2_000, dtype=torch.bool))
    assert set(draw(logits, allowed, truncates=True).tokens.tolist()) == set(range(8))


@pytest.mark.parametrize("temperature", [1e-45, 1e-20, 1e-6])
def test_a_tiny_temperature_draws_the_largest_logit(temperature):
    logits = torch.tensor([[30.0, 99.0, -5.0, 98.0, -math.inf]]).repeat(50, 1)
    for values in ({}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}):
        drawn = draw(logits, sampling_rows(50, temperature=temperature, **values), truncates=bool(values))
        assert drawn.tokens.unique().tolist() == [1]
        torch.testing.assert_close(drawn.log_probs, torch.zeros(50))


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.9999])
@pytest.mark.parametrize("kind", ["flat", "equal", "peaked", "one"])
def test_the_nucleus_of_a_large_vocabulary_is_the_sorted_one(kind, top_p):
    vocab = 9_000
    noise = torch.randn(3, vocab, generator=torch.Generator().manual_seed(1))
    logits = {"flat": noise * 0.1, "equal": noise * 0, "peaked": noise * 9, "one": noise * 1e-3}[kind]
    logits[:, 77] += 50.0 if kind == "one" else 0.0
    probs = logits.double().softmax(-1)
    kept = truncation.truncation_mask(logits, -1, top_p)
    for row in range(3):
        order = logits[row].sort(descending=True, stable=True).indices
        before = probs[row, order].cumsum(0) - probs[row, order]
        clear = (before - top_p).abs() > 1e-6
        assert torch.equal(kept[row, order][clear], (before < top_p)[clear])
        assert (~clear).sum() <= 60


def test_only_positions_and_keys_tell_two_draws_of_one_row_apart():
    logits, rows = LOGITS.repeat(300, 1), sampling_rows(300)
    again = draw(logits, rows, truncates=False)
    assert_same(again, draw(logits, rows, truncates=False))
    moved = draw(logits, rows._replace(positions=rows.positions + 1), truncates=False)
    assert (moved.tokens != again.tokens).sum() > 150
