"""Adapters alone are trained: with peft's gradient, on any number of ranks, on a base that never changes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from burnish.model import lora
from burnish.model.attention import plain_attention
from burnish.model.load import build_causal_lm
from burnish.utils.errors import CheckpointError
from tests.engine.engine_program import make_batch, make_engine, policy_loss, run_ranks, tiny_config
from tests.engine.lora_program import PROGRAM, base_fingerprints, gradients, log_probs, make_lora_engine, train
from tests.engine.matrix_program import widen_norms


def test_gradients_are_those_of_peft_on_plain_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    widen_norms(monkeypatch)
    engine = make_lora_engine(dtype="float64", target_modules=["q_proj", "v_proj", "down_proj"])
    train(engine, 1, 2)  # Away from B = 0, where A has no gradient.
    theirs = get_peft_model(
        build_causal_lm(tiny_config(), torch.float64),
        LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"),
        autocast_adapter_dtype=False,
    )
    weights = dict(engine.named_weights())
    parameters = {
        lora.hf_name(name.removeprefix("base_model.model.")): parameter
        for name, parameter in theirs.named_parameters()
        if lora.is_adapter_name(name)
    }
    assert set(parameters) == {name for name in weights if lora.is_adapter_name(name)}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    batch = make_batch(seed=3, dtype=torch.float64)
    rows = batch.tensors
    outputs: dict[str, list[Tensor]] = {"log_probs": [], "entropy": []}
    width = rows["responses"].shape[1]
    with plain_attention(theirs.base_model.model, "sdpa"):
        for ids, mask, responses, response_mask in zip(
            rows["input_ids"], rows["attention_mask"], rows["responses"], rows["response_mask"], strict=True
        ):
            logits = theirs(ids[mask.bool()][None]).logits[0]
            length = int(response_mask.sum())
            all_log_probs = logits.log_softmax(-1)[-length - 1 : -1]
            picked = all_log_probs.gather(1, responses[:length, None])[:, 0]
            entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
            for name, values in (("log_probs", picked), ("entropy", entropy)):
                outputs[name].append(torch.nn.functional.pad(values, (0, width - length)))
    info = engine.global_batch_info(batch)
    loss, _ = policy_loss()({name: torch.stack(values) for name, values in outputs.items()}, batch, info)
    loss.backward()
    ours = {lora.hf_name(name).removeprefix("model."): value for name, value in gradients(engine, 3).items()}
    assert set(ours) == set(parameters)
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        assert float(parameter.grad.norm()) > 1e-8
        assert float((ours[name] - parameter.grad).norm() / parameter.grad.norm()) < 1e-10, name


@pytest.mark.parametrize("module", ["policy", "value"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_base_stays_and_resuming_goes_on_as_if_it_had_not_stopped(tmp_path: Path, dtype: str, module: str) -> None:
    engine = make_lora_engine(dtype=dtype, module=module)
    before = base_fingerprints(engine)
    start = log_probs(engine)
    train(engine, 1, 2)
    assert base_fingerprints(engine) == before
    assert not torch.equal(log_probs(engine), start)
    if module == "policy":
        with engine.adapters_off():
            assert torch.equal(log_probs(engine), start)
    engine.save_checkpoint(tmp_path)
    resumed = make_lora_engine(dtype=dtype, module=module, seed=4)
    resumed.load_checkpoint(tmp_path)
    a, b = (train(each, 3, 4) for each in (engine, resumed))
    assert all(torch.equal(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x)
    weights = dict(resumed.named_weights())
    assert all(torch.equal(weight, weights[name]) for name, weight in engine.named_weights())


def test_only_adapters_have_masters_moments_and_gradients() -> None:
    engine = make_lora_engine(dtype="bfloat16")
    train(engine, 1, 1)
    masters = engine._layout.masters()
    assert set(masters) == {name for name, _ in engine.module.named_parameters() if lora.is_adapter_name(name)}
    assert {master.dtype for master in masters.values()} == {torch.float32}
    assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.bfloat16}
    frozen = [p for name, p in engine.module.named_parameters() if not lora.is_adapter_name(name)]
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in frozen)
    names = {name.removeprefix("exp_avg of ") for name in engine._optimizer.moments() if name.startswith("exp_avg of")}  # type: ignore[union-attr]
    assert names == set(masters)


def test_a_checkpoint_is_an_adapter_that_peft_loads(tmp_path: Path) -> None:
    build_causal_lm(tiny_config(), torch.float32).save_pretrained(tmp_path / "base")
    engine = make_lora_engine(path=str(tmp_path / "base"))
    train(engine, 1, 3)
    engine.save_checkpoint(tmp_path / "checkpoint")
    files = {file.name for file in (tmp_path / "checkpoint").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "optimizer"}
    config = json.loads((tmp_path / "checkpoint" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "checkpoint")).merge_and_unload()
    by_transformers = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    ids = torch.tensor([[3, 9, 4, 21]])
    with torch.no_grad(), plain_attention(engine.module.model):
        ours = engine.module.model(ids, use_cache=False).logits
        torch.testing.assert_close(ours, theirs(ids).logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours, by_transformers(ids).logits, atol=1e-5, rtol=1e-5)
    started = make_lora_engine(
        path=str(tmp_path / "base"), lora_rank=0, lora_adapter_path=str(tmp_path / "checkpoint"), trained=False
    )
    assert torch.equal(log_probs(started), log_probs(engine))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_merged_export_is_base_plus_adapter_once_and_changes_nothing(tmp_path: Path, dtype: str) -> None:
    """In bf16 most of a small adapter would be rounded away; the base is what the engine computes with."""
    engine = make_lora_engine(dtype=dtype, optim={"lr": 1e-5})
    train(engine, 1, 3)
    before = {name: weight.clone() for name, weight in engine.named_weights()}
    engine.export_merged(tmp_path)
    after = dict(engine.named_weights())
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert merged.dtype == torch.float32
    assert not (tmp_path / "adapter_config.json").exists()
    masters = {lora.hf_name(name).removeprefix("model."): m for name, m in engine._layout.masters().items()}
    changed = 0
    for name, weight in merged.named_parameters():
        expected = before[name].double()
        stem = name.removesuffix(".weight")
        if f"{stem}.lora_A.weight" in masters:
            a, b = (masters[f"{stem}.{part}.weight"].double() for part in ("lora_A", "lora_B"))
            delta = 6 / 3 * b @ a
            expected = expected + delta
            assert float(delta.abs().max()) > 0
            changed += int((weight != before[name].float()).sum())
        torch.testing.assert_close(weight.double(), expected, atol=1e-8, rtol=1e-6)
    assert changed > 0


def test_another_kind_of_checkpoint_is_refused(tmp_path: Path) -> None:
    whole, adapters = make_engine(), make_lora_engine()
    whole.save_checkpoint(tmp_path / "whole")
    adapters.save_checkpoint(tmp_path / "adapters")
    with pytest.raises(CheckpointError, match="holds a whole model, but this run trains an adapter"):
        adapters.load_checkpoint(tmp_path / "whole")
    with pytest.raises(CheckpointError, match="holds an adapter .* but this run trains the whole model"):
        whole.load_checkpoint(tmp_path / "adapters")
    with pytest.raises(CheckpointError, match="rank=3, and this run has 4"):
        make_lora_engine(lora_rank=4).load_checkpoint(tmp_path / "adapters")
    with pytest.raises(CheckpointError, match="alpha=6, and this run has 12"):
        make_lora_engine(lora_alpha=12).load_checkpoint(tmp_path / "adapters")
    with pytest.raises(CheckpointError, match="of other layers"):
        make_lora_engine(target_modules=["q_proj"]).load_checkpoint(tmp_path / "adapters")


def test_an_adapter_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    engine = make_lora_engine()
    name, master = next(iter(engine._layout.masters().items()))
    master.view(-1)[0] = float("nan")
    assert lora.hf_name(name).removeprefix("model.") in engine.non_finite_weights()
    with pytest.raises(CheckpointError, match="lora_A"):
        engine.save_checkpoint(tmp_path / "broken")
    assert not (tmp_path / "broken").exists()


CASES: list[dict[str, Any]] = [
    {"name": "sharded", "dtype": "float64"},
    {"name": "uneven", "dtype": "float64", "uneven": True, "engine": {"reshard_after_forward": False}},
    {"name": "replicated", "dtype": "float64", "fsdp_size": 1},
    {"name": "value", "dtype": "float64", "module": "value"},
    {"name": "ulysses", "dtype": "float64", "engine": {"ulysses_sequence_parallel_size": 2}},
    {"name": "bfloat16", "dtype": "bfloat16"},
]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    out = tmp_path_factory.mktemp("lora")
    build_causal_lm(tiny_config(), torch.float64).save_pretrained(out / "base")
    # From a folder one rank reads the base for all, and the adapters beside it are everybody's own.
    cases = [*CASES, {"name": "from_folder", "dtype": "float64", "path": str(out / "base")}]
    return run_ranks(out, cases, program=PROGRAM), out


@pytest.mark.parametrize("name", ["sharded", "uneven", "replicated", "value", "ulysses", "from_folder"])
def test_two_ranks_have_the_gradients_of_one(two_ranks: tuple[list[dict[str, Any]], Path], name: str) -> None:
    results, _ = two_ranks
    engine = make_lora_engine(dtype="float64", module="value" if name == "value" else "policy")
    alone = train(engine, 1, 3)
    for rank in results:
        for ours, theirs in zip(alone, rank[name]["gradients"], strict=True):
            a, b = (torch.cat([grad.flatten() for grad in each.values()]) for each in (ours, theirs))
            assert ours.keys() == theirs.keys()
            assert float((a - b).norm() / a.norm()) < 1e-10


@pytest.mark.parametrize("case", [*CASES, {"name": "from_folder"}], ids=lambda case: case["name"])
def test_on_two_ranks_the_base_stays_and_training_resumes(
    two_ranks: tuple[list[dict[str, Any]], Path], case: dict[str, Any]
) -> None:
    results, out = two_ranks
    for rank in results:
        result = rank[case["name"]]
        assert result["base_stays"]
        assert result["resumed"]
        if case.get("module") != "value":
            # Nothing of the adapters shows at the start, nor when they are off.
            assert torch.equal(result["reference"], result["start"])
        assert not torch.equal(result["log_probs"], result["start"])
        names = list(result["weights"])
        assert names[-len(result["only_adapters"]) :] == result["only_adapters"]
        assert all(lora.is_adapter_name(name) for name in result["only_adapters"])
    # What two ranks have saved, one goes on from.
    keys = {key: value for key, value in case.items() if key in ("dtype", "module")} or {"dtype": "float64"}
    alone = make_lora_engine(**keys, seed=7)
    alone.load_checkpoint(out / case["name"])
    torch.testing.assert_close(
        log_probs(alone),
        results[0][case["name"]]["log_probs"],
        atol=2e-2 if case.get("dtype") == "bfloat16" else 1e-6,
        rtol=0,
    )
    merged = load_file(out / f"{case['name']}_merged" / "model.safetensors")
    assert not any(lora.is_adapter_name(name) for name in merged)
    wide = torch.float64 if keys["dtype"] == "float64" else torch.float32
    assert {tensor.dtype for tensor in merged.values()} == {wide}
