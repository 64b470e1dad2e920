"""What is saved is what goes on, in any precision, and transformers can read it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from burnish.utils.errors import CheckpointError
from tests.engine.engine_program import make_batch, make_engine, tiny_config, train


@pytest.mark.parametrize("module", ["policy", "value"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_training_goes_on_after_a_round_trip_as_if_it_had_not_stopped(tmp_path: Path, dtype: str, module: str) -> None:
    engine = make_engine(dtype=dtype, module=module)
    train(engine, steps=2, micro_batch_size=4)
    engine.save_checkpoint(tmp_path)
    resumed = make_engine(dtype=dtype, module=module, seed=5)
    resumed.load_checkpoint(tmp_path)
    a, b = (train(each, steps=2, micro_batch_size=4) for each in (engine, resumed))
    assert a["metrics"] == b["metrics"]
    assert a["updates"] == b["updates"]
    assert all(torch.equal(weight, b["weights"][name]) for name, weight in a["weights"].items())


@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_loads_in_transformers_with_the_same_weights(tmp_path: Path, tied: bool) -> None:
    engine = make_engine(dtype="bfloat16", config=tiny_config(tie_word_embeddings=tied))
    train(engine, steps=1, micro_batch_size=4)
    engine.save_checkpoint(tmp_path, ("model",))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    saved = dict(plain.named_parameters())
    assert all(torch.equal(weight, saved[name]) for name, weight in engine.named_weights())
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "generation_config.json").exists()
    assert not (tmp_path / "optimizer").exists()


def test_an_engine_starts_from_a_saved_folder(tmp_path: Path) -> None:
    for module, output in (("policy", "log_probs"), ("value", "values")):
        engine = make_engine(module=module)
        train(engine, steps=1, micro_batch_size=4)
        engine.save_checkpoint(tmp_path / module, ("model",))
        started = make_engine(module=module, path=str(tmp_path / module), trained=False)
        a, b = (each.infer_batch(make_batch(), outputs=(output,))[output] for each in (engine, started))
        assert torch.equal(a, b)


def test_a_critic_starts_from_a_policys_folder(tmp_path: Path) -> None:
    make_engine().save_checkpoint(tmp_path, ("model",))
    critic = make_engine(module="value", path=str(tmp_path))
    assert float(critic.infer_batch(make_batch(), outputs=("values",))["values"].abs().max()) == 0.0


def test_the_model_alone_can_be_loaded(tmp_path: Path) -> None:
    engine = make_engine()
    engine.save_checkpoint(tmp_path, ("model",))
    other = make_engine(seed=3)
    other.load_checkpoint(tmp_path, ("model",))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(engine.named_weights(), other.named_weights(), strict=True))
    with pytest.raises(CheckpointError, match="no folder optimizer"):
        other.load_checkpoint(tmp_path)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    engine = make_engine()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        engine.load_checkpoint(tmp_path / "nothing")
    engine.save_checkpoint(tmp_path)
    (tmp_path / "optimizer" / "shard_00000_of_00001.safetensors").write_bytes(b"cut short")
    with pytest.raises(CheckpointError, match="cannot be read"):
        engine.load_checkpoint(tmp_path)


def test_optimizer_state_of_another_model_is_refused(tmp_path: Path) -> None:
    engine = make_engine()
    train(engine, steps=1, micro_batch_size=4)
    engine.save_checkpoint(tmp_path)
    other = make_engine(config=tiny_config(num_hidden_layers=1))
    with pytest.raises(CheckpointError, match="another model"):
        other.load_checkpoint(tmp_path, ("optimizer",))


def test_stored_buffers_travel_with_the_weights(tmp_path: Path) -> None:
    """Mixtures of experts keep selection biases in buffers; without them a checkpoint is another model."""
    engine, resumed = make_engine(), make_engine(seed=5)
    for each, value in ((engine, 3.0), (resumed, 0.0)):
        each.module.model.model.layers[0].register_buffer("score_bias", torch.full((4,), value))
    streamed = dict(engine.named_weights())
    assert streamed["model.layers.0.score_bias"].tolist() == [3.0] * 4
    engine.save_checkpoint(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["model.layers.0.score_bias"].tolist() == [3.0] * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_is_not_finite_is_named_and_not_written(tmp_path: Path, dtype: str) -> None:
    engine = make_engine(dtype=dtype)
    assert engine.non_finite_weights() == []
    train(engine, steps=1, micro_batch_size=4)
    assert engine.non_finite_weights() == []
    (name, weight), *_ = engine.named_weights()
    weight[0, 0] = float("inf")
    assert engine.non_finite_weights() == [name]
    with pytest.raises(CheckpointError, match=rf"was not written: '{name}' of the model or its optimizer"):
        engine.save_checkpoint(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_moments_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    engine = make_engine()
    train(engine, steps=1, micro_batch_size=4)
    assert engine._optimizer is not None
    name, moment = next((name, each) for name, each in engine._optimizer.moments().items() if "exp_avg_sq" in name)
    moment[0, 0] = float("nan")
    assert engine.non_finite_weights() == [name]
    with pytest.raises(CheckpointError, match=f"'{name}'"):
        engine.save_checkpoint(tmp_path / "new")


def test_a_rate_that_overflows_the_weights_is_caught_before_anything_is_saved(tmp_path: Path) -> None:
    # The gradient is finite and clipped, so nothing is skipped: only what is left of the weights tells.
    engine = make_engine(lr=1e39, weight_decay=0.0)
    first = train(engine, steps=1, micro_batch_size=4)
    assert first["updates"][0]["skipped_updates"] == 0
    assert engine.non_finite_weights()
    with pytest.raises(CheckpointError, match="lower learning rate"):
        engine.save_checkpoint(tmp_path / "new")
    assert train(engine, steps=1, micro_batch_size=4)["updates"][0]["skipped_updates"] == 1


def test_a_model_that_is_only_read_can_be_looked_at_too() -> None:
    engine = make_engine(dtype="bfloat16", trained=False)
    assert engine.non_finite_weights() == []
    dict(engine.named_weights())["model.norm.weight"][3] = float("nan")
    assert engine.non_finite_weights() == ["model.norm.weight"]
