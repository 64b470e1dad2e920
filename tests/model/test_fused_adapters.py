"""Fused blocks with adapters compute what the Hugging Face modules compute, with the same gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm

from burnish.model import lora
from burnish.model.fused_adapters import AdapterBlock, fuse_adapters
from burnish.model.fused_layers import fuse_layers, fused_blocks, recompute_mlp
from burnish.model.packing import pack
from burnish.model.policy import PolicyModule
from burnish.model.projections import pack_projections
from tests.engine.matrix_program import widen_norms
from tests.model.test_lora import shake, with_adapters
from tests.model.tiny_models import padded_rows, random_rows

FAMILIES = ["llama", "qwen2", "qwen3", "mistral_sliding"]


@pytest.fixture(autouse=True)
def wide_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused kernels compute a norm in the model's precision, transformers in float32."""
    widen_norms(monkeypatch)
    monkeypatch.setattr(MistralRMSNorm, "forward", LlamaRMSNorm.forward)


def policy(family: str, *, fused: bool, packed: bool = False, **keys: Any) -> PolicyModule:
    model = with_adapters(family, **keys).double()
    shake(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(lora.is_adapter_name(name))
    if packed:
        pack_projections(model)
    assert not fuse_layers(model)
    if fused:
        assert fuse_adapters(model)
    return PolicyModule(model).train()


def result(module: PolicyModule) -> tuple[Tensor, dict[str, Tensor]]:
    rows = padded_rows(*random_rows([(3, 4), (5, 2), (1, 6)]))
    packed = pack(rows["input_ids"], rows["attention_mask"], rows["label_mask"], torch.device("cpu"))
    module.zero_grad()
    log_probs = module(packed)["log_probs"]
    weights = torch.linspace(-1, 1, log_probs.numel(), dtype=log_probs.dtype).view(log_probs.shape)
    (log_probs * weights).sum().backward()
    return log_probs.detach(), {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("keys", [{}, {"target_modules": ["k_proj", "up_proj", "down_proj"], "lora_alpha": 5}])
@pytest.mark.parametrize("packed", [False, True])
def test_they_agree_in_float64(family: str, keys: dict[str, Any], packed: bool) -> None:
    plain, fused = policy(family, fused=False, **keys), policy(family, fused=True, packed=packed, **keys)
    assert len(fused_blocks(fused.model)) == 2
    (expected, gradients), (ours, own) = result(plain), result(fused)
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=0)
    assert own.keys() == gradients.keys()
    assert all(lora.is_adapter_name(name) for name in own)
    for name, gradient in gradients.items():
        assert float(gradient.norm()) > 0
        assert float((own[name] - gradient).norm() / gradient.norm()) < 1e-10, name
    recompute_mlp(fused.model)
    again, recomputed = result(fused)
    assert torch.equal(again, ours)
    assert all(torch.equal(recomputed[name], gradient) for name, gradient in own.items())


def test_no_copy_of_the_frozen_weights_is_kept_for_the_backward() -> None:
    """A sharded block's weights never lie behind each other: what joins them is made anew, not kept for every block."""
    module = policy("llama", fused=True)
    own = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept.append(tensor.detach())
        return tensor

    rows = padded_rows(*random_rows([(3, 4), (5, 2), (1, 6)]))
    packed = pack(rows["input_ids"], rows["attention_mask"], rows["label_mask"], torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(packed)
    hidden = module.model.config.hidden_size
    assert packed.num_tokens < hidden
    # What is of a token has one row for each, and the joined weights have as many rows or columns as the hidden states.
    assert any(tensor.shape[0] == packed.num_tokens for tensor in kept)
    assert all(tensor.numel() < 2 * hidden * hidden for tensor in kept)


def test_switched_off_they_are_the_base() -> None:
    plain, fused = policy("qwen3", fused=False), policy("qwen3", fused=True)
    rows = padded_rows(*random_rows([(3, 4), (5, 2)]))
    packed = pack(rows["input_ids"], rows["attention_mask"], rows["label_mask"], torch.device("cpu"))
    with torch.no_grad(), lora.adapters_off(plain), lora.adapters_off(fused):
        of_base = plain(packed)["log_probs"]
        torch.testing.assert_close(fused(packed)["log_probs"], of_base, atol=1e-12, rtol=0)
    with torch.no_grad():
        assert float((fused(packed)["log_probs"] - of_base).abs().max()) > 1e-2


def test_blocks_that_are_trained_themselves_or_have_another_adapter_take_their_own_forward() -> None:
    module = policy("llama", fused=True)
    block = module.model.model.layers[0]  # type: ignore[union-attr, index]
    calls: list[int] = []
    run = AdapterBlock._run

    def counted(self: AdapterBlock, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(self.block.self_attn.layer_idx)
        return run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdapterBlock, "_run", counted)
        result(module)
        assert calls == [0, 1]
        block.self_attn.q_proj.base_layer.weight.requires_grad_(True)  # type: ignore[union-attr]
        _, gradients = result(module)
        assert calls == [0, 1, 1]
        assert any(name.endswith("q_proj.base_layer.weight") for name in gradients)
    other = with_adapters("llama")
    other.model.layers[1].mlp.up_proj.lora_dropout["default"] = torch.nn.Dropout(0.1)
    assert not fuse_adapters(other)
    assert len(fused_blocks(other)) == 1
    assert not fuse_adapters(with_adapters("gemma2_softcaps"))
