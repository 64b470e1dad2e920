"""The gradient is one, however it is computed: against plain transformers, padded, with full logits, in float64.

Packing, shared prompts, the fused head, fused layers, micro-batches, recomputed activations, state on the CPU, adapters, and
the ways to spread all that over ranks: every two of these meet in some case.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from burnish.model.load import build_causal_lm
from tests.engine.engine_program import policy_loss, run_ranks
from tests.engine.matrix_program import (
    FACTORS,
    PROGRAM,
    TEMPERATURE,
    adapter_weights,
    gradient,
    group_batch,
    model_config,
    name_of,
    pairs_of,
    pairwise_cases,
    widen_norms,
)

CASES = pairwise_cases()
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


@cache
def reference(family: str, dtype: torch.dtype, trained: str) -> dict[str, Tensor]:
    """By transformers' own attention on padded rows, torch's autograd and nothing of burnish but the loss."""
    start = build_causal_lm(model_config(family), dtype).state_dict()
    # Its eager attention rounds the probabilities to float32.
    plain = AutoModelForCausalLM.from_config(model_config(family), attn_implementation="sdpa", dtype=torch.float64)
    plain.load_state_dict(start, strict=True)
    weights: dict[str, Tensor] = dict(plain.named_parameters())
    leaves = weights
    if trained == "adapters":
        leaves = {name: weight.double().requires_grad_() for name, weight in adapter_weights(family).items()}
        weights = {name: weight.detach() for name, weight in weights.items()}
        for name in [name for name in leaves if "lora_A" in name]:
            layer = name.removesuffix(".lora_A.weight")
            # alpha / rank is 6 / 3.
            weights[f"{layer}.weight"] = (
                weights[f"{layer}.weight"] + 2 * leaves[f"{layer}.lora_B.weight"] @ leaves[name]
            )
    batch = group_batch(torch.float64)
    rows = batch.tensors
    # Padded on the right only: a padding token on the left sees nothing, and its attention is NaN.
    places = torch.arange(rows["input_ids"].shape[1])
    left = rows["attention_mask"].int().argmax(1)[:, None]
    shifted = (places + left).clamp(max=places[-1])
    inputs = {"attention_mask": rows["attention_mask"].gather(1, shifted).long(), "use_cache": False}
    with pytest.MonkeyPatch.context() as patch:
        widen_norms(patch)
        logits = torch.func.functional_call(plain, weights, (rows["input_ids"].gather(1, shifted),), inputs).logits
    width = rows["responses"].shape[1]
    # The state before response token t.
    before = places[-width - 1 : -1] - left
    log_probs = (logits / TEMPERATURE).log_softmax(-1).gather(1, before[..., None].expand(-1, -1, logits.shape[-1]))
    mask = rows["response_mask"]
    outputs = {
        "log_probs": torch.where(mask, log_probs.gather(2, rows["responses"][..., None])[..., 0], 0),
        "entropy": torch.where(mask, -(log_probs.exp() * log_probs).sum(-1), 0),
    }
    loss_mask = rows["loss_mask"]
    info = {
        "dp_size": 1,
        "batch_num_tokens": int(loss_mask.sum()),
        "global_batch_size": int(loss_mask.any(1).sum()),
        "loss_scale_factor": None,
    }
    policy_loss()(outputs, batch, info)[0].backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


Gradients = dict[str, list[dict[str, Tensor]]]


@pytest.fixture(scope="module")
def gradients_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Gradients]:
    """Of every case of as many ranks, from each of them; all in one start of processes."""

    @cache
    def compute(world: int) -> Gradients:
        out = tmp_path_factory.mktemp(f"{world} ranks")
        cases: list[Any] = [case for case in CASES if world_of(case) == world]
        if world == 1:
            return {name_of(case): [gradient(case, out)] for case in cases}
        by_rank = run_ranks(out, [case | {"name": name_of(case)} for case in cases], world=world, program=PROGRAM)
        return {name_of(case): [rank[name_of(case)] for rank in by_rank] for case in cases}

    return compute


def world_of(case: dict[str, str]) -> int:
    """How many ranks it takes."""
    return int(case["ranks"].split()[0])


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Norm of the difference, relative to the norm of ``b``."""
    assert a.keys() == b.keys()
    squares = [((a[name] - b[name]).square().sum(), b[name].square().sum()) for name in b]
    return float((sum(x for x, _ in squares) / sum(y for _, y in squares)) ** 0.5)  # type: ignore[operator]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) if case["ranks"].startswith("4") else case for case in CASES],
    ids=name_of,
)
def test_the_gradient_is_that_of_plain_transformers(case: dict[str, str], gradients_of: Any) -> None:
    expected = reference(case["family"], getattr(torch, case["dtype"]), case["trained"])
    for rank in gradients_of(world_of(case))[name_of(case)]:
        assert distance(rank, expected) < TOLERANCE[case["dtype"]]


def test_every_two_ways_meet_in_some_case() -> None:
    met = set().union(*(pairs_of(case) for case in CASES))
    for a, b in ((a, b) for a in FACTORS for b in FACTORS if a < b):
        for value in FACTORS[a]:
            assert all(frozenset({(a, value), (b, other)}) in met for other in FACTORS[b]), (a, value, b)


def test_the_distance_sees_a_small_fault(tmp_path: Path) -> None:
    """A hundredth of a per cent of one norm's gradient is more than the bounds allow."""
    exact = reference("llama", torch.float64, "weights")
    wrong = dict(exact)
    wrong["model.norm.weight"] = wrong["model.norm.weight"] * 1.0001
    assert TOLERANCE["float64"] < distance(wrong, exact)
    assert distance(gradient(CASES[0], tmp_path), exact) < distance(wrong, exact)
