"""``dtype=auto``: bfloat16 where it is faster and the model is large enough for that to matter."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from burnish.config import FSDPEngineConfig, HFModelConfig
from burnish.engine import FSDPEngine, compute_dtype
from burnish.engine.compute_dtype import num_entries, resolve_dtype
from burnish.model.load import build_causal_lm
from burnish.utils.errors import ConfigError, ModelError

CPU = torch.device("cpu")
DEMO = Path(__file__).resolve().parents[2] / "examples" / "tiny_model" / "model"
LARGE = LlamaConfig(hidden_size=576, num_hidden_layers=4, vocab_size=512)


@pytest.fixture
def fast_bfloat16(monkeypatch):
    """A CPU that multiplies bfloat16, whatever this one does."""
    has(monkeypatch, avx512_bf16=True)


def has(monkeypatch, *, avx512_bf16: bool = False, amx: bool = False) -> None:
    """Makes this CPU one with these instructions and no others."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)


@pytest.mark.usefixtures("fast_bfloat16")
def test_on_a_cpu_a_large_model_computes_in_bfloat16_and_the_demos_in_float32():
    assert resolve_dtype("auto", CPU, lambda: LARGE) is torch.bfloat16
    assert resolve_dtype("auto", CPU, lambda: AutoConfig.from_pretrained(DEMO)) is torch.float32


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [({"avx512_bf16": True}, torch.bfloat16), ({"amx": True}, torch.bfloat16), ({}, torch.float32)],
)
def test_a_cpu_without_instructions_for_it_computes_in_float32(monkeypatch, instructions, expected):
    has(monkeypatch, **instructions)
    assert resolve_dtype("auto", CPU, lambda: LARGE) is expected


@pytest.mark.usefixtures("fast_bfloat16")
def test_one_rank_that_would_not_decides_for_all(monkeypatch):
    monkeypatch.setattr(compute_dtype.ranks, "world_size", lambda: 2)
    monkeypatch.setattr(compute_dtype.ranks, "all_reduce_numbers", lambda numbers, op, device: [sum(numbers) + 0.0])
    assert resolve_dtype("auto", CPU, lambda: LARGE) is torch.float32
    monkeypatch.setattr(compute_dtype.ranks, "all_reduce_numbers", lambda numbers, op, device: [sum(numbers) + 1.0])
    assert resolve_dtype("auto", CPU, lambda: LARGE) is torch.bfloat16


def test_a_name_means_itself_and_reads_no_configuration():
    def never() -> LlamaConfig:
        raise AssertionError("read")

    for name in ("float32", "bfloat16", "float64"):
        assert resolve_dtype(name, CPU, never) is getattr(torch, name)
    assert resolve_dtype("auto", torch.device("cuda"), never) is torch.bfloat16
    with pytest.raises(ConfigError, match=r"dtype=int8: known are auto, float32, bfloat16, float64"):
        resolve_dtype("int8", CPU, never)


@pytest.mark.usefixtures("fast_bfloat16")
def test_a_model_that_cannot_be_read_is_left_to_whoever_loads_it():
    def broken() -> LlamaConfig:
        raise ModelError("no such folder")

    assert resolve_dtype("auto", CPU, broken) is torch.float32
    with pytest.raises(ModelError, match="no_such_folder"):
        FSDPEngine(HFModelConfig(path="./no_such_folder"), FSDPEngineConfig(), None)


@pytest.mark.usefixtures("fast_bfloat16")
def test_an_engine_takes_the_dtype_from_its_model(tiny_model_path):
    assert FSDPEngine(HFModelConfig(path=tiny_model_path), FSDPEngineConfig(), None).dtype is torch.float32
    model = build_causal_lm(
        LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=70_000, intermediate_size=64)
    )
    assert FSDPEngine(HFModelConfig(path=None), FSDPEngineConfig(), None, model=model).dtype is torch.bfloat16


def test_entries_are_those_of_the_matrices_within_a_third():
    assert num_entries(LARGE) == 576 * (12 * 4 * 576 + 512)
    # A llama's three products of its MLP are as many entries as the two of four times the width in the formula.
    config = LlamaConfig(hidden_size=576, num_hidden_layers=4, vocab_size=512, intermediate_size=1536)
    matrices = sum(p.numel() for name, p in build_causal_lm(config).named_parameters() if p.ndim == 2)
    assert num_entries(config) == pytest.approx(matrices, rel=1 / 3)
