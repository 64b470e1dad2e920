"""The memory plan: what activations take is what autograd really saves, and no more is computed twice than memory asks for."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from burnish.engine import fsdp, memory
from burnish.engine.memory import (
    ActivationCost,
    ActivationPlanner,
    activation_bytes,
    activation_cost,
    larger_micro_batches,
    plan_memory,
)
from burnish.model.fused_layers import fuse_layers
from burnish.model.load import build_causal_lm
from burnish.model.packing import pack
from burnish.model.policy import PolicyModule, ValueModule, set_dtype, transformer_blocks
from tests.engine.engine_program import make_batch, make_engine, policy_loss, tiny_config, train
from tests.model.tiny_models import FAMILIES, padded_rows, random_rows

COST = ActivationCost(block=100.0, block_without_mlp=40.0, block_input=10.0, outside=5.0)
PLAIN = ActivationCost(block=100.0, block_without_mlp=100.0, block_input=10.0, outside=5.0)


def bytes_saved(module: nn.Module, call: Any) -> dict[str, int]:
    """Bytes that autograd keeps of a forward inside and outside its blocks: each storage once, no parameters."""
    seen = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    held: list[Tensor] = []
    totals, place = {"blocks": 0, "outside": 0}, ["outside"]

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            held.append(tensor)
            totals[place[0]] += storage.nbytes()
        return tensor

    for block in transformer_blocks(module.model):  # type: ignore[arg-type]
        block.register_forward_pre_hook(lambda *_: place.__setitem__(0, "blocks"))
        block.register_forward_hook(lambda *_: place.__setitem__(0, "outside"))
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    return totals


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt_neox", "gpt2", "granite", "cohere", "qwen3_moe"])
def test_the_estimate_is_what_a_forward_really_saves(family: str, dtype: torch.dtype, fused: bool) -> None:
    module = PolicyModule(build_causal_lm(FAMILIES[family]))
    if fused and not fuse_layers(module.model):
        return
    set_dtype(module, dtype)
    blocks = transformer_blocks(module.model)
    cost = activation_cost(module, blocks, dtype, "cpu")
    # Rows of one length, so that attention on a CPU pads nothing.
    rows = pack(**padded_rows(*random_rows([(30, 20)] * 8)))
    module.train()
    saved = bytes_saved(module, lambda: module(rows))
    estimate = len(blocks) * cost.block * rows.num_tokens
    tolerance = 0.4 if "moe" in family else 0.15
    assert estimate == pytest.approx(saved["blocks"], rel=tolerance)


@pytest.mark.parametrize("recompute_mlp", [False, True])
def test_a_fused_block_that_recomputes_its_mlp_is_estimated_as_such(recompute_mlp: bool) -> None:
    from burnish.model import fused_layers

    module = PolicyModule(build_causal_lm(FAMILIES["qwen3"]))
    assert fuse_layers(module.model)
    blocks = transformer_blocks(module.model)
    cost = activation_cost(module, blocks, torch.float32, "cpu")
    assert not any(block.recomputes_mlp for block in fused_layers.fused_blocks(module.model))
    assert cost.block_without_mlp < cost.block
    fused_layers.recompute_mlp(module.model, recompute_mlp)
    rows = pack(**padded_rows(*random_rows([(30, 20)] * 8)))
    saved = bytes_saved(module.train(), lambda: module(rows))["blocks"]
    estimate = cost.block_without_mlp if recompute_mlp else cost.block
    assert len(blocks) * estimate * rows.num_tokens == pytest.approx(saved, rel=0.15)


def test_a_value_function_is_estimated_too_and_stays_as_it_was() -> None:
    module = ValueModule(build_causal_lm(tiny_config()).model)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    cost = activation_cost(module, transformer_blocks(module.model), torch.float32, "cpu")
    assert cost.block > cost.block_input == 32 * 4
    assert not module.model.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(not block._forward_hooks for block in transformer_blocks(module.model))


def test_frozen_weights_keep_less() -> None:
    module = PolicyModule(build_causal_lm(tiny_config()))
    blocks = transformer_blocks(module.model)
    trained = activation_cost(module, blocks, torch.float32, "cpu").block
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("embed" in name)
    assert activation_cost(module, blocks, torch.float32, "cpu").block < trained


def planned(cost: ActivationCost, free: float) -> tuple[int, int]:
    plan = plan_memory(cost, num_blocks=4, num_tokens=1, fixed_bytes=7, free_bytes=int(free))
    assert plan.fits == (plan.needed_bytes <= free)
    return plan.num_recomputed, plan.num_without_mlp


def test_by_hand_memory_decides_how_many_blocks_recompute() -> None:
    # 7 fixed, 5 outside, 100 for the gradients of one block, and 100 or 10 for each of four blocks.
    assert planned(PLAIN, 512) == (0, 0)
    assert planned(PLAIN, 511) == (1, 1)
    assert planned(PLAIN, 512 - 90) == (1, 1)
    assert planned(PLAIN, 512 - 91) == (2, 2)
    # From the third on, a block that has all its activations again weighs as much: 30 + 200.
    assert planned(PLAIN, 12 + 30 + 200) == (3, 3)
    assert planned(PLAIN, 12 + 40 + 200) == (3, 3)
    assert planned(PLAIN, 12 + 30 + 199) == (4, 4)


def test_what_saves_a_little_time_is_kept_of_as_many_blocks_as_leave_a_fifth_free() -> None:
    cost = ActivationCost(block=100.0, block_without_mlp=40.0, block_input=10.0, outside=5.0, product=50.0)

    def kept(free: int) -> int:
        plan = plan_memory(cost, num_blocks=4, num_tokens=1, fixed_bytes=7, free_bytes=free)
        assert plan.needed_bytes <= 0.8 * free or plan.num_with_product == 0
        assert plan.num_with_product == 0 or plan.num_without_mlp == 0
        return plan.num_with_product

    # 512 are needed; 50 more for each block, of eight tenths of what there is.
    assert [kept(free) for free in (400, 512, 702, 703, 764, 765, 889, 890, 10_000)] == [0, 0, 0, 1, 1, 2, 3, 4, 4]


def test_the_projections_of_mlps_go_before_whole_blocks() -> None:
    assert planned(COST, 512) == (0, 0)
    assert planned(COST, 511) == (0, 1)
    assert planned(COST, 512 - 4 * 60) == (0, 4)
    assert planned(COST, 512 - 4 * 60 - 1) == (1, 4)


@pytest.mark.parametrize("cost", [COST, PLAIN])
def test_less_memory_never_recomputes_less_and_a_plan_fits_if_any_does(cost: ActivationCost) -> None:
    plans = [planned(cost, free) for free in range(600, 0, -1)]
    assert plans == sorted(plans)
    smallest = min(activation_bytes(cost, 4, whole, max(whole, mlps), 1) for whole in range(5) for mlps in (0, 4))
    for free in range(600):
        plan = plan_memory(cost, num_blocks=4, num_tokens=1, fixed_bytes=0, free_bytes=free)
        assert plan.fits == (free >= smallest) or free < smallest


def test_the_plan_is_logged_once_and_warns_where_nothing_fits(caplog: pytest.LogCaptureFixture) -> None:
    planner = ActivationPlanner(PolicyModule(build_causal_lm(tiny_config())), torch.float32, "cpu", mode="auto")
    with caplog.at_level(logging.INFO, logger="burnish.engine"):
        for free in (1 << 40, 1 << 39, 1, 1):
            planner.prepare(num_tokens=100, fixed_bytes=0, free_bytes=free, keys="the.key")
    first, second, warning = [record.getMessage() for record in caplog.records]
    assert first.startswith("Activations: 0 of 2 blocks recomputed; a micro-batch of 100 tokens then needs")
    assert second.startswith("Activations: 2 of 2 blocks recomputed")
    assert warning.startswith("An update may run out of memory: 2 of 2")
    assert warning.endswith("Lower the.key.")


@pytest.mark.parametrize(
    ("micro_batches", "free", "device", "told"),
    [
        (3, 1 << 40, "cuda", "An update has 3 micro-batches, and there is memory for 3 times the tokens in each."),
        (1, 1 << 40, "cuda", None),
        (3, 1 << 40, "cpu", None),
        # Something is computed twice already.
        (3, 1, "cuda", None),
    ],
)
def test_a_gpu_with_memory_to_spare_is_told_of_once(
    micro_batches: int, free: int, device: str, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    planner = ActivationPlanner(PolicyModule(build_causal_lm(tiny_config())), torch.float32, device, mode="auto")
    with caplog.at_level(logging.INFO, logger="burnish.engine"):
        for _ in range(2):
            planner.prepare(num_tokens=9, fixed_bytes=0, free_bytes=free, keys="a.key", num_micro_batches=micro_batches)
    found = [record.getMessage() for record in caplog.records if "micro-batches, and" in record.getMessage()]
    assert [text.startswith(str(told)) and text.endswith("raise a.key.") for text in found] == [True] * (
        told is not None
    )


def test_larger_micro_batches_would_fit_and_leave_a_fifth_free() -> None:
    cost = ActivationCost(block=10, block_without_mlp=10, block_input=1, outside=0)
    for free in range(100, 2000, 7):
        plan = plan_memory(cost, num_blocks=4, num_tokens=2, fixed_bytes=0, free_bytes=free)
        times = larger_micro_batches(plan, 50)
        assert times == 1 or times * plan.needed_bytes <= 0.8 * free
        assert times == 50 or (times + 1) * plan.needed_bytes > 0.8 * free


@pytest.mark.parametrize(("free", "recomputed"), [(1 << 40, 0), (1, 2)])
def test_an_engine_on_auto_follows_the_free_memory(free: int, recomputed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train(make_engine(dtype="float64", gradient_checkpointing=False), steps=2, micro_batch_size=3)
    monkeypatch.setattr(fsdp, "free_memory", lambda *_: free)
    engine = make_engine(dtype="float64", gradient_checkpointing="auto")
    assert engine.memory_plan is None
    ours = train(engine, steps=2, micro_batch_size=3)
    plan = engine.memory_plan
    assert plan is not None
    assert (plan.num_recomputed, plan.num_blocks) == (recomputed, 2)
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(ours["weights"][name], weight, atol=1e-10, rtol=0)


def test_the_plan_is_made_for_the_largest_micro_batch_of_each_update() -> None:
    engine = make_engine(gradient_checkpointing="auto")
    rows = make_batch()
    for size in (1, 8):
        computed: list[int] = []
        handle = engine.module.register_forward_pre_hook(
            lambda _module, inputs, c=computed: c.append(inputs[0].num_tokens)
        )
        engine.train_batch(rows, policy_loss(), outputs=("log_probs", "entropy"), micro_batch_size=size)
        handle.remove()
        assert engine.memory_plan is not None
        assert engine.memory_plan.num_tokens == max(computed)
        assert len(computed) == 8 // size


@pytest.mark.parametrize("mode", [True, False])
def test_what_is_said_is_done_without_a_plan(mode: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "free_memory", lambda *_: 1)
    engine = make_engine(gradient_checkpointing=mode)
    train(engine, steps=1, micro_batch_size=4)
    assert engine.memory_plan is None
    assert (engine._planner is not None and engine._planner.recomputes_all) == mode


def test_moments_and_gradients_that_do_not_exist_yet_are_counted() -> None:
    engine = make_engine(dtype="bfloat16", gradient_checkpointing="auto")
    masters = sum(4 * parameter.numel() for parameter in engine.module.parameters())
    before = engine._fixed_bytes(10)
    train(engine, steps=1, micro_batch_size=4)
    # The gradient, and two moments for each master.
    assert before - engine._fixed_bytes(10) == 3 * masters


def test_free_memory_on_a_cpu_is_shared_by_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.env, "available_memory", lambda: 1000)
    monkeypatch.setattr(memory.heap, "kept_bytes", lambda: 0)
    assert memory.free_memory(torch.device("cpu")) == 900
    assert memory.free_memory(torch.device("cpu"), sharing=4) == 225
    # What the process itself has freed and kept is its own.
    monkeypatch.setattr(memory.heap, "kept_bytes", lambda: 100)
    assert memory.free_memory(torch.device("cpu"), sharing=4) == 315


def test_an_engine_on_a_cpu_keeps_freed_memory_up_to_its_part_of_an_eighth(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(fsdp.heap, "keep_freed_memory", lambda: told.append("keep"))
    monkeypatch.setattr(fsdp.heap, "give_back", lambda *, above: told.append(above))
    engine = make_engine()
    assert told == ["keep"]
    monkeypatch.setattr(fsdp, "total_memory", lambda device, sharing: 8000 // sharing)
    monkeypatch.setattr(fsdp.ranks, "world_size", lambda: 2)
    engine.park()
    assert told == ["keep", 500]
