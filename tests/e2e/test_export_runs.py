"""Checkpoints that one and two ranks have written, whole models and adapters, become folders that transformers loads."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

from burnish.trainer.offline.evaluate import EvalOptions, evaluate
from burnish.trainer.offline.export import ExportOptions, export
from burnish.trainer.offline.settings import AskOptions
from tests.e2e.runs import TINY, tiny_run

SAVED = ["trainer.total_training_steps=1", "trainer.save_freq=1", "trainer.test_freq=1"]
RANKS = {
    "one": [],
    "two-sharded": ["trainer.controller=ray", "trainer.n_gpus_per_node=2"],
    "two-replicated": [
        "trainer.controller=ray",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=1",
        "critic.fsdp_config.fsdp_size=1",
    ],
}
LORA = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=0.01"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_actor_and_critic_of_ppo_are_exported_and_measured_as_they_were_validated(tmp_path, ranks):
    run = tmp_path / "run"
    tiny_run(run, *SAVED, "algorithm.adv_estimator=gae", *RANKS[ranks])
    export(ExportOptions(checkpoint=str(run), out=str(tmp_path / "actor")))
    exported = load_file(tmp_path / "actor" / "model.safetensors")
    saved = load_file(run / "global_step_1" / "actor" / "model.safetensors")
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in saved.items())
    export(ExportOptions(checkpoint=str(run), out=str(tmp_path / "critic"), role="critic"))
    assert AutoModel.from_pretrained(tmp_path / "critic").config.model_type == "llama"
    ask = AskOptions(data=[str(TINY / "data" / "test.jsonl")], limit=16, device="cpu", dtype="float32")
    result, _ = evaluate(EvalOptions(models=[str(tmp_path / "actor"), str(run)], ask=ask))
    validated = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    for model in result["models"]:
        value = model["metrics"]["mean@1"]["value"]
        assert value == pytest.approx(validated["val-core/burnish/arithmetic/acc/mean@1"])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["one", "two-sharded"])
def test_adapters_of_a_run_are_exported_merged_and_apart(tmp_path, ranks):
    run = tmp_path / "run"
    tiny_run(run, *SAVED, *LORA, *RANKS[ranks])
    export(ExportOptions(checkpoint=str(run), out=str(tmp_path / "merged")))
    export(ExportOptions(checkpoint=str(run), out=str(tmp_path / "adapter"), lora="adapter"))
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
        # transformers puts adapter and base together by itself.
        apart = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")(ids).logits
        base = AutoModelForCausalLM.from_pretrained(TINY / "model")(ids).logits
    assert torch.allclose(merged, apart, atol=1e-4)
    assert not torch.allclose(merged, base, atol=1e-3)
