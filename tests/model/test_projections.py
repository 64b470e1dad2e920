"""Packed projections are one weight for a rollout, and the same parameters as before for everybody else."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from burnish.model.attention import plain_attention
from burnish.model.load import build_causal_lm, load_causal_lm
from burnish.model.policy import set_dtype
from burnish.model.projections import GATE_UP, QKV, pack_projections, packed_weight
from tests.model.tiny_models import FAMILIES, build

PACKED = ("llama", "qwen2", "qwen3", "mistral_sliding")


def groups(model: nn.Module) -> list[list[nn.Linear]]:
    """The projections that read the same states."""
    return [
        [getattr(module, name) for name in names]
        for module in model.modules()
        for names in (QKV, GATE_UP)
        if all(hasattr(module, name) for name in names)
    ]


def joint_weights(model: nn.Module) -> list[Tensor | None]:
    return [packed_weight([projection.weight for projection in group]) for group in groups(model)]


def is_packed(model: nn.Module) -> bool:
    joint = joint_weights(model)
    return len(joint) > 0 and all(weight is not None for weight in joint)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def storage_bytes(model: nn.Module) -> int:
    """Memory that the parameters keep alive."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


@pytest.mark.parametrize("family", PACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_moves_the_weights_and_changes_no_value(family: str, dtype: torch.dtype) -> None:
    model = build(family, dtype)
    before, parameters, size = values(model), dict(model.named_parameters()), storage_bytes(model)
    assert not is_packed(model)
    pack_projections(model)
    assert is_packed(model)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())
    assert storage_bytes(model) == size


def test_the_joint_weight_is_the_parameters_themselves() -> None:
    model = build_causal_lm(LlamaConfig(**_shape(), attention_bias=True, mlp_bias=True))
    pack_projections(model)
    for group in groups(model):
        for name in ("weight", "bias"):
            parts: list[Any] = [getattr(projection, name) for projection in group]
            joint = packed_weight(parts)
            assert joint is not None
            assert joint.data_ptr() == parts[0].data_ptr()
            assert not joint.requires_grad
            assert torch.equal(joint, torch.cat(parts))
            joint[-1] = 7.0
            assert bool((parts[-1][-1] == 7.0).all())


def test_biases_are_packed_with_and_without_norms_between() -> None:
    for config in (Qwen2Config(**_shape()), Qwen3Config(**_shape(), head_dim=8, attention_bias=True)):
        model = build_causal_lm(config)
        pack_projections(model)
        qkv = [group for group in groups(model) if len(group) == 3]
        assert all(packed_weight([projection.bias for projection in group]) is not None for group in qkv)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(PACKED)))
def test_other_families_are_left_alone(family: str) -> None:
    model = build(family)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    pack_projections(model)
    assert before == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_packing_again_moves_nothing() -> None:
    model = build("qwen2")
    pack_projections(model)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    pack_projections(model)
    assert before == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_beside_the_model_one_group_at_a_time_is_held_twice() -> None:
    config = LlamaConfig(**_shape() | {"num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 256})
    with torch.profiler.profile(profile_memory=True) as profile:
        model = build_causal_lm(config)
        pack_projections(model)
    largest = max(sum(projection.weight.nbytes for projection in group) for group in groups(model))
    held = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert held >= storage_bytes(model)
    assert peak - held < 1.5 * largest


def test_adjacent_rows_are_recognised_and_nothing_else_is() -> None:
    whole = torch.randn(10, 4)
    a, b = whole[:4], whole[4:]
    joint = packed_weight([a, b])
    assert joint is not None
    assert joint.data_ptr() == whole.data_ptr()
    assert torch.equal(joint, whole)
    assert packed_weight([a]) is not None
    assert packed_weight([b, a]) is None
    assert packed_weight([a, whole[5:]]) is None
    assert packed_weight([a, b.clone()]) is None
    assert packed_weight([whole[:4, :2], whole[4:, :2]]) is None
    assert packed_weight([a, b.reshape(-1)]) is None
    assert packed_weight([a, b.view(torch.int32)]) is None
    assert packed_weight([a, whole[4:].flatten()[:20].view(10, 2)]) is None


def test_a_projection_with_an_adapter_is_left_alone() -> None:
    class Adapted(nn.Linear):
        pass

    model = build("llama")
    changed: Any = groups(model)[0][1]
    changed.__class__ = Adapted
    pack_projections(model)
    joint = joint_weights(model)
    assert joint[0] is None
    assert all(weight is not None for weight in joint[1:])


def test_parameters_of_two_dtypes_are_left_alone() -> None:
    model = build("llama")
    odd: Any = groups(model)[0][2]
    odd.weight.data = odd.weight.data.double()
    pack_projections(model)
    assert joint_weights(model)[0] is None


def test_one_parameter_used_twice_stays_one() -> None:
    model = build("llama")
    group: Any = groups(model)[0]
    group[2].weight = group[1].weight
    pack_projections(model)
    assert joint_weights(model)[0] is None
    assert group[2].weight is group[1].weight


def test_training_is_the_same_to_the_bit() -> None:
    """Gradients, an optimizer's updates in place and their sums do not see the packing."""
    ids = torch.arange(3, 15)[None]

    def train(model: PreTrainedModel) -> dict[str, Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        with plain_attention(model):
            for _ in range(3):
                for _ in range(2):
                    model(ids, labels=ids, use_cache=False).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return values(model)

    packed, plain = build("qwen2"), build("qwen2")
    pack_projections(packed)
    a, b = train(packed), train(plain)
    assert all(torch.equal(a[name], b[name]) for name in b)
    assert is_packed(packed)


@pytest.mark.parametrize("family", PACKED)
def test_a_saved_folder_is_whole_and_not_larger(tmp_path: Path, family: str) -> None:
    plain, packed = build(family), build(family)
    pack_projections(packed)
    plain.save_pretrained(tmp_path / "plain")
    packed.save_pretrained(tmp_path / "packed")
    files = [tmp_path / name / "model.safetensors" for name in ("plain", "packed")]
    assert files[0].stat().st_size == files[1].stat().st_size
    a, b = (load_file(file) for file in files)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    loaded = dict(load_causal_lm(str(tmp_path / "packed")).named_parameters())
    assert all(torch.equal(value, loaded[name]) for name, value in values(packed).items())


def test_a_state_dict_file_is_not_larger(tmp_path: Path) -> None:
    plain, packed = build("qwen3"), build("qwen3")
    pack_projections(packed)
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    torch.save(packed.state_dict(), tmp_path / "packed.pt")
    assert (tmp_path / "packed.pt").stat().st_size <= 1.02 * (tmp_path / "plain.pt").stat().st_size


def test_loading_a_state_dict_writes_into_the_packed_weights() -> None:
    model, other = build("qwen2"), build_causal_lm(FAMILIES["qwen2"], seed=9)
    pack_projections(model)
    model.load_state_dict(other.state_dict())
    assert is_packed(model)
    assert all(torch.equal(value, values(other)[name]) for name, value in values(model).items())


def test_a_copy_of_the_model_shares_nothing_and_can_be_packed() -> None:
    model = build("llama")
    pack_projections(model)
    twin = copy.deepcopy(model)
    assert storage_bytes(twin) == storage_bytes(model)
    pack_projections(twin)
    assert is_packed(twin)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert all(bool(parameter.any()) for name, parameter in model.named_parameters() if "bias" not in name)


def test_a_cast_takes_weights_out_of_their_groups_and_packing_puts_them_back() -> None:
    model = build("qwen2")
    pack_projections(model)
    set_dtype(model, torch.bfloat16)
    assert not is_packed(model)
    pack_projections(model)
    assert is_packed(model)


def _shape() -> dict[str, Any]:
    return {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
