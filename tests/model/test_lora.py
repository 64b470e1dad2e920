"""Adapters stand where they are asked for, compute what peft computes, and leave the base as it was."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from burnish.config import HFModelConfig
from burnish.model import lora
from burnish.model.load import build_causal_lm
from burnish.utils.errors import ConfigError, ModelError
from tests.model.tiny_models import FAMILIES, build


def settings(**keys: Any) -> HFModelConfig:
    return HFModelConfig(**({"lora_rank": 4, "lora_alpha": 8} | keys))


def with_adapters(family: str = "llama", seed: int = 0, **keys: Any) -> Any:
    model = build(family)
    lora.add_adapters(model, settings(lora_seed=seed, **keys))
    return model


def logits(model: Any) -> torch.Tensor:
    from burnish.model.attention import plain_attention

    with torch.no_grad(), plain_attention(model):
        return model(torch.tensor([[3, 9, 4, 21, 8]]), use_cache=False).logits


def shake(model: Any, seed: int = 1) -> None:
    """B is zero at the start, and then nothing of an adapter shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in lora.adapter_parameters(model):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2_softcaps", "gpt2", "qwen3_moe"])
def test_at_the_start_the_model_is_the_base_and_switched_off_it_is_the_base_again(family: str) -> None:
    base, model = build(family), with_adapters(family)
    assert type(model) is type(base)
    assert torch.equal(logits(model), logits(base))
    shake(model)
    assert not torch.allclose(logits(model), logits(base), atol=1e-3)
    assert lora.adapters_enabled(model)
    with lora.adapters_off(model):
        assert not lora.adapters_enabled(model)
        assert torch.equal(logits(model), logits(base))
        assert all(parameter.requires_grad for _, parameter in lora.adapter_parameters(model))
    assert lora.adapters_enabled(model)
    assert not torch.allclose(logits(model), logits(base), atol=1e-3)


def test_the_switch_goes_back_after_an_error() -> None:
    model = with_adapters()
    with pytest.raises(KeyError), lora.adapters_off(model), lora.adapters_off(model):
        raise KeyError
    assert lora.adapters_enabled(model)


def test_the_delta_is_alpha_over_rank_times_b_a() -> None:
    model = with_adapters(lora_rank=4, lora_alpha=12, target_modules=["q_proj"])
    shake(model)
    _, layer = next(lora.adapter_layers(model))
    x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    with torch.no_grad():
        expected = x @ layer.base_layer.weight.T + 12 / 4 * (x @ a.T) @ b.T
        torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
        merged = lora.merged_weight(layer, layer.base_layer.weight, a, b)
        torch.testing.assert_close(x @ merged.T, expected, atol=1e-5, rtol=1e-5)


def test_all_linear_is_what_peft_means_by_it() -> None:
    # Of a mixture peft means the experts' joint tensors as well.
    for family in set(FAMILIES) - {"qwen3_moe"}:
        theirs = get_peft_model(build(family), LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
        expected = {name for name, _ in lora.adapter_layers(theirs.base_model.model)}
        model = build(family)
        assert set(lora.target_layers(model, ["all-linear"])) == expected
        lora.add_adapters(model, settings())
        assert {name for name, _ in lora.adapter_layers(model)} == expected


@pytest.mark.parametrize(
    ("targets", "excluded", "expected"),
    [
        (["q_proj"], [], ["0.self_attn.q_proj", "1.self_attn.q_proj"]),
        (["q_proj", "layers.1.mlp.down_proj"], [], ["0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.down_proj"]),
        ([r".*\.0\..*_proj"], ["mlp.up_proj", "k_proj"], None),
        (["all-linear"], [r".*self_attn.*", "layers.0.mlp.gate_proj"], None),
    ],
)
def test_names_endings_and_patterns_select(targets: list[str], excluded: list[str], expected: list[str] | None) -> None:
    model = build("llama")
    found = lora.target_layers(model, targets, excluded)
    if expected is None:
        attention = [f"self_attn.{name}_proj" for name in "qkvo"]
        mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        if targets == ["all-linear"]:
            expected = [f"{layer}.{name}" for layer in (0, 1) for name in mlp if (layer, name) != (0, "mlp.gate_proj")]
        else:
            left_out = ("mlp.up_proj", "self_attn.k_proj")
            expected = [f"0.{name}" for name in attention + mlp if name not in left_out]
    assert sorted(found) == sorted(f"model.layers.{name}" for name in expected)
    lora.add_adapters(model, settings(target_modules=targets, exclude_modules=excluded))
    assert sorted(name for name, _ in lora.adapter_layers(model)) == sorted(found)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"target_modules": ["query_proj"]}, "target_modules=query_proj matches no linear layer of LlamaForCausalLM"),
        ({"target_modules": ["embed_tokens"]}, "target_modules=embed_tokens matches no linear layer"),
        ({"target_modules": ["q_proj", "lm_head"]}, "the head 'lm_head' takes no adapter"),
        ({"exclude_modules": ["nothing"]}, "exclude_modules=nothing matches no linear layer"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, "leaves no layer"),
    ],
)
def test_a_target_that_selects_nothing_is_refused_with_what_there_is(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        lora.add_adapters(build("llama"), settings(**keys))
    assert says in str(error.value)
    for name in ("model.layers.*.self_attn.q_proj", "model.layers.*.mlp.down_proj"):
        assert name in str(error.value)


def test_without_peft_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "peft":
            raise ImportError("No module named 'peft'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install burnish\[lora\]"):
        lora.add_adapters(build("llama"), settings())


def test_first_values_depend_on_the_seed_alone() -> None:
    def values(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(torch.seed() % 1000)
        before = torch.random.get_rng_state()
        model = with_adapters(seed=seed)
        assert torch.equal(torch.random.get_rng_state(), before)
        return [parameter.detach() for _, parameter in lora.adapter_parameters(model)]

    one, again, other = values(3), values(3), values(4)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not torch.equal(one[0], other[0])
    model = with_adapters()
    for name, parameter in lora.adapter_parameters(model):
        if "lora_B" in name:
            assert float(parameter.detach().abs().max()) == 0
        else:
            # Uniform over +-1/sqrt(in): its deviation is a third of that, squared.
            bound = parameter.shape[1] ** -0.5
            assert float(parameter.detach().abs().max()) <= bound
            assert 0.4 * bound < float(parameter.detach().std()) < 0.75 * bound


def test_peft_loads_what_is_saved_and_burnish_loads_what_peft_saves(tmp_path: Path) -> None:
    model = with_adapters()
    shake(model)
    weights = {lora.hf_name(name): parameter.detach() for name, parameter in lora.adapter_parameters(model)}
    lora.save_adapters(model, weights, tmp_path / "ours")
    theirs = PeftModel.from_pretrained(build("llama"), str(tmp_path / "ours"))
    torch.testing.assert_close(logits(theirs.base_model.model), logits(model), atol=0, rtol=0)
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == {f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down")}
    theirs.save_pretrained(str(tmp_path / "theirs"))
    back = build("llama")
    lora.add_adapters(back, settings(lora_rank=0, lora_adapter_path=str(tmp_path / "theirs")))
    assert torch.equal(logits(back), logits(model))


def saved(tmp_path: Path, **config: Any) -> str:
    model = with_adapters()
    weights = {lora.hf_name(name): parameter.detach() for name, parameter in lora.adapter_parameters(model)}
    lora.save_adapters(model, weights, tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias=all"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "is of a IA3 adapter"),
        ({"r": 2}, "another rank"),
        ({"target_modules": ["q_proj"]}, "only the file has"),
        ({"target_modules": ["query"]}, "does not fit LlamaForCausalLM"),
    ],
)
def test_an_adapter_that_cannot_be_continued_is_refused(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    path = saved(tmp_path, **config)
    with pytest.raises(ModelError, match=says):
        lora.add_adapters(build("llama"), settings(lora_rank=0, lora_adapter_path=path))


@pytest.mark.parametrize("patterns", [{"alpha_pattern": {"down_proj": 16}}, {"rank_pattern": {"layers.0.*.q_proj": 2}}])
def test_an_adapter_that_another_scaling_of_one_layer_would_change_is_refused(tmp_path: Path, patterns) -> None:
    targets = ["q_proj", "down_proj"]
    get_peft_model(
        build("llama"), LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **patterns)
    ).save_pretrained(str(tmp_path), save_embedding_layers=False)
    same = build("llama")
    lora.add_adapters(same, settings(lora_rank=0, lora_adapter_path=str(tmp_path)))
    lora.check_same_scaling(tmp_path, same)
    with pytest.raises(ModelError, match=r"scales the adapter of model\.layers\.0\S*_proj by 4 .*and this run by 2"):
        lora.check_same_scaling(tmp_path, with_adapters(target_modules=targets))


def test_an_adapter_of_the_head_is_refused(tmp_path: Path) -> None:
    """The fused head reads the head's weight, so such an adapter would be neither used nor trained."""
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    get_peft_model(build("qwen2"), config).save_pretrained(str(tmp_path), save_embedding_layers=False)
    with pytest.raises(ModelError, match="beside the head 'lm_head'"):
        lora.add_adapters(build("qwen2"), settings(lora_rank=0, lora_adapter_path=str(tmp_path)))


def test_a_rank_that_is_not_the_files_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(ConfigError, match="lora_rank=16, but the adapter at lora_adapter_path"):
        lora.add_adapters(build("llama"), settings(lora_rank=16, lora_adapter_path=path))
    with pytest.raises(ModelError, match="cannot be read"):
        lora.add_adapters(build("llama"), settings(lora_rank=0, lora_adapter_path=str(tmp_path / "nowhere")))


def test_a_copy_gets_the_same_places() -> None:
    model = with_adapters(target_modules=["q_proj", "down_proj"], lora_alpha=32)
    other = build_causal_lm(FAMILIES["llama"], torch.bfloat16)
    lora.add_same_adapters(other, model)
    ours, theirs = dict(lora.adapter_parameters(model)), dict(lora.adapter_parameters(other))
    assert ours.keys() == theirs.keys()
    assert all(parameter.dtype == torch.bfloat16 for parameter in theirs.values())
    scalings = {name: layer.scaling["default"] for name, layer in lora.adapter_layers(other)}
    assert set(scalings.values()) == {8.0}
    plain = build("llama")
    lora.add_same_adapters(plain, build("llama"))
    assert not lora.has_adapters(plain)


def test_names_are_those_without_an_adapter() -> None:
    model, base = with_adapters(), build("llama")
    names = [lora.hf_name(name) for name, _ in model.named_parameters()]
    assert len(set(names)) == len(names)
    assert {name for name in names if not lora.is_adapter_name(name)} == {name for name, _ in base.named_parameters()}
    assert "model.layers.0.self_attn.q_proj.lora_A.weight" in names
