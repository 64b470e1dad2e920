"""The estimate from a configuration and the engine that is made from it agree on what is held and planned."""

import pytest
import torch

from burnish.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, load_config
from burnish.engine import FSDPEngine
from burnish.engine.estimate import estimate_model
from burnish.engine.layout import Replicated
from burnish.engine.state_bytes import Head, defers_sync, head_bytes, optimizer_bytes, sharded_bytes
from tests.e2e.runs import TINY


def sections(*overrides: str):
    config = load_config(
        [f"actor_rollout_ref.model.path={TINY / 'model'}", "data.train_files=none.jsonl", *overrides]
    ).actor_rollout_ref
    return config.model, config.actor.fsdp_config, config.actor.optim


def nbytes(tensors) -> int:
    return sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in tensors}.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["policy", "value"])
def test_state_of_a_replicated_model_is_what_the_engine_holds(dtype, kind):
    model, fsdp, optim = sections(f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}")
    estimate = estimate_model(model, fsdp, optim, module=kind, device="cpu")
    engine = FSDPEngine(model, fsdp, optim, module=kind, device="cpu")
    layout = engine._layout
    assert isinstance(layout, Replicated)
    assert estimate.state.weights == nbytes(engine.module.parameters())
    assert estimate.state.masters == nbytes(layout.step_masters().values())
    assert estimate.state.gradients == layout.missing_grad_bytes
    assert estimate.state.passing == layout.passing_bytes
    assert estimate.num_trained == sum(p.numel() for p in engine.module.parameters())
    for parameter in engine.module.parameters():
        parameter.grad = None if layout._has_own_masters else torch.zeros_like(parameter)
    optimizer = engine._optimizer
    optimizer.step(1)
    moments = [t for name in layout.masters() for t in optimizer.state_tensors(name) if t.ndim]
    assert estimate.state.moments == nbytes(moments)


@pytest.mark.parametrize("tokens", [1, 100, 5000])
def test_the_engine_plans_an_update_with_the_estimates_own_numbers(tokens):
    model, fsdp, optim = sections("actor_rollout_ref.actor.fsdp_config.dtype=float32")
    estimate = estimate_model(model, fsdp, optim, device="cpu")
    engine = FSDPEngine(model, fsdp, optim, device="cpu")
    state = estimate.state
    assert engine._fixed_bytes(tokens) == state.gradients + state.passing + state.moments + estimate.update_head_bytes(
        tokens
    )
    assert engine._planner._cost == estimate.cost


def test_a_model_that_is_only_read_has_weights_and_nothing_else():
    model, fsdp, _ = sections("actor_rollout_ref.actor.fsdp_config.dtype=bfloat16")
    estimate = estimate_model(model, fsdp, None, device="cuda")
    assert estimate.resident(in_use=True) == {"weights": 2 * estimate.num_parameters}
    assert not estimate.is_trained


def test_keys_that_send_state_to_the_cpu_take_it_off_the_device():
    keys = ["param_offload", "optimizer_offload"]
    model, fsdp, optim = sections(*(f"actor_rollout_ref.actor.fsdp_config.{key}=true" for key in keys))
    estimate = estimate_model(model, fsdp, optim, device="cuda")
    number = estimate.num_parameters
    assert estimate.resident(in_use=False) == {"weights": 2 * number}
    assert estimate.resident(in_use=True, updating=True) == {"weights": 2 * number, "gradients": 4 * number}
    assert estimate.step_bytes() > 0
    on_cpu = estimate_model(model, fsdp, optim, device="cpu")
    assert "moments" in on_cpu.resident(in_use=False)


def test_shards_of_all_ranks_together_are_the_model():
    model, fsdp, optim = sections()
    one = estimate_model(model, fsdp, optim, device="cuda")
    four = estimate_model(model, fsdp, optim, device="cuda", world_size=4)
    assert four.num_shards == 4
    assert 4 * one.num_parameters <= 4 * four.state.weights <= 4 * one.num_parameters * 1.05
    assert four.state.moments == 2 * four.state.weights
    assert four.state.masters == 0
    own_copies = estimate_model(
        model, sections("actor_rollout_ref.actor.fsdp_config.fsdp_size=1")[1], optim, device="cuda", world_size=4
    )
    assert own_copies.state == one.state


def test_adapters_alone_have_gradients_and_moments():
    pytest.importorskip("peft")
    model, fsdp, optim = sections("actor_rollout_ref.model.lora_rank=8")
    estimate = estimate_model(model, fsdp, optim, device="cuda")
    assert 0 < estimate.num_trained < estimate.num_parameters / 2
    assert estimate.state.moments == 8 * estimate.num_trained
    assert not estimate.head.is_trained


@pytest.mark.parametrize(
    ("name", "more", "per_weight"),
    [("AdamW", None, 8), ("SGD", None, 0), ("SGD", {"momentum": 0.9}, 4), ("AdamW", {"amsgrad": True}, 12)],
)
def test_torchs_optimizers_keep_as_many_numbers_as_are_counted(name, more, per_weight):
    config = FSDPOptimizerConfig(optimizer=name, override_optimizer_config=more)
    assert optimizer_bytes(config, 1000) == per_weight * 1000
    parameter = torch.nn.Parameter(torch.ones(1000))
    parameter.grad = torch.ones(1000)
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1, **(more or {}))
    optimizer.step()
    kept = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor) and value.ndim]
    assert nbytes(kept) == optimizer_bytes(config, 1000)


def test_eight_bit_moments_are_a_quarter_of_plain_ones():
    plain, small = (FSDPOptimizerConfig(optimizer=name) for name in ("AdamW", "AdamW8bit"))
    assert optimizer_bytes(small, 10**9) < 0.26 * optimizer_bytes(plain, 10**9) + 10**8


def test_the_heads_gradient_counts_only_where_it_is_trained_and_on_the_way_back():
    head = Head(vocab=1000, hidden=64, itemsize=2, is_trained=True)
    frozen = Head(vocab=1000, hidden=64, itemsize=2, is_trained=False)
    gradient = 1000 * 64 * 6
    assert head_bytes(128, head, on_gpu=True) - head_bytes(128, frozen, on_gpu=True) == gradient
    assert head_bytes(128, head, on_gpu=True, backward=False) == 128 * 1000 * 4


def test_gradients_are_deferred_where_whole_ones_are_a_tenth_of_the_memory():
    config = FSDPEngineConfig()
    assert defers_sync(config, 1_000, 40_000)
    assert not defers_sync(config, 1_000, 39_999)
    assert defers_sync(FSDPEngineConfig(defer_gradient_sync=True), 1_000, 1)


def test_deferred_gradients_are_whole_beside_the_shard(tmp_path):
    model, fsdp, optim = sections()
    module = estimate_model(model, fsdp, optim, device="cuda").module
    how = {"num_shards": 2, "total_memory": 1 << 40}
    deferred = sharded_bytes(module, torch.bfloat16, optim, FSDPEngineConfig(defer_gradient_sync=True), **how)
    at_once = sharded_bytes(module, torch.bfloat16, optim, FSDPEngineConfig(defer_gradient_sync=False), **how)
    assert deferred.gradients - at_once.gradients == 4 * sum(p.numel() for p in module.parameters())
    assert isinstance(model, HFModelConfig)
