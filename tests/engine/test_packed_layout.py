"""In the replicated layout projections of one input are one weight, through training, checkpoints and weight streams."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from burnish.engine import FSDPEngine
from burnish.engine.checkpoint import read_optimizer
from burnish.model.load import build_causal_lm
from burnish.model.projections import GATE_UP, QKV, pack_projections, packed_weight
from burnish.rollout.weights import load_weights
from tests.engine.engine_program import make_engine, tiny_config, train


def joint_weights(model: nn.Module) -> list[Tensor]:
    """The joint weight of every group; fails where one is not packed."""
    joint = [
        packed_weight([getattr(module, name).weight for name in names])
        for module in model.modules()
        for names in (QKV, GATE_UP)
        if hasattr(module, names[0])
    ]
    assert len(joint) == 4
    assert all(weight is not None for weight in joint)
    return joint  # type: ignore[return-value]


def addresses(engine: FSDPEngine) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in engine.module.named_parameters()}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("module", ["policy", "value"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_every_replicated_model_is_packed_in_its_compute_dtype(dtype: str, module: str, trained: bool) -> None:
    engine = make_engine(dtype=dtype, module=module, trained=trained)
    assert all(weight.dtype == engine.dtype for weight in joint_weights(engine.module))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_are_written_into_the_packed_weights(dtype: str) -> None:
    engine = make_engine(dtype=dtype)
    joint, before = joint_weights(engine.module), addresses(engine)
    old = [weight.clone() for weight in joint]
    train(engine, steps=2, micro_batch_size=4)
    assert addresses(engine) == before
    assert all(bool((weight != other).any()) for weight, other in zip(joint, old, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_as_large_as_its_tensors_and_is_loaded_in_place(tmp_path: Path, dtype: str) -> None:
    config = tiny_config(hidden_size=128, intermediate_size=512, attention_bias=True)
    engine, other = make_engine(dtype=dtype, config=config), make_engine(dtype=dtype, config=config, seed=4)
    train(engine, steps=1, micro_batch_size=4)
    engine.save_checkpoint(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    size = sum(tensor.nbytes for tensor in saved.values())
    assert size == sum(weight.nbytes for _, weight in engine.named_weights())
    assert (tmp_path / "model.safetensors").stat().st_size < 1.02 * size
    moments = sum(tensor.nbytes for entry in read_optimizer(tmp_path).values() for tensor in entry.values())
    (file,) = (tmp_path / "optimizer").iterdir()
    assert file.stat().st_size < 1.05 * moments
    before, joint = addresses(other), joint_weights(other.module)
    other.load_checkpoint(tmp_path)
    assert addresses(other) == before
    assert all(torch.equal(a, b) for a, b in zip(joint, joint_weights(engine.module), strict=True))


def test_a_weight_stream_fills_a_packed_copy_in_place() -> None:
    engine = make_engine(dtype="bfloat16")
    train(engine, steps=1, micro_batch_size=4)
    model: Any = build_causal_lm(tiny_config(), torch.bfloat16, seed=7)
    pack_projections(model)
    joint = joint_weights(model)
    load_weights(model, engine.named_weights(), copy=True)
    assert all(torch.equal(a, b) for a, b in zip(joint, joint_weights(engine.module), strict=True))
