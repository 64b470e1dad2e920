"""The fast forward is the Hugging Face backbone, on the same weights."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from burnish.model.attention import plain_attention
from burnish.model.load import build_causal_lm
from burnish.model.policy import backbone_of
from burnish.model.projections import pack_projections
from burnish.rollout.native import fast
from burnish.rollout.native.fast import FastForward
from burnish.rollout.native.kernels import silu_mul
from burnish.rollout.native.paged_cache import LayerShape, PagedCache
from tests.rollout.kernels.cases import on_both_cpu_backends

pytestmark = on_both_cpu_backends
VOCAB = 61
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Large weights, so that a wrong mask or position shows.
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

SUPPORTED: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**COMMON),
    "llama_biases": LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "llama_tied": LlamaConfig(**COMMON, tie_word_embeddings=True),
    "llama_rope_llama3": LlamaConfig(**COMMON, rope_parameters=LLAMA3),
    "llama_rope_yarn": LlamaConfig(**COMMON, rope_parameters=YARN),
    "llama_rope_linear": LlamaConfig(
        **COMMON, rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}
    ),
    "llama_one_key_head": LlamaConfig(**COMMON | {"num_key_value_heads": 1}),
    "llama_all_key_heads": LlamaConfig(**COMMON | {"num_key_value_heads": 4}),
    "llama_wide_heads": LlamaConfig(**COMMON, head_dim=24),
    "qwen2": Qwen2Config(**COMMON),
    "qwen2_sliding": Qwen2Config(**COMMON, **SLIDING),
    "qwen3": Qwen3Config(**COMMON, head_dim=8),
    "qwen3_biases_sliding": Qwen3Config(**COMMON, **SLIDING, head_dim=16, attention_bias=True),
    "mistral": MistralConfig(**COMMON, sliding_window=None),
    "mistral_sliding": MistralConfig(**COMMON, sliding_window=5, head_dim=16),
}

OTHERS: dict[str, PreTrainedConfig] = {
    "gemma2": Gemma2Config(**COMMON, head_dim=8),
    "phi3": Phi3Config(**COMMON),
    "gpt_neox": GPTNeoXConfig(**COMMON),
    "qwen3_moe": Qwen3MoeConfig(**COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "llama_other_activation": LlamaConfig(**COMMON, hidden_act="gelu"),
    "llama_rope_dynamic": LlamaConfig(
        **COMMON, rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    ),
}

BLOCK_SIZE = 4
LENGTHS = [9, 1, 14, 6]


def build(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model whose biases and norms are random too."""
    model = build_causal_lm(config, dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(dtype) * 0.3)
    return model


def make_cache(model: PreTrainedModel, num_blocks: int) -> PagedCache:
    """An empty cache for ``model``, in small blocks."""
    config: Any = model.config
    head_dim = backbone_of(model).layers[0].self_attn.head_dim  # type: ignore[index, union-attr]
    shape = LayerShape(config.num_key_value_heads, head_dim, head_dim)  # type: ignore[arg-type]
    cache = PagedCache([shape] * config.num_hidden_layers, model.dtype, torch.device("cpu"), BLOCK_SIZE)
    cache.allocate(num_blocks)
    return cache


class Rows:
    """Rows of tokens in scattered blocks of a cache; each call feeds the next few tokens of some rows.

    Attention is computed naively, row by row, from what the cache holds.
    """

    def __init__(self, cache: PagedCache, lengths: list[int]) -> None:
        self.cache = cache
        blocks = torch.randperm(cache.num_blocks - 1, generator=torch.Generator().manual_seed(2)) + 1
        wanted = [-(-length // BLOCK_SIZE) for length in lengths]
        tables = blocks[: sum(wanted)].split(wanted)
        self._places = [
            (table[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:length]
            for table, length in zip(tables, lengths, strict=True)
        ]

    def feed(self, spans: list[tuple[int, int, int]]) -> "Rows":
        """Of each span (row, start, end) the tokens are new."""
        self._spans = spans
        self.places = torch.cat([self._places[row][start:end] for row, start, end in spans])
        self.positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        return self

    def attend_packed(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, sliding_window: int | None
    ) -> Tensor:
        keys, values = (buffer.flatten(0, 1) for buffer in (self.cache.key(layer), self.cache.value(layer)))
        assert torch.equal(keys[self.places], key)
        assert torch.equal(values[self.places], value)
        outputs, first = [], 0
        for row, start, end in self._spans:
            places = self._places[row][:end]
            groups = query.shape[1] // key.shape[1]
            k, v = (x[places].float().repeat_interleave(groups, 1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", query[first : first + end - start].float(), k) * scaling
            age = torch.arange(start, end)[:, None] - torch.arange(end)
            hidden = (age < 0) | (age >= (end if sliding_window is None else sliding_window))
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype).flatten(1))
            first += end - start
        return torch.cat(outputs)


def random_ids(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def hugging_face_states(model: PreTrainedModel, ids: list[Tensor]) -> list[Tensor]:
    """Last hidden states of each row alone, by transformers' own attention."""
    with plain_attention(model):
        return [backbone_of(model)(input_ids=row[None], use_cache=False)[0][0] for row in ids]


def fast_states(model: PreTrainedModel, ids: list[Tensor], prefilled: list[int]) -> list[Tensor]:
    """The same by prefilling the first tokens of all rows in one call, then decoding one token of each row at a time."""
    lengths = [len(row) for row in ids]
    rows = Rows(make_cache(model, num_blocks=20), lengths)
    forward = FastForward(model)
    states: list[list[Tensor]] = [[] for _ in ids]
    done = [0] * len(ids)
    spans = [(row, 0, end) for row, end in enumerate(prefilled) if end]
    while spans:
        rows.feed(spans)
        tokens = torch.cat([ids[row][start:end] for row, start, end in spans])
        hidden = forward(tokens, rows.positions, rows)
        for (row, _, end), part in zip(spans, hidden.split([end - start for _, start, end in spans]), strict=True):
            states[row].append(part)
            done[row] = end
        spans = [(row, end, end + 1) for row, end in enumerate(done) if end < lengths[row]]
    return [torch.cat(parts) for parts in states]


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference, relative to the largest entry."""
    x, y = torch.cat(a).double(), torch.cat(b).double()
    return float((x - y).abs().max() / y.abs().max())


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_prefill_and_decoding_give_the_hidden_states_of_hugging_face(name: str, packed: bool) -> None:
    model = build(SUPPORTED[name])
    ids = random_ids(LENGTHS)
    expected = hugging_face_states(model, ids)
    assert FastForward.supports(model)
    if packed:
        pack_projections(model)
    assert distance(fast_states(model, ids, LENGTHS), expected) < 1e-5
    assert distance(fast_states(model, ids, [5, 0, 8, 1]), expected) < 1e-5


@pytest.mark.parametrize("name", SUPPORTED)
def test_in_bf16_it_is_as_near_to_the_exact_states_as_hugging_face(name: str) -> None:
    model = build(SUPPORTED[name], torch.bfloat16)
    ids = random_ids(LENGTHS)
    theirs = hugging_face_states(model, ids)
    ours = fast_states(model, ids, [5, 0, 8, 1])
    exact = hugging_face_states(model.float(), ids)
    # Half the weights of these models are as large as 0.2, so rounding grows fast from layer to layer.
    assert distance(ours, exact) < 1.5 * distance(theirs, exact) + 1e-2
    assert distance(ours, theirs) < 2 * distance(theirs, exact) + 1e-2


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_and_other_mathematics_are_not_supported(name: str) -> None:
    assert not FastForward.supports(build_causal_lm(OTHERS[name]))


def test_a_subclass_is_not_supported() -> None:
    class Scaled(LlamaForCausalLM):
        pass

    assert not FastForward.supports(Scaled(SUPPORTED["llama"]))  # type: ignore[arg-type]


@pytest.mark.parametrize("change", ["subclassed projection", "hook", "own forward", "parametrized"])
def test_a_model_with_one_changed_module_is_not_supported(change: str) -> None:
    model = build(SUPPORTED["llama"])
    projection: Any = model.get_submodule("model.layers.1.self_attn.q_proj")
    if change == "subclassed projection":
        projection.__class__ = type("LoraLinear", (torch.nn.Linear,), {})
    elif change == "hook":
        projection.register_forward_hook(lambda _module, _inputs, output: output * 2)
    elif change == "own forward":
        projection.forward = lambda x: x
    else:
        torch.nn.utils.parametrizations.weight_norm(projection)
    assert not FastForward.supports(model)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
def test_it_reads_the_weights_of_the_moment(packed: bool) -> None:
    """Whether they were changed in place, re-pointed, or replaced by other parameters."""
    model = build(SUPPORTED["qwen2"])
    if packed:
        pack_projections(model)
    ids = random_ids([7])[0]
    rows = Rows(make_cache(model, num_blocks=4), [7]).feed([(0, 0, 7)])
    forward = FastForward(model)
    before = forward(ids, rows.positions, rows)
    attention: Any = model.get_submodule("model.layers.0.self_attn")
    for change in ("in place", "re-pointed", "replaced"):
        with torch.no_grad():
            if change == "in place":
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            elif change == "re-pointed":
                attention.k_proj.weight.data = attention.k_proj.weight.data * 1.1
            else:
                attention.v_proj.bias = torch.nn.Parameter(attention.v_proj.bias * 1.5)
        after = forward(ids, rows.positions, rows)
        assert not torch.allclose(after, before, rtol=1e-3)
        assert distance([after], hugging_face_states(model, [ids])) < 1e-5
        before = after


def test_packed_weights_are_not_copied() -> None:
    """The largest tensor that a call makes is smaller than any weight matrix of the layers."""
    config = LlamaConfig(**COMMON | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8})
    model = build(config)
    pack_projections(model)
    rows = Rows(make_cache(model, num_blocks=4), [3]).feed([(0, 0, 3)])
    forward = FastForward(model)
    ids = random_ids([3])[0]
    forward(ids, rows.positions, rows)
    with torch.profiler.profile(profile_memory=True) as profile:
        forward(ids, rows.positions, rows)
    largest = max(event.cpu_memory_usage for event in profile.events())
    smallest = min(weight.nbytes for weight in model.parameters() if weight.dim() == 2)
    assert 0 < largest < smallest


@pytest.mark.parametrize("num_layers", [1, 3])
def test_filling_the_cache_stores_what_a_call_stores_and_leaves_out_the_last_states(
    num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(Qwen3Config(**COMMON | {"num_hidden_layers": num_layers}, head_dim=8))
    ids = random_ids([9])[0]
    forward, stored = FastForward(model), []
    products: list[int] = []
    monkeypatch.setattr(fast, "silu_mul", lambda x: [products.append(len(x)), silu_mul(x)][1])
    for run in (forward, forward.fill):
        cache = make_cache(model, num_blocks=4)
        rows = Rows(cache, [9]).feed([(0, 0, 9)])
        run(ids, rows.positions, rows)
        stored.append([buffer(layer).clone() for layer in range(num_layers) for buffer in (cache.key, cache.value)])
    assert len(products) == num_layers + num_layers - 1
    torch.testing.assert_close(*stored, rtol=0, atol=0)


def test_long_prompts_go_through_the_mlp_in_parts_that_fit_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(SUPPORTED["llama"])
    ids = random_ids(LENGTHS)
    whole = fast_states(model, ids, LENGTHS)
    parts: list[int] = []

    def noting(gate_up: Tensor) -> Tensor:
        parts.append(len(gate_up))
        return silu_mul(gate_up)

    monkeypatch.setattr(fast, "silu_mul", noting)
    monkeypatch.setattr(fast, "_MIN_MLP_TOKENS", 1)
    monkeypatch.setattr(fast, "_MLP_BYTES", 7 * 2 * COMMON["intermediate_size"] * 4)
    torch.testing.assert_close(fast_states(model, ids, LENGTHS), whole)
    assert parts == [7, 7, 7, 7, 2] * COMMON["num_hidden_layers"]


def test_positions_beyond_the_reserved_ones_are_possible_after_reserve() -> None:
    model = build(SUPPORTED["llama_rope_llama3"])
    ids = random_ids([13])[0]
    rows = Rows(make_cache(model, num_blocks=5), [13]).feed([(0, 0, 13)])
    forward = FastForward(model, max_length=4)
    with pytest.raises(IndexError):
        forward(ids, rows.positions, rows)
    forward.reserve(13)
    assert distance([forward(ids, rows.positions, rows)], hugging_face_states(model, [ids])) < 1e-5


def test_a_model_that_uses_some_of_its_layers_is_followed() -> None:
    model = build(SUPPORTED["llama"])
    model.config.num_hidden_layers = 2
    ids = random_ids(LENGTHS)
    assert distance(fast_states(model, ids, LENGTHS), hugging_face_states(model, ids)) < 1e-5
