"""What the actor's worker gives the driver: greedy responses, and what the pass before the update computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from burnish.config import load_config
from burnish.protocol import DataProto
from burnish.render import load_tokenizer
from burnish.rollout.stats import RolloutStats
from burnish.utils.errors import CheckpointError
from burnish.workers import ActorRolloutRefWorker
from burnish.workers.handed_back import checked


def worker_of(model: str, *overrides: str, role: str = "actor_rollout") -> ActorRolloutRefWorker:
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
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role, "cpu", 1, 0, None)
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


def test_the_pace_of_a_log_prob_pass_is_kept_for_the_next_update(tiny_model_path: str) -> None:
    worker = worker_of(tiny_model_path)
    worker.compute_log_prob(worker.generate_sequences(prompts()))
    assert set(worker.pass_metrics) <= {"perf/mfu/old_log_prob", "perf/cpu_memory_used_gb"}
    assert worker.pass_metrics["perf/mfu/old_log_prob"] > 0


def test_a_model_that_is_not_finite_is_not_saved(tiny_model_path: str, tmp_path: Path) -> None:
    worker = worker_of(tiny_model_path)
    name, weight = next(iter(worker.engine.named_weights()))
    weight[0, 0] = float("nan")
    answer = worker.save_checkpoint(str(tmp_path / "actor"))
    with pytest.raises(CheckpointError, match=name):
        checked([answer])
    assert not (tmp_path / "actor").exists()


def test_stop_strings_are_read_with_the_models_tokenizer_and_only_then_is_it_loaded(
    tiny_model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = worker_of(tiny_model_path, "rollout.seed=1").generate_sequences(prompts())
    ids = whole.tensors["responses"][0].tolist()
    text = load_tokenizer(tiny_model_path).decode(ids[2:3])
    worker = worker_of(tiny_model_path, "rollout.seed=1", f"rollout.stop=['{text}']", "rollout.val_kwargs.stop=[]")
    stopped = worker.generate_sequences(prompts())
    length = 1 + ids.index(ids[2])
    assert stopped.tensors["response_mask"][0].tolist() == [True] * length + [False] * (
        stopped.tensors["responses"].shape[1] - length
    )
    assert stopped.non_tensor_batch["finish_reason"][0] == "stop"
    assert worker.generate_sequences(prompts(validate=True)).tensors["response_mask"].all()
    monkeypatch.setattr("burnish.workers.actor_rollout_ref.load_tokenizer", None)
    worker_of(tiny_model_path)


def test_truncated_log_probs_come_where_sampling_truncates(tiny_model_path: str) -> None:
    plain = worker_of(tiny_model_path).generate_sequences(prompts())
    assert "rollout_truncated_log_probs" not in plain.tensors
    worker = worker_of(
        tiny_model_path, "rollout.min_p=0.3", "rollout.repetition_penalty=1.5", "rollout.min_new_tokens=2"
    )
    batch = worker.generate_sequences(prompts())
    assert batch.tensors["rollout_truncated_log_probs"].shape == batch.tensors["rollout_log_probs"].shape
    log_probs = logits_of(tiny_model_path, batch).log_softmax(-1).gather(-1, batch.tensors["responses"][..., None])
    torch.testing.assert_close(batch.tensors["rollout_log_probs"], log_probs[..., 0], atol=1e-4, rtol=0)
    assert "rollout_truncated_log_probs" not in worker.generate_sequences(prompts(validate=True)).tensors


def test_statistics_of_the_rollout_are_of_training_and_handed_over_once(tiny_model_path: str) -> None:
    worker = worker_of(tiny_model_path)
    assert worker.take_rollout_stats() == RolloutStats()
    worker.generate_sequences(prompts(validate=True))
    worker.generate_sequences(prompts())
    worker.generate_sequences(prompts(greedy=True))
    stats = worker.take_rollout_stats()
    assert stats.num_prompt_tokens == 2 * 9
    assert stats.num_response_tokens == 2 * 18
    assert stats.weight_copy_bytes == 0
    assert worker.take_rollout_stats() == RolloutStats()


def test_filling_the_rollouts_own_copy_of_the_weights_is_measured(tiny_model_path: str) -> None:
    worker = worker_of(tiny_model_path, "rollout.dtype=bfloat16")
    worker.update_weights(1)
    stats = worker.take_rollout_stats()
    num_bytes = sum(tensor.nbytes for _, tensor in worker.engine.named_weights())
    assert stats.weight_copy_bytes == num_bytes > 0
    assert stats.weight_copy_seconds > 0
