"""The checks of a correction. Each takes a `Correction` and raises a `Violation` that says what is wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from burnish.conformance.batches import RaggedBatch, literal_batch, ragged_batch
from burnish.conformance.comparison import close, must
from burnish.conformance.correction.algorithm import Correction
from burnish.conformance.correction.answers import BATCH
from burnish.utils.errors import TrainingError
from burnish.utils.foreign_code import Caught

Result = tuple[Tensor | None, Tensor]

_SEEDS = range(6)


def _batch(seed: int) -> RaggedBatch:
    return ragged_batch(seed, (4, 4), width=6, empty_rows=1)


def _same(what: str, got: Result, want: Result, mask: Tensor, tolerance: float = 1e-9) -> None:
    """Weights equal inside the mask, and the masks equal."""
    must((got[0] is None) == (want[0] is None), f"{what}, there are weights where there must be none, or none.")
    if got[0] is not None and want[0] is not None:
        weights, wanted = (torch.where(mask, tensor, 0.0) for tensor in (got[0], want[0]))
        close(f"{what}, the weight", weights, wanted, tolerance)
    close(f"{what}, the loss mask", got[1].double(), want[1].double())


def hand_answer(correction: Correction) -> None:
    """Weights and mask are those worked out on paper."""
    for answer in correction.hand:
        weights, mask = correction(BATCH, {**correction.settings, **answer.settings})
        if answer.weights is not None:
            must(weights is not None, "There are no weights.")
            inside = torch.where(BATCH.mask, weights, 1.0)  # type: ignore[arg-type]
            close("The hand-computed answer, the weight", inside, answer.weights, 1e-7)
        if answer.mask is not None:
            close("The hand-computed answer, the loss mask", mask.double(), answer.mask)


def naive_loop(correction: Correction) -> None:
    """The result equals that of loops over rows and tokens."""
    changed = False
    for seed in _SEEDS:
        batch = _batch(seed)
        for settings in (correction.settings, *correction.other_settings):
            got, want = correction(batch, settings), correction.expected(batch, settings)
            _same(f"On random batch {seed} with {dict(settings)}", got, want, batch.mask)
            must(got[1].dtype == torch.bool, f"The loss mask is {got[1].dtype}, not bool.")
            must(not (got[1] & ~batch.mask).any(), "The loss mask has tokens that were not in it before.")
            changed |= bool(want[0] is not None or (want[1] != batch.mask).any())
    must(changed, "On none of the random batches is anything corrected.")


def padding(correction: Correction) -> None:
    """Columns of padding change nothing."""
    for seed in _SEEDS:
        batch = _batch(seed)
        width = batch.mask.shape[1]
        weights, mask = correction(batch.pad(3, value=-1.0))
        must(not mask[:, width:].any(), "Columns of padding are in the loss mask.")
        got = (None if weights is None else weights[:, :width], mask[:, :width])
        _same("With three columns of padding", got, correction(batch), batch.mask)


def row_order(correction: Correction) -> None:
    """Every row keeps its weights and its mask wherever it lies."""
    for seed in _SEEDS:
        batch = _batch(seed)
        order = np.random.default_rng(seed).permutation(len(batch.mask))
        weights, mask = correction(batch)
        want = (None if weights is None else weights[order], mask[order])
        _same("With the rows in another order", correction(batch.take(order)), want, batch.mask[order])


def fp32(correction: Correction) -> None:
    """float32 inputs give what float64 gives for the same numbers."""
    _in_dtype(correction, torch.float32)


def bf16(correction: Correction) -> None:
    """bfloat16 inputs are computed with in float32 or wider, and give what float64 gives for the same numbers."""
    _in_dtype(correction, torch.bfloat16)


def _in_dtype(correction: Correction, dtype: torch.dtype) -> None:
    for seed in _SEEDS:
        batch = _batch(seed).to(dtype)
        got = correction(batch)
        if got[0] is not None:
            must(got[0].dtype in (torch.float32, torch.float64), f"For {dtype} inputs the weights are {got[0].dtype}.")
        want = correction(batch.to(torch.float64))
        _same(f"In {dtype}, compared with float64", got, want, batch.mask, 1e-6)


def extremes(correction: Correction) -> None:
    """Nothing outside the mask counts, NaN inside it is refused, weights are finite and have no gradient."""
    batch = _batch(0)
    want = correction(batch)
    for rubbish in (math.nan, math.inf, -math.inf):
        _same(f"With {rubbish} outside the mask", correction(batch.fill_outside(rubbish)), want, batch.mask)
    row, token = batch.mask.nonzero()[0].tolist()
    for field in ("old_log_probs", "rollout_log_probs"):
        broken = getattr(batch, field).clone()
        broken[row, token] = math.nan
        with Caught() as caught:
            correction(replace(batch, **{field: broken}))
        must(isinstance(caught.error, TrainingError), f"NaN inside the mask of {field} is not refused.")
    for distance in (-1000.0, 1000.0):
        far = literal_batch(
            [[1, 1], [1, 1]],
            old_log_probs=[[-1000.0 - distance, -1.0], [-1.0, -1.0]],
            rollout_log_probs=[[-1000.0, -1.0], [-1.0, -1.0]],
        ).to(torch.float32)
        weights, _ = correction(far)
        finite = weights is None or bool(weights.isfinite().all())
        must(finite, f"Weights are not finite where the policies are {distance:+.0f} apart.")
    tracked = replace(batch, old_log_probs=batch.old_log_probs.clone().requires_grad_())
    weights, _ = correction(tracked)
    must(weights is None or not weights.requires_grad, "The weights have a gradient: they must be detached.")


def hyper_parameters(correction: Correction) -> None:
    """Wider bounds and higher thresholds let more through; normalised weights have the mean 1."""
    batch = _batch(1)
    if correction.settings.get("rollout_is"):
        for threshold in (1.0, 1.5, 4.0):
            weights, mask = correction(batch, {**correction.settings, "rollout_is_threshold": threshold})
            assert weights is not None
            largest = float(weights[mask].detach().max())
            must(
                largest <= threshold * (1 + 1e-6), f"With rollout_is_threshold={threshold} there is a weight {largest}."
            )
        free, mask = correction(batch, {**correction.settings, "rollout_is_threshold": 1e9})
        even, _ = correction(
            batch, {**correction.settings, "rollout_is_threshold": 1e9, "rollout_is_batch_normalize": True}
        )
        assert free is not None
        assert even is not None
        close("The mean of normalised weights", even[mask].mean(), 1.0)
        close("A normalised weight", even[mask], free[mask] / free[mask].mean())
        return
    k1 = correction.name.endswith("k1")
    kept = []
    for bound in (1.0001, 1.3, 1e9) if k1 else (1e-9, 0.05, 1e9):
        _, mask = correction(batch, {**correction.settings, "rollout_rs_threshold": bound})
        kept.append(int(mask.sum()))
    total = int(batch.mask.sum())
    must(kept[0] == 0, f"Bounds that allow no difference keep {kept[0]} of {total} tokens.")
    must(kept[0] <= kept[1] <= kept[2], f"Wider bounds keep fewer tokens: {kept}.")
    must(kept[2] == total, f"Bounds that allow everything keep {kept[2]} of {total} tokens.")
    if k1:
        both, single = (
            correction(batch, {**correction.settings, "rollout_rs_threshold": text})[1] for text in ("0.5_2.0", "2.0")
        )
        close("A single bound 2.0 means 0.5_2.0: the loss mask", single.double(), both.double())
