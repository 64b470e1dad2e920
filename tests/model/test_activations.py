"""What the backward of a block finds, kept or recomputed or brought back from the CPU, gives the same gradient."""

import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from burnish.model import activations
from burnish.model.activations import ActivationOffload, BlockActivations
from burnish.model.dense import is_unchanged
from burnish.model.fused_layers import fuse_layers
from burnish.model.policy import transformer_blocks
from burnish.utils.transfers import Transfers
from tests.model.test_packed_forward import LENGTHS, packed_log_probs
from tests.model.tiny_models import FAMILIES, build, padded_rows, random_rows

CPU = torch.device("cpu")


def dtype_of(family: str) -> torch.dtype:
    # The grouped products of the experts have no float64.
    return torch.float32 if "moe" in family else torch.float64


def gradient(
    family: str, recomputed: int, *, offload: bool = False, fused: bool = False, compiled: bool = False
) -> Tensor:
    model = build(family, dtype_of(family))
    if fused:
        fuse_layers(model)
    blocks = transformer_blocks(model)
    keeper = ActivationOffload(Transfers(CPU), least_bytes=0) if offload else None
    managed = BlockActivations(blocks, offload=keeper, compiled=compiled)
    managed.num_recomputed = min(recomputed, len(blocks))
    model.train()
    packed_log_probs(model, padded_rows(*random_rows(LENGTHS))).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_and_offloaded_activations_give_the_gradient(family: str) -> None:
    plain = gradient(family, 0)
    for recomputed in (0, 1, 99):
        for offload in (False, True):
            other = gradient(family, recomputed, offload=offload)
            tolerance = 1e-6 if plain.dtype == torch.float32 else 1e-12
            assert float((other - plain).norm() / plain.norm()) < tolerance, (recomputed, offload)


def test_the_fused_blocks_recompute_and_leave_alike() -> None:
    plain = gradient("qwen3", 0, fused=True)
    for recomputed, offload in ((0, True), (1, False), (99, True)):
        other = gradient("qwen3", recomputed, offload=offload, fused=True)
        assert float((other - plain).norm() / plain.norm()) < 1e-10


@pytest.mark.slow
def test_compiled_blocks_compute_the_same_and_share_what_is_compiled() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = gradient("qwen2", 0)
    other = gradient("qwen2", 1, compiled=True)
    # The norms are in float32, also of a float64 model.
    assert float((other - plain).norm() / plain.norm()) < 1e-5
    blocks = len(transformer_blocks(build("qwen2")))
    stats = torch._dynamo.utils.counters["stats"]
    assert blocks > 1
    assert 0 < stats["unique_graphs"] <= 4, dict(stats)
    assert not torch._dynamo.utils.counters["recompiles"]


@pytest.mark.slow
def test_blocks_compile_in_a_process_that_has_looked_for_pip() -> None:
    code = (
        "from importlib.util import find_spec; from torch.nn import Tanh;"
        "from burnish.model.activations import BlockActivations;"
        "find_spec('pip'); BlockActivations([Tanh()], compiled=True); find_spec('pip');"
        # What inductor imports when it compiles.
        "import torch.utils.cpp_extension"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class _Square(nn.Module):
    """A block that saves its input and one product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 64))

    def forward(self, x: Tensor, *, shared: Tensor) -> Tensor:
        return (x * self.weight).square() * shared


def test_saved_tensors_leave_and_parameters_and_shared_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    plain = activations._Slot.__init__

    def copy(slot: Any, source: Tensor, call: Any) -> None:
        copied.append(source.data_ptr())
        plain(slot, source, call)

    monkeypatch.setattr(activations._Slot, "__init__", copy)
    blocks = [_Square(), _Square()]
    BlockActivations(blocks, offload=ActivationOffload(Transfers(CPU), least_bytes=0))
    x, shared = torch.randn(8, 64, requires_grad=True), torch.full((8, 64), 0.5)
    seen: list[weakref.ref] = []

    def watch(_module: nn.Module, _args: Any, output: Tensor) -> None:
        seen.append(weakref.ref(output.untyped_storage()))

    blocks[0].register_forward_hook(watch)
    hidden = blocks[0](x, shared=shared)
    loss = blocks[1](hidden, shared=shared).sum()
    # x * weight keeps both, the square its input, the last product the shared factor: two of each block leave.
    addresses = {blocks[0].weight.data_ptr(), blocks[1].weight.data_ptr(), shared.data_ptr()}
    assert len(copied) == 4
    assert not addresses & set(copied)
    del hidden
    gc.collect()
    # Only the second block's copy of its input is left of the first block's output.
    assert seen[0]() is None
    loss.backward()
    product = x.detach() * blocks[0].weight
    inner = product.square() * 0.5
    expected = (2 * inner * blocks[1].weight * 0.5) * blocks[1].weight * (2 * product * 0.5) * blocks[0].weight
    torch.testing.assert_close(x.grad, expected)


def test_small_tensors_stay() -> None:
    offload = ActivationOffload(Transfers(CPU), least_bytes=8 * 64 * 4 + 1)
    block = _Square()
    BlockActivations([block], offload=offload)
    before = activations._Slot
    try:
        activations._Slot = None  # type: ignore[assignment,misc]
        block(torch.randn(8, 64, requires_grad=True), shared=torch.ones(8, 64)).sum().backward()
    finally:
        activations._Slot = before  # type: ignore[misc]
    assert block.weight.grad is not None


def test_a_graph_can_be_walked_twice_while_it_is_kept() -> None:
    block = _Square()
    BlockActivations([block], offload=ActivationOffload(Transfers(CPU), least_bytes=0))
    x = torch.randn(8, 64, requires_grad=True)
    loss = block(x, shared=torch.ones(8, 64)).sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, x)[0], first)


def test_evaluation_and_inference_run_the_block_itself() -> None:
    block = _Square()
    managed = BlockActivations([block])
    managed.num_recomputed = 1
    calls = 0
    inner = block.forward.forward  # type: ignore[attr-defined]

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return inner(*args, **kwargs)

    block.forward.forward = forward  # type: ignore[attr-defined]
    x = torch.randn(2, 64, requires_grad=True)
    for training, expected in ((True, 2), (False, 1)):
        calls = 0
        block.train(training)(x, shared=torch.ones(2, 64)).sum().backward()
        assert calls == expected


def test_a_managed_block_still_counts_as_unchanged() -> None:
    # Else the rollout would take the slower path for an actor that trains.
    block = _Square()
    BlockActivations([block])
    assert is_unchanged(block)
