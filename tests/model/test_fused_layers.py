"""A fused block computes what Hugging Face's modules compute, outputs and gradients, and stands wherever they stood."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from burnish.model.activations import checkpoint_activations
from burnish.model.attention import PackedContext, plain_attention
from burnish.model.fused_layers import (
    FusedBlock,
    activation_bytes_per_token,
    fuse_layers,
    fuse_where_it_pays,
    fused_blocks,
    recompute_mlp,
)
from burnish.model.kernels.cpu import layers
from burnish.model.load import build_causal_lm
from burnish.model.policy import backbone_of
from burnish.model.projections import pack_projections
from burnish.rollout.native.fast import FastForward
from tests.model.tiny_models import build

LENGTHS = [5, 9, 1, 3]

_SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama_biases": LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True),
    "llama_one_key_head": LlamaConfig(**{**_SHAPE, "num_key_value_heads": 1}, head_dim=16),
    "mistral_sliding": MistralConfig(**_SHAPE, sliding_window=4),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen2_sliding": Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=8),
    "qwen3_biases": Qwen3Config(**_SHAPE, head_dim=8, attention_bias=True),
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def wide_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's norms compute in float32 even in a float64 model, which hides what float64 could show."""

    def forward(self: Any, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)

    for norm in (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(norm, "forward", forward)


def model_of(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Norms and biases that are not ones and zeros, so that a forgotten one shows."""
    torch.manual_seed(0)
    model = build_causal_lm(CONFIGS[name], dtype)
    for key, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=float("norm" in key), std=0.3)
    return model


def hidden_states(model: PreTrainedModel, lengths: list[int] | None = None) -> Tensor:
    """Of one packed row, [1, tokens, hidden]."""
    lengths = lengths or LENGTHS
    ids = torch.randint(3, 61, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    backbone: Any = backbone_of(model)
    device = next(model.parameters()).device
    given = {"input_ids": ids.to(device), "position_ids": positions.to(device), "use_cache": False}
    output: Tensor = backbone(**given, attention_context=PackedContext(lengths, device))[0]
    return output


def results(model: PreTrainedModel) -> dict[str, Tensor]:
    """The output, and the gradient of every parameter that has one."""
    output = hidden_states(model)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (output * weights.to(output)).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach(), **grads}


def fused(model: PreTrainedModel, *, packed: bool = True) -> PreTrainedModel:
    mine = copy.deepcopy(model)
    if packed:
        pack_projections(mine)
    assert fuse_layers(mine)
    return mine


def assert_close(mine: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert value.norm() > 0, name
        assert (mine[name] - value).norm() <= tolerance * value.norm(), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_and_gradients_are_those_of_hugging_faces_modules(name, packed, dtype):
    model = model_of(name, dtype)
    assert_close(results(fused(model, packed=packed)), results(model), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_output_rounds_as_hugging_faces_modules_do(name, dtype):
    model = model_of(name, dtype)
    mine, theirs = hidden_states(fused(model)), hidden_states(model)
    # One product of several projections may add up in another order than several products do.
    torch.testing.assert_close(mine, theirs, rtol=0, atol=2**-6 if dtype == torch.bfloat16 else 2e-6)
    assert (mine != theirs).float().mean() < (0.05 if dtype == torch.bfloat16 else 1.0)


def errors(model: PreTrainedModel, exact: dict[str, Tensor]) -> list[float]:
    """Of the output and of each gradient, of the norm."""
    mine = results(model)
    return [float((mine[name].cpu().double() - value).norm() / value.norm()) for name, value in exact.items()]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", CONFIGS)
def test_half_precision_is_as_near_to_float64_as_hugging_faces_modules_are(name, device):
    model = model_of(name, torch.bfloat16)
    exact = results(copy.deepcopy(model).double())
    mine, theirs = (errors(m.to(device), exact) for m in (fused(model), copy.deepcopy(model)))
    assert sum(mine) < 1.1 * sum(theirs)
    assert max(mine) < 1.5 * max(theirs) < 0.2


@pytest.mark.parametrize("name", ["llama_biases", "qwen3"])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("by_transformers", [True, False])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_checkpointing_and_recomputing_the_mlp_change_nothing(name, recompute, by_transformers):
    model = fused(model_of(name))
    expected = results(model)
    with Kept(model) as keeping:
        hidden_states(model)
    whole = keeping.nbytes
    model.zero_grad()
    recompute_mlp(model, recompute)
    model.train()
    if by_transformers:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        checkpoint_activations(model)
    assert len(fused_blocks(model)) == 2
    with Kept(model) as keeping:
        hidden_states(model)
    assert keeping.nbytes < whole / 3
    assert_equal(results(model), expected)


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name


class Kept:
    """Bytes that autograd keeps for the backward, parameters not counted."""

    def __init__(self, model: nn.Module) -> None:
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
                self._alive.append(tensor)
            return tensor

        self._alive: list[Tensor] = []
        self._storages = storages
        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def __enter__(self) -> "Kept":
        self._hooks.__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        self._hooks.__exit__(*args)

    @property
    def nbytes(self) -> int:
        return sum(self._storages.values())


@pytest.mark.parametrize("name", ["llama", "llama_biases", "qwen3", "qwen2"])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_a_token_keeps_is_what_is_said(name, recompute):
    model = fused(model_of(name, torch.float32))
    recompute_mlp(model, recompute)
    kept = []
    for length in (40, 80):
        with Kept(model) as keeping:
            output = hidden_states(model, [length])
        kept.append(keeping.nbytes)
        del output
    a_token = (kept[1] - kept[0]) / 40
    hidden = 4 * model.config.hidden_size
    # Beside the blocks: the embedding's token, the last norm's input and factor, and the cosines and sines of all layers.
    outside = 8 + hidden + 4 + 2 * 4 * fused_blocks(model)[0].shape.head_dim
    assert a_token - outside == pytest.approx(activation_bytes_per_token(model, recompute_mlp=recompute), rel=0.02)


@pytest.mark.parametrize("name", ["llama_biases", "qwen3"])
def test_keeping_the_product_changes_nothing_and_is_what_it_is_said_to_take(name):
    model = fused(model_of(name))
    expected = results(model)
    with Kept(model) as keeping:
        hidden_states(model)
    without = keeping.nbytes
    model.zero_grad()
    for block in fused_blocks(model):
        block.keeps_product = True
    with Kept(model) as keeping:
        states = hidden_states(model)
    blocks = fused_blocks(model)
    width = blocks[0].block.mlp.gate_proj.out_features
    assert keeping.nbytes - without == len(blocks) * width * states.dtype.itemsize * states.shape[-2]
    assert_equal(results(model), expected)


def test_recomputing_the_mlp_keeps_less():
    model = fused(model_of("llama"))
    whole, part = (activation_bytes_per_token(model, recompute_mlp=recompute) for recompute in (False, True))
    assert whole - part == 2 * 2 * 48 * 8
    assert activation_bytes_per_token(model_of("llama")) == 0


def no_products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Shapes of the weight gradients that are computed."""
    from burnish.model import fused_layers

    shapes: list[tuple[int, int]] = []
    inner = fused_layers._weight_grads

    def counting(grad: Tensor, x: Any, weights: Any, needs: Any) -> Any:
        grads = inner(grad, x, weights, needs)
        shapes.extend(tuple(g.shape) for g in grads if g is not None)
        return grads

    monkeypatch.setattr(fused_layers, "_weight_grads", counting)
    return shapes


@pytest.mark.parametrize("name", ["llama_biases", "qwen3"])
@pytest.mark.parametrize(
    "trained",
    [
        "layers.1.mlp",
        "self_attn.k_proj",
        "norm",
        "embed_tokens",
        "layers.0.self_attn.o_proj.weight",
        "v_proj.bias",
        "gate_proj",
        "up_proj.weight",
        "down_proj.weight",
        "q_proj",
    ],
)
def test_a_frozen_parameter_has_no_gradient_and_costs_no_product(name, trained, monkeypatch):
    model = model_of(name)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(trained in key)
    if not any(p.requires_grad for p in model.parameters()):
        pytest.skip("this family has no such parameter")
    mine = fused(model)
    shapes = no_products(monkeypatch)
    assert_close(results(mine), results(model), TOLERANCE[torch.float64])
    matrices = [p for key, p in mine.named_parameters() if p.requires_grad and p.dim() == 2 and "layers" in key]
    assert sorted(shapes) == sorted(tuple(p.shape) for p in matrices)


def test_gradients_add_up_over_micro_batches():
    model = model_of("qwen2")
    single, mine = results(fused(model)), fused(model)
    for _ in range(2):
        twice = results(mine)
    for name in single.keys() - {"output"}:
        torch.testing.assert_close(twice[name], 2 * single[name], msg=name)


def test_weights_that_changed_between_forward_and_backward_are_an_error_not_a_wrong_gradient():
    model = fused(model_of("llama"))
    output = hidden_states(model)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_second_derivative_is_an_error_not_a_wrong_one():
    model = fused(model_of("llama"))
    weight = model.model.layers[0].mlp.down_proj.weight
    (grad,) = torch.autograd.grad(hidden_states(model).square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_calls_that_are_not_training_take_hugging_faces_forward():
    model = model_of("llama", torch.float32)
    mine = fused(model)
    ids = torch.randint(3, 61, (2, 6))
    with plain_attention(model), plain_attention(mine):
        assert torch.equal(mine(ids).logits, model(ids).logits)
        grown = [m.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (mine, model)]
    assert torch.equal(*grown)


def test_a_module_inside_that_is_hooked_after_fusing_is_called():
    """As by whoever looks for the first output that is not finite."""
    model = fused(model_of("qwen3", torch.float32))
    expected = hidden_states(model)
    called: list[str] = []
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        module = model.model.layers[1].get_submodule(name)
        handle = module.register_forward_hook(lambda _module, _inputs, _output, name=name: called.append(name))
        torch.testing.assert_close(hidden_states(model), expected)
        assert called.pop() == name
        handle.remove()
    assert torch.equal(hidden_states(model), expected)
    assert called == []


def layer_of_another_class(model: Any) -> None:
    class Own(LlamaDecoderLayer):
        pass

    model.model.layers[0].__class__ = Own


def hooked(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def patched(model: Any) -> None:
    model.model.layers[1].self_attn.forward = lambda *_: None


def adapted(model: Any) -> None:
    model.model.layers[0].mlp.up_proj = nn.Sequential(model.model.layers[0].mlp.up_proj)


def other_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


def one_bias(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.bias = nn.Parameter(torch.zeros(16))


def added_module(model: Any) -> None:
    model.model.layers[0].mlp.gate = nn.Linear(2, 2)


@pytest.mark.parametrize(
    "change", [layer_of_another_class, hooked, patched, adapted, other_activation, one_bias, added_module]
)
def test_a_block_that_computes_something_else_is_not_fused(change):
    model = model_of("llama", torch.float32)
    change(model)
    assert not fuse_layers(model) or change is layer_of_another_class
    changed = 1 if change in (hooked, patched) else 0
    assert not isinstance(vars(model.model.layers[changed]).get("forward"), FusedBlock)
    assert len(fused_blocks(model)) == 1


@pytest.mark.parametrize("family", ["gemma2_softcaps", "qwen3_moe", "gpt2", "granite"])
def test_other_families_stay_as_they_are(family):
    model = build(family)
    before = [vars(module).get("forward") for module in model.modules()]
    assert not fuse_layers(model)
    assert [vars(module).get("forward") for module in model.modules()] == before


def test_fusing_twice_is_fusing_once():
    model = fused(model_of("llama"))
    blocks = fused_blocks(model)
    assert fuse_layers(model)
    assert fused_blocks(model) == blocks


def copies(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    yield copy.deepcopy(model)
    yield pickle.loads(pickle.dumps(model))


def test_a_copy_computes_with_its_own_weights():
    model = fused(model_of("qwen2"))
    expected = hidden_states(model)
    for other in copies(model):
        assert torch.equal(hidden_states(other), expected)
        with torch.no_grad():
            other.model.layers[0].mlp.down_proj.weight.zero_()
        assert not torch.equal(hidden_states(other), expected)
        assert torch.equal(hidden_states(model), expected)


def test_the_rollouts_fast_path_still_takes_a_fused_model():
    model = model_of("qwen3", torch.float32)
    assert FastForward.supports(fused(model))
    mine = fused(model)
    mine.model.layers[0].forward = lambda *_: None
    assert not FastForward.supports(mine)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_kernels", [True, False])
def test_on_a_cpu_half_precision_is_fused_where_there_are_compiled_kernels(dtype, has_kernels, monkeypatch):
    monkeypatch.setattr(layers, "has_kernels", lambda dtype: has_kernels)
    model = model_of("llama", dtype)
    is_fused = fuse_where_it_pays(model, torch.device("cpu"), dtype)
    assert is_fused == (len(fused_blocks(model)) == 2) == (has_kernels or dtype != torch.bfloat16)


def test_a_backbone_alone_is_fused_too():
    model = model_of("qwen2").model
    assert fuse_layers(model)
    assert len(fused_blocks(model)) == 2
