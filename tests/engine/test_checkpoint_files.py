"""What the files of a checkpoint hold, when they are written, and what becomes of one that cannot be."""

import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig

from burnish.engine.checkpoint import model_files, read_optimizer, saving, tensor_file
from burnish.engine.checkpoint.tensor_file import Spec, write_tensors
from burnish.model import lora
from burnish.utils.errors import CheckpointError
from tests.engine.engine_program import make_engine, tiny_config, train
from tests.engine.lora_program import log_probs, make_lora_engine
from tests.engine.lora_program import train as train_adapters

EVERYTHING = ("model", "optimizer", "extra", "hf_model")


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two results of `train` have the same metrics and weights to the bit."""
    return (
        a["metrics"] == b["metrics"]
        and a["updates"] == b["updates"]
        and all(torch.equal(weight, b["weights"][name]) for name, weight in a["weights"].items())
    )


def step(engine: Any) -> dict[str, Any]:
    """One step of training."""
    return train(engine, steps=1, micro_batch_size=4)


# ------------------------------------------------------------------------------------------------- safetensors


def test_any_tensors_are_read_back_by_safetensors(tmp_path: Path) -> None:
    tensors = {
        "byte": torch.arange(5, dtype=torch.uint8),
        "flag": torch.tensor([True, False]),
        "number": torch.tensor(2.5),
        "nothing": torch.empty(0, 4),
        "wide": torch.arange(3, dtype=torch.float64),
        "half": torch.arange(6).reshape(2, 3).to(torch.bfloat16),
        "turned": torch.arange(6.0).reshape(2, 3).T,
    }
    specs = {name: Spec.of(tensor) for name, tensor in tensors.items()}
    order = reversed(list(tensors.items()))
    write_tensors(tmp_path / "file", specs, order, {"said": "a word"})
    read = load_file(tmp_path / "file")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())
    with safe_open(tmp_path / "file", "pt") as opened:
        assert opened.metadata() == {"said": "a word"}


def test_a_file_that_lacks_what_was_announced_is_no_file(tmp_path: Path) -> None:
    specs = {"a": Spec(torch.float32, (2,)), "b": Spec(torch.float32, (2,))}
    with pytest.raises(ValueError, match="'b' was announced and did not come"):
        write_tensors(tmp_path / "file", specs, [("a", torch.zeros(2))], {})
    with pytest.raises(ValueError, match="'a' was announced as"):
        write_tensors(tmp_path / "file", specs, [("a", torch.zeros(3))], {})


# ------------------------------------------------------------------------------------------------------- models


def test_a_large_model_is_written_in_shards_that_transformers_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "MAX_SHARD_BYTES", 12_000)
    engine, other = make_engine(), make_engine(seed=3)
    step(engine)
    engine.save_checkpoint(tmp_path, EVERYTHING)
    for folder in (tmp_path, tmp_path / "huggingface"):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = {file.name for file in folder.glob("*.safetensors")}
        assert files == set(index["weight_map"].values())
        assert len(files) > 3
        assert all(sum(t.nbytes for t in load_file(folder / file).values()) <= 12_000 for file in files)
        assert index["metadata"]["total_size"] == sum(weight.nbytes for _, weight in engine.named_weights())
        plain = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
        assert all(torch.equal(weight, plain[name]) for name, weight in engine.named_weights())
    other.load_checkpoint(tmp_path)
    assert same(step(engine), step(other))


def tiny_experts() -> MixtralConfig:
    """A mixture of experts whose modules hold all experts in one tensor, and whose files each in one of its own."""
    return MixtralConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )


@pytest.mark.slow
def test_experts_are_written_as_transformers_writes_them_and_read_back(tmp_path: Path) -> None:
    engine, other = make_engine(config=tiny_experts()), make_engine(config=tiny_experts(), seed=3)  # type: ignore[arg-type]
    step(engine)
    engine.save_checkpoint(tmp_path / "ours")
    engine.module.model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() != {name for name, _ in engine.named_weights()}
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    other.load_checkpoint(tmp_path / "ours")
    assert same(step(engine), step(other))


def test_a_checkpoint_of_another_model_is_named(tmp_path: Path) -> None:
    make_engine(config=tiny_config(intermediate_size=64)).save_checkpoint(tmp_path, ("model",))
    with pytest.raises(CheckpointError, match=r"of another model: 'model\.layers\.0\.mlp\.\S+' has shape"):
        make_engine().load_checkpoint(tmp_path, ("model",))


# ----------------------------------------------------------------------------------------------------- contents


def test_extra_holds_every_generator_of_the_process(tmp_path: Path) -> None:
    engine = make_engine()
    step(engine)
    engine.save_checkpoint(tmp_path, ("extra",))
    assert [file.name for file in tmp_path.iterdir()] == ["extra"]

    def draw() -> tuple[Any, ...]:
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), np.random.randn(), random.random(), random.gauss()

    first = draw()
    assert draw() != first
    make_engine().load_checkpoint(tmp_path, ("extra",))
    assert draw() == first


def test_another_schedule_than_the_saved_one_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(lr_scheduler_type="cosine")
    step(engine)
    engine.save_checkpoint(tmp_path, ("extra",))
    make_engine(lr_scheduler_type="cosine").load_checkpoint(tmp_path, ("extra",))
    assert caplog.text == ""
    make_engine(lr=0.5).load_checkpoint(tmp_path, ("extra",))
    assert "was saved with a learning rate of 0.01 at step 1, and the schedule of this run has 0.5 there" in caplog.text


@pytest.mark.parametrize(
    ("saved", "wanted", "said"),
    [
        (("model", "extra"), ("model", "optimizer"), "no folder optimizer"),
        (("model", "optimizer"), ("model", "extra"), "no folder extra"),
        (("optimizer",), ("model",), r"no config\.json"),
        (("hf_model",), ("model",), "load 'hf_model' instead"),
        (("model",), ("hf_model",), "saved without 'hf_model'"),
    ],
)
def test_contents_that_are_not_there_are_named(
    tmp_path: Path, saved: tuple[str, ...], wanted: tuple[str, ...], said: str
) -> None:
    engine = make_engine()
    engine.save_checkpoint(tmp_path, saved)
    with pytest.raises(CheckpointError, match=said):
        engine.load_checkpoint(tmp_path, wanted)


@pytest.mark.parametrize("module", ["policy", pytest.param("value", marks=pytest.mark.slow)])
def test_the_hugging_face_folder_is_the_model_and_takes_no_room_beside_it(tmp_path: Path, module: str) -> None:
    engine = make_engine(module=module, dtype="bfloat16")
    step(engine)
    engine.save_checkpoint(tmp_path / "both", ("model", "hf_model"))
    engine.save_checkpoint(tmp_path / "alone", ("hf_model",))
    file = tmp_path / "both" / "model.safetensors"
    assert (tmp_path / "both" / "huggingface" / file.name).samefile(file)
    assert not (tmp_path / "alone" / file.name).exists()
    other = make_engine(module=module, dtype="bfloat16", seed=3)
    other.load_checkpoint(tmp_path / "alone", ("hf_model",))
    weights = dict(other.named_weights())
    assert all(torch.equal(weight, weights[name]) for name, weight in engine.named_weights())


def test_the_hugging_face_folder_of_adapters_is_base_and_adapters_in_the_compute_dtype(tmp_path: Path) -> None:
    engine = make_lora_engine(dtype="bfloat16")
    train_adapters(engine, 1, 2)
    engine.save_checkpoint(tmp_path / "saved", EVERYTHING)
    engine.export_merged(tmp_path / "exact")
    folder = tmp_path / "saved" / "huggingface"
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    merged, exact = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "exact"))
    assert all(torch.equal(weight, exact[name].bfloat16()) for name, weight in merged.items())
    assert any(not torch.equal(merged[name], weight) for name, weight in engine.named_weights() if name in merged)
    assert not any(lora.is_adapter_name(name) for name in merged)
    resumed = make_lora_engine(dtype="bfloat16", seed=4)
    resumed.load_checkpoint(tmp_path / "saved", EVERYTHING)
    assert torch.equal(log_probs(resumed), log_probs(engine))
    with pytest.raises(CheckpointError, match="base and adapters as one model"):
        resumed.load_checkpoint(tmp_path / "saved", ("hf_model",))


# ------------------------------------------------------------------------------------------------ old checkpoints


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_checkpoint_with_the_whole_state_in_one_file_still_loads(tmp_path: Path, dtype: str) -> None:
    engine, other = make_engine(dtype=dtype), make_engine(dtype=dtype, seed=3)
    step(engine)
    engine.save_checkpoint(tmp_path, ("model",))
    engine.save_checkpoint(tmp_path / "new", ("optimizer",))
    old = read_optimizer(tmp_path / "new")
    for entry in old.values():
        if "master weight" in entry:
            entry["master"] = entry.pop("master weight")
    torch.save(old, tmp_path / "optimizer.pt")
    # It has no generators, which nobody asked it to have.
    other.load_checkpoint(tmp_path, ("model", "optimizer", "extra"))
    assert same(step(engine), step(other))
    (tmp_path / "optimizer.pt").write_bytes(b"cut short")
    with pytest.raises(CheckpointError, match="cannot be read"):
        other.load_checkpoint(tmp_path)


# ------------------------------------------------------------------------------------------------ in the background


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Files of tensors are written only when it is set."""
    opened = threading.Event()
    plain = saving.write_tensors

    def write(*arguments: Any) -> None:
        assert opened.wait(60)
        plain(*arguments)

    monkeypatch.setattr(saving, "write_tensors", write)
    return opened


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_training_goes_on_while_the_state_before_is_written(tmp_path: Path, dtype: str, gate: threading.Event) -> None:
    engine, other = make_engine(dtype=dtype), make_engine(dtype=dtype, seed=3)
    step(engine)
    engine.save_checkpoint(tmp_path, EVERYTHING, blocking=False)
    assert not engine.checkpoint_written(wait=False)
    expected = step(engine)
    assert not (tmp_path / "model.safetensors").exists()
    gate.set()
    assert engine.checkpoint_written(wait=True)
    assert engine.checkpoint_written(wait=False)
    other.load_checkpoint(tmp_path, EVERYTHING)
    assert same(step(other), expected)


def test_a_second_save_waits_for_the_first_and_takes_its_memory(tmp_path: Path, gate: threading.Event) -> None:
    engine = make_engine()
    step(engine)
    engine.save_checkpoint(tmp_path / "first", blocking=False)
    memory = engine._checkpoint._memory
    held = memory.num_bytes
    assert held > 0
    threading.Timer(0.2, gate.set).start()
    engine.save_checkpoint(tmp_path / "second", blocking=False)
    assert (tmp_path / "first" / "model.safetensors").exists()
    assert engine.checkpoint_written(wait=True)
    assert memory.num_bytes == held
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def full_disk(*unused: Any) -> int:
    raise OSError(28, "No space left on device")


def test_what_cannot_be_written_in_the_background_is_raised_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    step(engine)
    monkeypatch.setattr(tensor_file.os, "pwrite", full_disk)
    engine.save_checkpoint(tmp_path / "first", blocking=False)
    with pytest.raises(
        CheckpointError, match=r"first could not be written: the disk is full .*trainer\.max_actor_ckpt"
    ):
        engine.checkpoint_written(wait=True)
    assert engine.checkpoint_written(wait=True)
    engine.save_checkpoint(tmp_path / "second", blocking=False)
    with pytest.raises(CheckpointError, match="second could not be written"):
        engine.save_checkpoint(tmp_path / "third", blocking=False)
    monkeypatch.undo()
    engine.save_checkpoint(tmp_path / "third")
    make_engine().load_checkpoint(tmp_path / "third")


def test_every_file_and_folder_is_on_the_disk_when_a_save_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    plain = tensor_file.os.fsync

    def fsync(descriptor: int) -> None:
        synced.add(str(Path(f"/proc/self/fd/{descriptor}").resolve()))
        plain(descriptor)

    monkeypatch.setattr(tensor_file.os, "fsync", fsync)
    engine = make_engine()
    step(engine)
    engine.save_checkpoint(tmp_path / "saved", EVERYTHING)
    written = [tmp_path / "saved", *(tmp_path / "saved").rglob("*")]
    # A link is the same file under another name.
    inodes = {Path(name).stat().st_ino for name in synced if Path(name).exists()}
    assert len(written) > 10
    assert all(path.stat().st_ino in inodes for path in written)
