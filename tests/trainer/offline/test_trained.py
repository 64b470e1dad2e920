"""A run's checkpoint: asked, measured and exported, it is the policy that the run validated."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from burnish.trainer.offline.evaluate import EvalOptions, evaluate
from burnish.trainer.offline.export import ExportOptions, export
from burnish.trainer.offline.proof import outputs_of
from burnish.trainer.offline.settings import AskOptions
from tests.trainer.offline.asking import CPU, IN_THIS_PROCESS, answers


def outputs_at(folder: object) -> torch.Tensor:
    return outputs_of(AutoModelForCausalLM.from_pretrained(str(folder)))


def validation(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "validation" / "1.jsonl").read_text().splitlines()]


def last_metrics(run: Path) -> dict[str, float]:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


def test_a_checkpoint_answers_as_in_its_run_s_validation(trained: Path, test_data: str) -> None:
    rows = answers(trained, data=[test_data], limit=16)
    validated = validation(trained)
    assert len(rows) == len(validated) == 32
    for row, logged in zip(rows, validated, strict=True):
        assert (row["uid"], row["finish_reason"]) == (logged["uid"], logged["finish_reason"])
        # A dump keeps special tokens; reward functions and these lines have none.
        assert row["response"] == logged["response"].removesuffix("<|end|>")
    # A line is its row of the data with what came of it, so that the file is data again.
    first = json.loads(Path(test_data).read_text().splitlines()[0])
    assert {key: rows[0][key] for key in first} == first
    assert [row["sample_index"] for row in rows[:4]] == [0, 1, 0, 1]


def test_it_is_measured_as_in_its_run_s_validation(trained: Path, test_data: str) -> None:
    options = EvalOptions(models=[str(trained)], ask=AskOptions(data=[test_data], limit=16, **CPU), keeps_rows=True)
    result, rows = evaluate(options)
    (model,) = result["models"]
    assert (result["n"], result["sampling"]["temperature"], model["step"]) == (2, 0.7, 1)
    logged = last_metrics(trained)
    assert model["metrics"]["mean@2"]["value"] == pytest.approx(logged["val-core/burnish/arithmetic/acc/mean@2"])
    assert [row["score"] for row in rows] == [row["score"] for row in validation(trained)]
    assert model["metrics"]["mean@2"]["low"] < model["metrics"]["mean@2"]["value"] < model["metrics"]["mean@2"]["high"]
    assert model["data_sources"]["burnish/arithmetic"]["metrics"] == model["metrics"]
    json.dumps(result)


def test_two_models_are_asked_alike_and_compared_prompt_by_prompt(
    trained: Path, tiny_model_path: str, test_data: str, tmp_path: Path
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def length(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': len(solution_str) / 7, 'pred': solution_str, 'acc': solution_str == ground_truth}\n"
    )
    ask = AskOptions(data=[test_data], n=4, limit=24, reward=f"{reward}:length", overrides=IN_THIS_PROCESS, **CPU)
    result, _ = evaluate(EvalOptions(models=[tiny_model_path, str(trained)], ask=ask, sizes=[1, 3], confidence=0.9))
    base, checkpoint = result["models"]
    # The run's way of validating holds for the model that has no run, too.
    assert result["sampling"]["temperature"] == 0.7
    assert set(base["metrics"]) == {"mean@4", "best@4", "pass@1", "pass@3", "maj@3"}
    for name, found in result["comparison"]["metrics"].items():
        one, other = (model["metrics"][name]["value"] for model in (base, checkpoint))
        assert (found["first"], found["second"]) == (pytest.approx(one), pytest.approx(other))
        assert found["difference"] == pytest.approx(other - one)
        assert found["num_better"] + found["num_worse"] + found["num_equal"] == 24
        assert 0 < found["p_value"] <= 1
    # The same seeds: a model beside itself never differs.
    same, _ = evaluate(
        EvalOptions(models=[str(trained), str(trained)], ask=AskOptions(data=[test_data], limit=4, **CPU))
    )
    assert all(found["num_equal"] == 4 for found in same["comparison"]["metrics"].values())


def test_a_run_becomes_a_folder_that_transformers_loads(trained: Path, tmp_path: Path, tiny_model_path: str) -> None:
    facts = export(ExportOptions(checkpoint=str(trained), out=str(tmp_path / "out")))
    actor = trained / "global_step_1" / "actor"
    assert (facts["step"], facts["holds"], facts["dtype"], facts["tied_head"]) == (1, "model", "float32", True)
    assert torch.equal(outputs_at(tmp_path / "out"), outputs_at(actor))
    assert not torch.equal(outputs_at(tmp_path / "out"), outputs_at(tiny_model_path)), (
        "the run has not changed the model"
    )
    # The tied head is stored once, and no trace of the run is left.
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(facts["files"]) == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert not any("optimizer" in name or "extra" in name for name in facts["files"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "1+1="}]
    theirs = AutoTokenizer.from_pretrained(tiny_model_path).apply_chat_template(messages, tokenize=False)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == theirs
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == tokenizer.eos_token_id
