"""On a GPU: bf16 compute with the variable-length kernel, float32 masters, one rank and two."""

from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.model.load import build_causal_lm
from burnish.model.packing import pack
from burnish.model.policy import PolicyModule, set_dtype
from tests.engine.engine_program import make_engine, run_case, run_ranks, tiny_config, train
from tests.engine.test_ranks import distance
from tests.model.tiny_models import FAMILIES, build, padded_rows, plain_log_probs, random_rows

pytestmark = pytest.mark.gpu

LENGTHS = [(1, 3), (5, 9), (20, 7), (3, 1), (9, 12), (2, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_on_the_gpu_equal_a_plain_forward(family: str, dtype: torch.dtype) -> None:
    model = build(family)
    prompts, responses = random_rows(LENGTHS)
    expected = plain_log_probs(model, prompts, responses)
    policy = PolicyModule(model)
    set_dtype(policy, dtype)
    policy.cuda()
    with torch.no_grad():
        ours = policy(pack(**padded_rows(prompts, responses), device="cuda"))["log_probs"]
    assert ours.dtype == torch.float32
    error = (ours.cpu().double() - expected).abs()
    # These tiny models have large weights, which makes bf16 coarse; a wrong mask is off by more than 1.
    assert float(error.max()) < (1e-4 if dtype == torch.float32 else 0.6)
    assert float(error.mean()) < (1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("module", ["policy", "value"])
def test_gradient_in_bf16_is_near_that_of_float32(module: str) -> None:
    exact = train(make_engine(dtype="float32", module=module), steps=1, micro_batch_size=8)
    ours = train(make_engine(dtype="bfloat16", module=module, device="cuda"), steps=1, micro_batch_size=3)
    for name, grad in ours["gradients"].items():
        assert grad.dtype == torch.float32, name
    assert distance(ours["gradients"], exact["gradients"]) < 0.03


def test_compute_weights_stay_at_their_addresses_and_equal_rounded_masters() -> None:
    engine = make_engine(dtype="auto", device="cuda")
    addresses = [parameter.data_ptr() for parameter in engine.module.parameters()]
    train(engine, steps=3, micro_batch_size=4)
    assert engine.dtype == torch.bfloat16
    assert addresses == [parameter.data_ptr() for parameter in engine.module.parameters()]
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(parameter, engine._layout.masters()[name].to(torch.bfloat16))


def test_head_chunks_on_the_gpu_are_summed_in_float32() -> None:
    from burnish.model.head import fused_head

    hidden, weight = torch.randn(300, 64), torch.randn(1000, 64) * 0.1
    labels = torch.arange(300)
    grads = []
    for device, dtype, chunk in (("cpu", torch.float64, None), ("cuda", torch.bfloat16, 7)):
        h, w = (x.bfloat16().to(device, dtype).requires_grad_() for x in (hidden, weight))
        outputs = fused_head(h, w, labels.to(device), outputs=("log_probs", "entropy"), chunk_size=chunk)
        (outputs["log_probs"].sum() + outputs["entropy"].sum()).backward()
        grads.append(w.grad.double().cpu())
    assert float((grads[0] - grads[1]).norm() / grads[0].norm()) < 0.01


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_gpus_have_the_gradient_of_one(dtype: str, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"dtype": dtype, "device": "cuda", "steps": 3, "micro_batch_size": 2, "uneven": True}
    cases = [
        shape | {"name": "sharded", "fsdp_size": -1, "save": "sharded"},
        shape | {"name": "replicated", "fsdp_size": 1, "save": "replicated"},
    ]
    ranks = run_ranks(tmp_path, cases)
    (tmp_path / "one").mkdir()
    one = run_case(cases[1] | {"micro_batch_size": 3}, tmp_path / "one")
    tolerance = 1e-4 if dtype == "float32" else 1e-2
    for result in ranks:
        for name in ("sharded", "replicated"):
            assert distance(result[name]["gradients"], one["gradients"]) < tolerance
            assert distance(result[name]["weights"], one["weights"]) < 10 * tolerance
    resumed = run_case({**cases[1], "save": "again", "load": str(tmp_path / "sharded")}, tmp_path / "one")
    assert distance(resumed["weights"], ranks[0]["sharded"]["after_save"]["weights"]) < 10 * tolerance


def test_a_larger_model_recomputes_its_activations_with_less_memory() -> None:
    config = tiny_config(hidden_size=256, intermediate_size=512, num_hidden_layers=8, initializer_range=0.02)
    rows = padded_rows(*random_rows([(200, 300)] * 16))
    peaks, grads = [], []
    for recompute in (False, True):
        from burnish.model.policy import checkpoint_activations

        policy = PolicyModule(build_causal_lm(config))
        if recompute:
            checkpoint_activations(policy.model)
        set_dtype(policy, torch.bfloat16)
        policy.cuda().train()
        torch.cuda.reset_peak_memory_stats()
        policy(pack(**{**rows, "input_ids": rows["input_ids"] % 48}, device="cuda"))["log_probs"].sum().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        grads.append(torch.cat([parameter.grad.flatten().float() for parameter in policy.parameters()]))
        del policy
    assert peaks[1] < 0.5 * peaks[0]
    assert float((grads[0] - grads[1]).norm() / grads[0].norm()) < 1e-2
