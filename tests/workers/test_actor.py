"""What the actor's worker gives the driver: greedy responses, and what the pass before the update computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from burnish.config import load_config
from burnish.protocol import DataProto
from burnish.utils.errors import CheckpointError
from burnish.workers import ActorRolloutRefWorker


def worker_of(model: str, *overrides: str) -> ActorRolloutRefWorker:
    config = load_config(
        [
            f"actor_rollout_ref.model.path={model}",
            "data.train_files=unused.jsonl",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=2",
            "data.max_prompt_length=8",
            "data.max_response_length=6",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32",
            "actor_rollout_ref.rollout.ignore_eos=true",
            *(f"actor_rollout_ref.{override}" for override in overrides),
        ]
    )
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, "actor_rollout", "cpu", 1, 0, None)
    worker.init_model()
    return worker


def prompts(**meta_info: Any) -> DataProto:
    ids = torch.tensor([[5, 6, 7], [8, 9, 10], [11, 12, 13]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(-1) - 1},
        non_tensors={"uid": ["a", "b", "c"], "sample_index": [0, 0, 0]},
        meta_info=meta_info,
    )


def logits_of(model: str, batch: DataProto) -> torch.Tensor:
    """Of each response token, by transformers."""
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(model)(batch.tensors["input_ids"]).logits[:, 2:-1]


def test_greedy_responses_depend_on_no_setting_of_sampling(tiny_model_path: str) -> None:
    hot = worker_of(
        tiny_model_path, "rollout.temperature=5.0", "rollout.top_p=0.9", "rollout.top_k=4", "rollout.seed=3"
    )
    plain = worker_of(tiny_model_path)
    greedy = hot.generate_sequences(prompts(greedy=True))
    assert torch.equal(greedy.tensors["responses"], plain.generate_sequences(prompts(greedy=True)).tensors["responses"])
    # Validation is greedy by default.
    validated = hot.generate_sequences(prompts(validate=True))
    for key in ("responses", "response_mask", "rollout_log_probs"):
        assert torch.equal(greedy.tensors[key], validated.tensors[key])
    assert not torch.equal(greedy.tensors["responses"], hot.generate_sequences(prompts()).tensors["responses"])


def test_a_greedy_token_is_the_most_likely_one(tiny_model_path: str) -> None:
    worker = worker_of(tiny_model_path, "rollout.temperature=2.0")
    batch = worker.generate_sequences(prompts(greedy=True))
    assert batch.tensors["response_mask"].all()
    assert torch.equal(logits_of(tiny_model_path, batch).argmax(-1), batch.tensors["responses"])


@pytest.mark.parametrize("asked", [False, True])
def test_squared_probabilities_come_with_the_log_probs_where_asked_for(tiny_model_path: str, asked: bool) -> None:
    worker = worker_of(tiny_model_path, f"actor.calculate_sum_pi_squared={asked}", "rollout.temperature=0.7")
    batch = worker.generate_sequences(prompts())
    outputs = worker.compute_log_prob(batch)
    assert set(map(str, outputs.tensors.keys())) == {"old_log_probs"} | ({"sum_pi_squared"} if asked else set())
    if asked:
        expected = (logits_of(tiny_model_path, batch) / 0.7).softmax(-1).square().sum(-1)
        torch.testing.assert_close(outputs.tensors["sum_pi_squared"], expected, atol=1e-5, rtol=0)


def test_a_model_that_is_not_finite_is_not_saved(tiny_model_path: str, tmp_path: Path) -> None:
    worker = worker_of(tiny_model_path)
    name, weight = next(iter(worker.engine.named_weights()))
    weight[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=name):
        worker.save_checkpoint(str(tmp_path / "actor"))
    assert not (tmp_path / "actor").exists()
