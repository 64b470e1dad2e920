"""The checks of a term of the loss. Each takes a `LossTerm` and raises a `Violation` that says what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.conformance.batches import RaggedBatch, literal_batch, loss_batch
from burnish.conformance.comparison import close, close_in_norm, must, unchanged
from burnish.conformance.losses.term import (
    LEAF_INPUTS,
    Evaluated,
    LossTerm,
    counts,
    evaluate,
    evaluate_part,
    prepare,
    reference_inputs,
)
from burnish.conformance.shared_ranks import on_ranks
from burnish.core_algos.collectives import ONE_RANK, Collective
from burnish.utils.errors import TrainingError
from burnish.utils.foreign_code import Caught

_SEEDS = range(3)


def _variants(term: LossTerm, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mode, with other settings and with importance weights in turn, in words and as settings."""
    for number, mode in enumerate(term.modes, start=seed):
        other = term.variants[number % len(term.variants)]
        weighted = term.takes_weights and number // 2 % 2 == 1
        words = [f"batch {seed}", mode, *(f"{key}={value}" for key, value in other.items())]
        words += ["importance weights"] if weighted else []
        yield ", ".join(words), {"loss_agg_mode": mode, "weighted": weighted, **other}


def _batches(term: LossTerm) -> Iterator[tuple[RaggedBatch, str, dict[str, Any]]]:
    """Random batches, each under every variant."""
    for seed in _SEEDS:
        for words, settings in _variants(term, seed):
            yield loss_batch(seed), words, settings


def _same(what: str, got: Evaluated, want: Evaluated, tolerance: float = 1e-10) -> None:
    close(f"{what}, the loss", got.loss, want.loss, tolerance)
    close(f"{what}, the gradient", got.gradient, want.gradient, tolerance)


def hand_answer(term: LossTerm) -> None:
    """Loss and gradient are those worked out on paper."""
    for answer in term.hand:
        got = evaluate(term, answer.batch, **answer.settings)
        close("The hand-computed answer, the loss", got.loss, answer.loss, answer.tolerance)
        close("The hand-computed answer, the gradient", got.gradient, answer.gradient, answer.tolerance)


def naive_loop(term: LossTerm) -> None:
    """The loss equals that of loops over rows and tokens."""
    assert term.reference is not None
    for batch, words, settings in _batches(term):
        known = term.with_settings(**settings)
        want = term.reference(reference_inputs(batch, settings["weighted"]), known)
        close(f"On a random batch ({words}), the loss", evaluate(term, batch, **settings).loss, want)


def gradient(term: LossTerm) -> None:
    """The gradient in float64 is the limit of differences of the naive loop, in which what is detached stands still."""
    assert term.reference is not None
    step = 1e-6
    leaf = LEAF_INPUTS[term.leaf]
    for batch, words, settings in _batches(term):
        known = term.with_settings(**settings)
        inputs = reference_inputs(batch, settings["weighted"])
        want = torch.zeros(batch.mask.shape, dtype=torch.float64)
        for row, token in batch.mask.nonzero().tolist():
            around = []
            for sign in (1, -1):
                moved = [list(values) for values in inputs[leaf]]
                moved[row][token] += sign * step
                around.append(term.reference({**inputs, leaf: moved}, known))
            want[row, token] = (around[0] - around[1]) / (2 * step)
        got = evaluate(term, batch, **settings).gradient
        close(f"On a random batch ({words}), the gradient", got, want, 1e-7)


def padding(term: LossTerm) -> None:
    """Columns of padding change neither loss nor gradient and get no gradient."""
    for batch, words, settings in _batches(term):
        width = batch.mask.shape[1]
        wide = evaluate(term, batch.pad(3, value=-2.0), **settings)
        must(not wide.gradient[:, width:].any(), f"Columns of padding have a gradient ({words}).")
        got = replace(wide, gradient=wide.gradient[:, :width])
        _same(f"With three columns of padding ({words})", got, evaluate(term, batch, **settings))


def row_order(term: LossTerm) -> None:
    """The order of the rows changes nothing."""
    for batch, words, settings in _batches(term):
        order = np.random.default_rng(0).permutation(len(batch.mask))
        want = evaluate(term, batch, **settings)
        got = evaluate(term, batch.take(order), **settings)
        _same(f"With the rows in another order ({words})", got, replace(want, gradient=want.gradient[order]))


def micro_batches(term: LossTerm) -> None:
    """Losses and gradients of micro-batches add up to those of the mini-batch, however it is cut, and metrics do too."""
    for batch, words, settings in _batches(term):
        known = term.with_settings(**settings)
        want = evaluate(term, batch, **settings)
        prepared_batch, prepared = prepare(term, batch, known, ONE_RANK)
        info = counts(prepared_batch.mask, known)
        rows = np.arange(len(batch.mask))
        for size in (1, 4):
            parts = []
            for part in np.split(rows, rows[size::size]):
                arguments = {name: tensor[part] for name, tensor in prepared.items()}
                parts.append(evaluate_part(term, prepared_batch.take(part), known, info, arguments))
            what = f"In micro-batches of {size} ({words})"
            _same(what, _sum(parts), want)
            _metrics_add_up(what, parts, want)


def _sum(parts: list[Evaluated]) -> Evaluated:
    loss = torch.stack([part.loss for part in parts]).sum()
    return Evaluated(loss, torch.cat([part.gradient for part in parts]), {})


def _metrics_add_up(what: str, parts: list[Evaluated], want: Evaluated) -> None:
    for name, value in want.metrics.items():
        shares = [torch.as_tensor(part.metrics[name]) for part in parts]
        must(not any(share.requires_grad for share in shares), f"The metric {name} is not detached.")
        close(f"{what}, the metric {name}", _total(name, torch.stack(shares).double()), value, 1e-6)


def _total(name: str, shares: Tensor) -> Tensor:
    """Extremes combine as such, everything else adds up."""
    if name.endswith("_max"):
        return shares.max()
    return shares.min() if name.endswith("_min") else shares.sum()


# The first rank has the rows without a token that counts, and fewer rows.
_SHARES = (np.array([0, 1, 4]), np.array([8, 2, 3, 7, 5, 6]))


def ranks(term: LossTerm) -> None:
    """Rows on two ranks, whose gradients are averaged, give the gradient of one rank with all of them."""
    for batch, words, settings in _batches(term):
        known = term.with_settings(**settings)
        want = evaluate(term, batch, **settings)
        prepared = _prepared_on_two_ranks(term, batch, known)
        info = counts(torch.cat([share.mask for share, _ in prepared]), known, dp_size=2)
        average = Evaluated(torch.zeros((), dtype=torch.float64), torch.zeros_like(want.gradient), {})
        for rows, (share, arguments) in zip(_SHARES, prepared, strict=True):
            part = evaluate_part(term, share, known, info, arguments)
            average.gradient[rows] = part.gradient / 2
            average.loss.add_(part.loss / 2)
        _same(f"On two ranks ({words})", average, want)


def _prepared_on_two_ranks(
    term: LossTerm, batch: RaggedBatch, settings: dict[str, Any]
) -> list[tuple[RaggedBatch, dict[str, Tensor]]]:
    def prepare_share(rank: int, collective: Collective) -> tuple[RaggedBatch, dict[str, Tensor]]:
        return prepare(term, batch.take(_SHARES[rank]), settings, collective)

    return on_ranks(2, prepare_share)


def fp32(term: LossTerm) -> None:
    """Loss and gradient for float32 inputs are those of float64 for the same numbers."""
    _in_dtype(term, torch.float32, 1e-5)


def bf16(term: LossTerm) -> None:
    """Loss and gradient for bfloat16 inputs are those of float64 for the same numbers, to the digits that a bfloat16 has."""
    _in_dtype(term, torch.bfloat16, 5e-3)


def _in_dtype(term: LossTerm, dtype: torch.dtype, tolerance: float) -> None:
    for wide, words, settings in _batches(term):
        batch = wide.to(dtype)
        got = evaluate(term, batch, **settings)
        want = evaluate(term, batch.to(torch.float64), **settings)
        must(got.loss.dtype in (torch.float32, torch.float64), f"For {dtype} inputs the loss is {got.loss.dtype}.")
        close(f"In {dtype}, compared with float64 ({words}), the loss", got.loss, want.loss, 1e-5)
        close_in_norm(
            f"In {dtype}, compared with float64 ({words}), the gradient", got.gradient, want.gradient, tolerance
        )


def extremes(term: LossTerm) -> None:
    """Nothing outside the mask counts, NaN inside it surfaces, and far-apart policies leave loss and gradient finite."""
    batch = loss_batch(0)
    want = evaluate(term, batch)
    unchanged("The loss", batch, loss_batch(0))
    must(not want.gradient[~batch.mask].any(), "There is a gradient outside the mask.")
    for rubbish in (math.nan, math.inf, -math.inf):
        got = evaluate(term, batch.fill_outside(rubbish))
        must(got.loss.isfinite(), f"{rubbish} outside the mask makes the loss {got.loss.item()}.")
        must(got.gradient.isfinite().all(), f"{rubbish} outside the mask makes a gradient that is not finite.")
        _same(f"With {rubbish} outside the mask", got, want)
    for field in (term.leaf, *term.constants):
        _nan_surfaces(term, batch, field)
    _only_the_leaf_learns(term, batch)
    if term.of_log_probs:
        _far_apart(term)


def _nan_surfaces(term: LossTerm, batch: RaggedBatch, field: str) -> None:
    broken = getattr(batch, field).clone()
    broken[tuple(batch.mask.nonzero()[0].tolist())] = math.nan
    with Caught() as caught:
        got = evaluate(term, replace(batch, **{field: broken}))
    if caught.error is None:
        seen = got.loss.isnan() or got.gradient.isnan().any()
        must(seen, f"NaN inside the mask of {field} surfaces neither in the loss nor in its gradient.")
    else:
        must(
            isinstance(caught.error, TrainingError),
            f"NaN inside the mask of {field} ends in {type(caught.error).__name__}: {caught.error}",
        )


def _only_the_leaf_learns(term: LossTerm, batch: RaggedBatch) -> None:
    constants: dict[str, Any] = {field: getattr(batch, field).clone().requires_grad_() for field in term.detaches}
    settings = term.with_settings(weighted=term.takes_weights)
    tracked = replace(batch, **{term.leaf: getattr(batch, term.leaf).clone().requires_grad_()}, **constants)
    loss, _ = term.compute(tracked, settings, counts(batch.mask, settings), {})
    gradients = torch.autograd.grad(loss, list(constants.values()), allow_unused=True) if constants else ()
    for field, of_field in zip(constants, gradients, strict=True):
        must(of_field is None, f"{field} gets a gradient: it is a constant of the update.")


def _far_apart(term: LossTerm) -> None:
    """Finite in float32; in float64 what the naive loop gives, so a bound lies where it is documented."""
    for distance, advantage in product((-1000.0, -100.0, 100.0, 1000.0), (-1.0, 1.0)):
        other = [[-0.1 - max(distance, 0.0), -1.0], [-0.5, 0.0]]
        batch = literal_batch(
            [[1, 1], [1, 0]],
            log_probs=[[-0.1 - max(-distance, 0.0), -0.9], [-0.5, 0.0]],
            old_log_probs=other,
            ref_log_probs=other,
            advantages=[[advantage, advantage / 2], [advantage / 4, 0.0]],
        )
        got = evaluate(term, batch.to(torch.float32))
        where = f"where log_prob is {distance:+.0f} from the other policy's and the advantage is {advantage:+.0f}"
        must(got.loss.isfinite(), f"The loss is {got.loss.item()} {where}.")
        must(got.gradient.isfinite().all(), f"The gradient is {got.gradient.flatten().tolist()} {where}.")
        if term.reference is not None:
            want = term.reference(reference_inputs(batch, weighted=False), term.with_settings())
            close(f"The loss {where}", evaluate(term, batch).loss, want)
