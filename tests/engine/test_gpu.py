"""On a GPU: bf16 compute with the variable-length kernel, float32 masters, one rank and two."""

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from burnish.model import attention
from burnish.model.load import build_causal_lm
from burnish.model.packing import pack
from burnish.model.policy import PolicyModule, set_dtype
from tests.engine.engine_program import make_batch, make_engine, policy_loss, run_case, run_ranks, tiny_config, train
from tests.engine.test_ranks import distance
from tests.model.test_shared_prompt import grouped_rows, prompts_of, some_scale
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


@pytest.mark.parametrize("family", ["llama", "mistral_sliding", "gemma2_softcaps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_prompts_give_the_log_probs_and_gradient_of_rows_alone(family: str, dtype: torch.dtype) -> None:
    rows = grouped_rows()
    scale = some_scale(rows).float().cuda()
    exact_policy, policy = PolicyModule(build(family)), PolicyModule(build(family))
    set_dtype(policy, dtype)
    policy.cuda()
    (exact_policy(pack(**rows))["log_probs"] * scale.cpu()).sum().backward()
    exact = torch.cat([parameter.grad.flatten() for parameter in exact_policy.parameters()])  # type: ignore[union-attr]
    errors = []
    for prompts in (None, prompts_of(rows)):
        policy.zero_grad()
        (policy(pack(**rows, device="cuda", prompts=prompts))["log_probs"] * scale).sum().backward()
        ours = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])  # type: ignore[union-attr]
        errors.append(float((ours.cpu().float() - exact).norm() / exact.norm()))
    alone, shared = errors
    # In bf16 both are as far from float32; the sums over a prompt's copies are in float32 and cannot be worse by much.
    assert shared < (1e-4 if dtype == torch.float32 else 1.5 * alone + 0.01)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_operator_below_varlen_attn_gives_its_bits(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, window: int | None
) -> None:
    assert attention.knows_flash_operator()
    lengths, prefixes = torch.tensor([3, 9, 17, 1, 30]), torch.tensor([0, 4, 20, 6, 0])
    draw = torch.Generator(device="cuda").manual_seed(0)

    def tokens(number: int, heads: int) -> torch.Tensor:
        drawn = torch.randn(number, heads, 16, generator=draw, device="cuda", dtype=torch.bfloat16)
        return drawn.requires_grad_()

    inputs = [tokens(60, 4), tokens(90, kv_heads), tokens(90, kv_heads)]
    weight = tokens(60, 4).detach()
    ends = tuple(F.pad(sizes.cumsum(0), (1, 0)).int().cuda() for sizes in (lengths, lengths + prefixes))
    found = []
    for direct in (True, False):
        monkeypatch.setattr(attention, "knows_flash_operator", lambda direct=direct: direct)
        output = attention.varlen_attention(*inputs, ends, (30, 37), scaling=0.3, sliding_window=window)  # type: ignore[arg-type]
        found.append([output, *torch.autograd.grad(output, inputs, weight)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_a_shared_prompt_gives_the_same_gradient_twice() -> None:
    rows = grouped_rows()
    policy = PolicyModule(build("llama"))
    set_dtype(policy, torch.bfloat16)
    policy.cuda()
    context = pack(**rows, device="cuda", prompts=prompts_of(rows)).context
    grad = torch.randn(sum(context.lengths) + sum(prefix for _, prefix in context.prefixes), 2, 8, device="cuda")
    sums = [context.keys.gather.add_up(grad.bfloat16()) for _ in range(5)]
    assert all(torch.equal(each, sums[0]) for each in sums)


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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_gpus_that_share_tokens_have_the_gradient_of_one(dtype: str, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"dtype": dtype, "device": "cuda", "steps": 3, "micro_batch_size": 2}
    cases = [
        shape
        | {"name": f"{fsdp_size}-{num_heads}", "fsdp_size": fsdp_size, "config": {"num_key_value_heads": num_heads}}
        for fsdp_size in (-1, 1)
        for num_heads in (1, 4)
    ]
    ranks = run_ranks(tmp_path, [each | {"sequence_parallel": 2} for each in cases])
    tolerance = 1e-4 if dtype == "float32" else 1e-2
    for each in cases:
        one = run_case(each | {"micro_batch_size": 3}, tmp_path)
        for result in ranks:
            assert distance(result[each["name"]]["gradients"], one["gradients"]) < tolerance
            assert distance(result[each["name"]]["weights"], one["weights"]) < 10 * tolerance


def test_a_larger_model_recomputes_its_activations_with_less_memory() -> None:
    config = tiny_config(hidden_size=256, intermediate_size=512, num_hidden_layers=8, initializer_range=0.02)
    rows = padded_rows(*random_rows([(200, 300)] * 16))
    peaks, grads = [], []
    for recompute in (False, True):
        from burnish.model.activations import checkpoint_activations

        policy = PolicyModule(build_causal_lm(config))
        if recompute:
            checkpoint_activations(policy.model)
        set_dtype(policy, torch.bfloat16)
        policy.cuda().train()
        gc.collect()
        # Tests before this one may have left tensors behind.
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        policy(pack(**{**rows, "input_ids": rows["input_ids"] % 48}, device="cuda"))["log_probs"].sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        grads.append(torch.cat([parameter.grad.flatten().float() for parameter in policy.parameters()]))
        del policy
    assert peaks[1] < 0.5 * peaks[0]
    assert float((grads[0] - grads[1]).norm() / grads[0].norm()) < 1e-2


@pytest.mark.parametrize("what", ["update", "inference"])
def test_the_host_waits_for_no_micro_batch(what: str) -> None:
    """However many micro-batches there are, the host waits for the device as often."""
    engine, batch = make_engine(dtype="bfloat16", device="cuda"), make_batch(12)

    def waits(size: int) -> int:
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                if what == "update":
                    engine.train_batch(batch, policy_loss(), outputs=("log_probs", "entropy"), micro_batch_size=size)
                else:
                    engine.infer_batch(batch, micro_batch_size=size)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)

    waits(3)  # Kernels are built at their first call.
    assert waits(2) == waits(6)


@pytest.mark.parametrize(
    ("library", "name"), [("torchao.optim", "AdamW8bit"), ("bitsandbytes.optim", "PagedAdamW8bit")]
)
def test_quantised_optimizers_train_and_resume_on_the_gpu(library: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip(library.partition(".")[0])
    wide = {"hidden_size": 128, "intermediate_size": 96}
    case = {"optimizer_impl": library, "optimizer": name, "config": wide, "dtype": "bfloat16", "device": "cuda"}
    engine = make_engine(**case)
    train(engine, steps=2, micro_batch_size=4)
    assert engine.non_finite_weights() == []
    engine.save_checkpoint(tmp_path)
    resumed = make_engine(**case, seed=5)
    resumed.load_checkpoint(tmp_path)
    states = [
        [x.cpu() for key in each._optimizer._parameters for x in each._optimizer.state_tensors(key)]  # type: ignore[union-attr]
        for each in (engine, resumed)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    a, b = (train(each, steps=1, micro_batch_size=4) for each in (engine, resumed))
    assert distance(b["weights"], a["weights"]) < 1e-3


@pytest.mark.parametrize("keys", [{}, {"param_offload": True, "optimizer_offload": True}], ids=["plain", "offloaded"])
def test_the_gpu_trains_on_while_the_state_before_is_written(tmp_path: Path, keys: dict[str, bool]) -> None:
    """Copies are made in pinned memory, and no update reaches them."""
    case: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda", "fsdp_keys": keys}
    engine = make_engine(**case)
    train(engine, steps=2, micro_batch_size=4)
    engine.save_checkpoint(tmp_path / "waited", ("model", "optimizer", "extra"))
    engine.save_checkpoint(tmp_path / "beside", ("model", "optimizer", "extra"), blocking=False)
    train(engine, steps=2, micro_batch_size=4)
    assert engine.checkpoint_written(wait=True)
    for file in ("model.safetensors", "optimizer/shard_00000_of_00001.safetensors"):
        assert (tmp_path / "waited" / file).read_bytes() == (tmp_path / "beside" / file).read_bytes()
    resumed = make_engine(**case, seed=5)
    resumed.load_checkpoint(tmp_path / "beside", ("model", "optimizer", "extra"))
    assert resumed.non_finite_weights() == []
