"""Whole runs that train an adapter: against the base as reference, resumed bit for bit, and on two sharded workers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.runs import TINY, logged, tiny_run

LORA = (
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=16",
    "actor_rollout_ref.actor.optim.lr=0.01",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
)


def test_a_run_moves_away_from_the_base_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    tiny_run(whole, *LORA, "trainer.save_freq=2")
    lines = logged(whole)
    kl = [line["actor/kl_loss"] for line in lines]
    # The adapter starts at nothing, so that the policy is its reference; then it leaves it.
    assert abs(kl[0]) < 1e-6 < kl[1] < kl[2]
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    folder = whole / "global_step_2" / "actor"
    of_tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    files = {file.name for file in folder.iterdir()} - of_tokenizer
    assert files == {"adapter_config.json", "adapter_model.safetensors", "optimizer", "extra"}
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(TINY / "model")
    base = AutoModelForCausalLM.from_pretrained(TINY / "model").state_dict()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in loaded.state_dict().items():
        if "lora" not in name:
            assert torch.equal(tensor, base[name.replace(".base_layer", "")])
    half = tmp_path / "half"
    tiny_run(half, *LORA, "trainer.save_freq=2", "trainer.total_training_steps=2")
    tiny_run(half, *LORA, "trainer.save_freq=2")
    assert logged(half)[-1] == lines[-1]


@pytest.mark.slow
def test_two_sharded_workers_train_the_adapter_of_one(tmp_path: Path) -> None:
    last = {}
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        tiny_run(
            folder,
            *LORA,
            f"trainer.n_gpus_per_node={workers}",
            "trainer.save_freq=3",
            *(("trainer.controller=ray",) if workers > 1 else ()),
        )
        last[workers] = load_file(folder / "global_step_3" / "actor" / "adapter_model.safetensors")
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        copied = [json.loads(line).get("perf/rollout/weight_copy_gib", 0.0) for line in lines]
        # Shared storage copies nothing; a copy gets the adapters alone.
        assert all(value == 0 for value in copied) if workers == 1 else 0 < max(copied) < 0.001
    for name, tensor in last[1].items():
        torch.testing.assert_close(tensor, last[2][name], atol=2e-3, rtol=0)
