"""What `burnish export` writes is the model of the checkpoint, as other libraries load it."""

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from burnish.config.actor_rollout_ref import HFModelConfig
from burnish.model import lora
from burnish.model.load import load_causal_lm
from burnish.trainer.offline import export as exporting
from burnish.trainer.offline.export import ExportOptions, export
from burnish.utils.errors import ConfigError, ModelError, ResourceError

IDS = torch.tensor([[1, 5, 9, 13, 200, 7]])


def logits(folder: object, **how: object) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(str(folder), **how)(IDS).logits


@contextmanager
def adapted_by_peft(adapter: Path, base: str) -> Iterator[torch.nn.Module]:
    """The adapters on their base, put together by peft itself."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter))


def run_export(checkpoint: Path | str, out: Path, **how: object) -> dict:
    return export(ExportOptions(checkpoint=str(checkpoint), out=str(out), **how))  # type: ignore[arg-type]


@pytest.fixture
def adapter(tmp_path: Path, tiny_model_path: str) -> Path:
    """Adapters that change what the tiny model computes, in peft's format."""
    model = load_causal_lm(tiny_model_path, attn=False)
    settings = HFModelConfig(lora_rank=2, lora_alpha=8, target_modules=["all-linear"])
    lora.add_adapters(model, settings, tiny_model_path)
    torch.manual_seed(0)
    weights = {lora.hf_name(name): torch.randn(part.shape) * 0.1 for name, part in lora.adapter_parameters(model)}
    folder = tmp_path / "adapter"
    lora.save_adapters(model, weights, folder)
    return folder


def test_weights_are_cast_and_the_configuration_says_so(tiny_model_path: str, tmp_path: Path) -> None:
    facts = run_export(tiny_model_path, tmp_path / "out", dtype="bf16", max_shard_size="400KB")
    files = [name for name in facts["files"] if name.endswith(".safetensors")]
    assert len(files) > 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    weights = {name: tensor for file in files for name, tensor in load_file(tmp_path / "out" / file).items()}
    stored = load_file(f"{tiny_model_path}/model.safetensors")
    assert all(torch.equal(weights[name], stored[name].bfloat16()) for name in stored)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_adapters_are_merged_into_one_model(adapter: Path, tmp_path: Path, tiny_model_path: str) -> None:
    facts = run_export(adapter, tmp_path / "out")
    assert facts["num_parameters"] == sum(
        parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(tiny_model_path).parameters()
    )
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    with torch.no_grad(), adapted_by_peft(adapter, tiny_model_path) as model:
        expected = model(IDS).logits
    merged = logits(tmp_path / "out")
    assert torch.allclose(merged, expected, atol=1e-4)
    assert (merged - logits(tiny_model_path)).abs().max() > 0.1


def test_what_the_run_changed_in_the_base_is_in_the_merged_model(
    adapter: Path, tmp_path: Path, tiny_model_path: str
) -> None:
    trained = tmp_path / "run" / "global_step_1" / "actor"
    shutil.copytree(adapter, trained)
    (trained.parent / "trainer_state.json").write_text('{"global_steps": 1}')
    settings = "actor_rollout_ref: {model: {override_config: {max_position_embeddings: 128}}}"
    (tmp_path / "run" / "config.yaml").write_text(settings)
    run_export(tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 128


def test_adapters_are_kept_apart_where_that_is_wanted(adapter: Path, tmp_path: Path, tiny_model_path: str) -> None:
    facts = run_export(adapter, tmp_path / "out", lora="adapter", dtype="bf16")
    assert (facts["holds"], facts["dtype"]) == ("adapter", "bfloat16")
    kept, given = (load_file(folder / lora.WEIGHTS_FILE) for folder in (tmp_path / "out", adapter))
    assert kept.keys() == given.keys()
    assert all(torch.equal(kept[name], tensor.bfloat16()) for name, tensor in given.items())
    assert (tmp_path / "out" / "tokenizer.json").exists()
    with pytest.raises(ConfigError, match="holds a whole model, no adapter"):
        run_export(tiny_model_path, tmp_path / "other", lora="adapter")


def test_a_critic_becomes_its_backbone_and_its_value_head(tmp_path: Path, tiny_model_path: str) -> None:
    critic = tmp_path / "run" / "global_step_3" / "critic"
    backbone = AutoModel.from_pretrained(tiny_model_path)
    backbone.save_pretrained(critic)
    head = {"value_head.weight": torch.randn(1, backbone.config.hidden_size), "value_head.bias": torch.randn(1)}
    save_file(head, critic / "value_head.safetensors")
    (critic.parent / "trainer_state.json").write_text('{"global_steps": 3}')
    facts = run_export(tmp_path / "run", tmp_path / "out", role="critic", dtype="bf16")
    assert (facts["holds"], facts["step"]) == ("critic", 3)
    written = load_file(tmp_path / "out" / "value_head.safetensors")
    assert all(torch.equal(written[name], tensor.bfloat16()) for name, tensor in head.items())
    loaded = AutoModel.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(loaded.norm.weight, backbone.norm.weight.bfloat16())
    # Whoever goes on training from it finds the head.
    from burnish.engine.checkpoint import has_value_head

    assert has_value_head(str(tmp_path / "out"))


def test_a_checkpoint_of_verl_becomes_a_folder_like_any_other(tmp_path: Path, tiny_model_path: str) -> None:
    checkpoint = tmp_path / "theirs" / "global_step_7"
    actor = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    critic = AutoModelForTokenClassification.from_pretrained(tiny_model_path, num_labels=1)
    with torch.no_grad():
        actor.model.norm.weight.mul_(1.5)
    for name, model in (("actor", actor), ("critic", critic)):
        (checkpoint / name / "huggingface").mkdir(parents=True)
        torch.save(model.state_dict(), checkpoint / name / "model_world_size_1_rank_0.pt")
        model.config.save_pretrained(checkpoint / name / "huggingface")
        AutoTokenizer.from_pretrained(tiny_model_path).save_pretrained(checkpoint / name / "huggingface")
    facts = run_export(tmp_path / "theirs", tmp_path / "out")
    assert (facts["step"], facts["holds"]) == (7, "model")
    with torch.no_grad():
        assert torch.equal(logits(tmp_path / "out"), actor.eval()(IDS).logits)
    assert run_export(checkpoint, tmp_path / "value", role="critic")["holds"] == "critic"
    head = load_file(tmp_path / "value" / "value_head.safetensors")
    assert torch.equal(head["value_head.weight"], critic.score.weight)
    assert torch.equal(AutoModel.from_pretrained(tmp_path / "value").norm.weight, critic.model.norm.weight)


def test_nothing_is_overwritten_unless_that_is_said_and_it_is_a_model(tiny_model_path: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="something in this folder"):
        run_export(tiny_model_path, out)
    with pytest.raises(ConfigError, match="no model, so --overwrite leaves it alone"):
        run_export(tiny_model_path, out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"
    model = tmp_path / "model"
    shutil.copytree(tiny_model_path, model)
    with pytest.raises(ConfigError, match="where the model is read from"):
        run_export(model, model, overwrite=True)
    with pytest.raises(ConfigError, match="where the model is read from"):
        run_export(model, model / "exported")
    run_export(tiny_model_path, model, dtype="bf16", overwrite=True)
    assert AutoModelForCausalLM.from_pretrained(model, dtype="auto").dtype == torch.bfloat16
    (model / "optimizer").mkdir()
    with pytest.raises(ConfigError, match="holds others"):
        run_export(tiny_model_path, model, overwrite=True)
    (model / "optimizer").rmdir()
    (model / "results.csv").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds others \(results.csv\)"):
        run_export(tiny_model_path, model, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_the_base_of_an_adapter_is_not_written_over(adapter: Path, tmp_path: Path, tiny_model_path: str) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model_path, base)
    with pytest.raises(ConfigError, match="where the model is read from"):
        run_export(adapter, base, base=str(base), overwrite=True)


def test_what_a_killed_export_had_set_aside_comes_back(tiny_model_path: str, tmp_path: Path) -> None:
    shutil.copytree(tiny_model_path, tmp_path / ".out.old")
    run_export(tiny_model_path, tmp_path / "out", dtype="bf16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_failure_leaves_what_was_there_and_no_half_a_folder(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run_export(tiny_model_path, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def write_another(loaded: object, folder: Path, options: ExportOptions) -> None:
        written(loaded, folder, options)  # type: ignore[arg-type]
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"] = weights["model.norm.weight"] * 1.001
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    written = exporting._write
    monkeypatch.setattr(exporting, "_write", write_another)
    with pytest.raises(ModelError, match="is not the model that was exported: 1 weights differ, 'model.norm.weight'"):
        run_export(tiny_model_path, out, overwrite=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_number_that_float16_does_not_hold_is_said(tiny_model_path: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_path, model)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] = 1e6
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="In float16.*'model.norm.weight' first.*Export in bf16"):
        run_export(model, tmp_path / "out", dtype="fp16")
    run_export(model, tmp_path / "out", dtype="bf16")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="the checkpoint is broken"):
        run_export(model, tmp_path / "broken")


def test_wrong_requests_are_sentences(tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--dtype=int4"):
        run_export(tiny_model_path, tmp_path / "out", dtype="int4")
    with pytest.raises(ConfigError, match="--lora=both"):
        run_export(tiny_model_path, tmp_path / "out", lora="both")
    with pytest.raises(ConfigError, match="--max-shard-size=huge"):
        run_export(tiny_model_path, tmp_path / "out", max_shard_size="huge")
    model = tmp_path / "model"
    shutil.copytree(tiny_model_path, model, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ModelError, match="no tokenizer"):
        run_export(model, tmp_path / "out")
    monkeypatch.setattr(exporting.shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ResourceError, match="0.00 GB left"):
        run_export(tiny_model_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
