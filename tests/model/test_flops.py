"""Operations are counted as torch counts them when the plain model runs, family by family."""

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DeepseekV3Config, OlmoeConfig, OPTConfig, Phi3Config, PreTrainedModel, Qwen2MoeConfig

from burnish.config import HFModelConfig
from burnish.model import flops as module
from burnish.model.attention import plain_attention
from burnish.model.flops import FlopsCounter, device_peak_flops, measured_peak_flops
from burnish.model.load import build_causal_lm
from tests.model.tiny_models import _COMMON, FAMILIES, VOCAB

WIDE: dict[str, Any] = _COMMON | {"hidden_size": 64, "intermediate_size": 96}
MORE = {
    "phi3": Phi3Config(**WIDE),
    "opt": OPTConfig(
        vocab_size=VOCAB, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64
    ),
    "qwen2_moe_shared_expert": Qwen2MoeConfig(
        **WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=40
    ),
    "olmoe": OlmoeConfig(**WIDE, num_experts=8, num_experts_per_tok=3),
    "deepseek_v3": DeepseekV3Config(
        **WIDE | {"num_key_value_heads": 4},
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=20,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
    ),
}
CONFIGS = FAMILIES | MORE
TOKENS = 24


def build(family: str, **load: Any) -> PreTrainedModel:
    return build_causal_lm(CONFIGS[family], torch.float32, **load)


def counted_by_torch(model: PreTrainedModel, *, backward: bool) -> float:
    """Operations of one row of `TOKENS` tokens, every token through the head."""
    ids = torch.arange(TOKENS)[None] % VOCAB
    # Torch does not count grouped products.
    model.set_experts_implementation("eager")
    with plain_attention(model), FlopCounterMode(display=False) as counter:
        logits = model(ids, use_cache=False).logits
        if backward:
            logits.sum().backward()
    by_module = counter.get_flop_counts()
    # Older transformers make the rotary angles, once for all layers, by a product of one column, which ours does not count.
    angles = sum(sum(operations.values()) for name, operations in by_module.items() if name.endswith("rotary_emb"))
    return float(counter.get_total_flops() - angles)


def counted_by_us(model: PreTrainedModel, *, backward: bool) -> float:
    """The same, with every pair of the square: eager attention computes them all, of layers with a window too."""
    counter = FlopsCounter(model)
    assert len(counter._attention) == 2
    counter._attention = [(cost, math.inf) for cost, _ in counter._attention]
    return counter.flops(TOKENS, TOKENS**2, TOKENS, backward=backward)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_operations_are_those_that_torch_counts(family: str, backward: bool) -> None:
    model = build(family)
    assert counted_by_us(model, backward=backward) == pytest.approx(
        counted_by_torch(model, backward=backward), rel=1e-9
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "gemma3", "gpt2"])
def test_frozen_weights_have_no_gradient_of_their_own(family: str) -> None:
    pytest.importorskip("peft")
    from burnish.model.lora import add_adapters

    model = build(family)
    model.requires_grad_(False)
    add_adapters(model, HFModelConfig(lora_rank=4, lora_alpha=8, target_modules=["all-linear"]))  # type: ignore[arg-type]
    assert any(parameter.requires_grad for parameter in model.parameters())
    assert counted_by_us(model, backward=True) == pytest.approx(counted_by_torch(model, backward=True), rel=1e-9)


def test_a_dense_model_by_hand() -> None:
    # Two layers: q and o 32 x 32, k and v 32 x 16, three of 32 x 48; two times two multiplications a pair, head and dim.
    blocks = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    attention, head = 2 * 4 * 4 * 8, 2 * 32 * VOCAB
    counter = FlopsCounter(build("llama"))
    assert counter.flops(10, 55, 3) == 10 * 2 * blocks + 55 * attention + 3 * head
    assert counter.flops(10, 55, 3, backward=True) == 3 * counter.flops(10, 55, 3)


def test_a_value_head_is_one_column() -> None:
    backbone, head = build("llama").model, torch.nn.Linear(32, 1)
    counter, of_policy = FlopsCounter(backbone, head), FlopsCounter(build("llama"))
    assert counter.flops(7, 9, 0, backward=True) == of_policy.flops(7, 9, 0, backward=True)
    assert counter.flops(7, 9, 5, backward=True) - counter.flops(7, 9, 0, backward=True) == 5 * 6 * 32


def test_a_window_bounds_the_pairs_of_its_layers_only() -> None:
    # Gemma 3 has a window of 4 in both layers here, Gemma 2 in every other one.
    for family, windowed in (("mistral_sliding", 2), ("gemma2_softcaps", 1), ("llama", 0)):
        counter = FlopsCounter(build(family))
        pairs, tokens = 30 * 31 // 2, 30
        cost = 2 * 4 * (8 + 8)
        expected = windowed * tokens * 4 * cost + (2 - windowed) * pairs * cost
        assert counter.flops(tokens, pairs, 0) - counter.flops(tokens, 0, 0) == expected


def test_a_device_without_an_entry_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_peak_flops.cache_clear()
    device = torch.device("cpu")
    peak = device_peak_flops(device, torch.float32)
    # Any CPU core does more than a billion operations a second and fewer than ten thousand billion.
    assert 1e9 < peak < 1e13 * torch.get_num_threads()
    monkeypatch.setattr(module.time, "perf_counter", lambda: pytest.fail("measured again"))
    assert device_peak_flops(device, torch.float32) == peak


@pytest.mark.parametrize(("seconds", "sides"), [(0.001, [256, 1024]), (0.02, [256])])
def test_a_device_that_multiplies_slowly_is_measured_by_a_small_product(
    monkeypatch: pytest.MonkeyPatch, seconds: float, sides: list[int]
) -> None:
    """As a CPU that has no bf16 does: a large one would take it seconds."""
    measured = []
    monkeypatch.setattr(module, "_seconds_of_product", lambda side, *_: measured.append(side) or seconds)
    peak = measured_peak_flops.__wrapped__(torch.device("cpu"), torch.bfloat16)
    assert measured == sides
    assert peak == 2.0 * sides[-1] ** 3 / seconds
