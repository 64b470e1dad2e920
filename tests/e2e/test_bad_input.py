"""Mistakes are named before training where they can be known, and counted where they cannot."""

import json
import math
import shutil

import pytest

from burnish.trainer.main_ppo import Parts
from burnish.utils.errors import BurnishError, ConfigError, DataError, ModelError, RewardError
from tests.e2e.runs import TINY, logged, tiny_run


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(prompt="1+1=", truth="2", **extra):
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "data_source": "burnish/arithmetic",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {},
        **extra,
    }


@pytest.mark.parametrize(
    ("override", "error", "words"),
    [
        ("data.train_batchsize=4", ConfigError, "data.train_batch_size"),
        ("data.max_prompt_length=600", ConfigError, "max_position_embeddings"),
        ("actor_rollout_ref.model.external_lib=no.such.module", BurnishError, "external_lib=no.such.module"),
        ("data.train_files=nowhere.jsonl", BurnishError, "nowhere.jsonl"),
        ("actor_rollout_ref.model.path=/nowhere/at/all", BurnishError, "/nowhere/at/all"),
        ("actor_rollout_ref.rollout.n=1", ConfigError, "rollout.n"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=64", ConfigError, "ppo_mini_batch_size"),
        ("data.train_batch_size=1000000", BurnishError, "train_batch_size"),
        ("actor_rollout_ref.rollout.temperature=-1", BurnishError, "temperature"),
        ("actor_rollout_ref.rollout.name=sglang", ConfigError, "sglang"),
        ("algorithm.adv_estimator=grpoo", ConfigError, "grpo"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=json:no_such", ConfigError, "loss_mode=json:no_such"),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=json:dumps",
            ConfigError,
            "a policy loss is called with (old_log_prob,",
        ),
        ("actor_rollout_ref.rollout.name=no_such:engine", ConfigError, "rollout.name=no_such:engine"),
        ("trainer.resume_mode=must", ConfigError, "trainer.resume_mode=must"),
        ("trainer.rollout_data_dir=/proc/no/folder", ConfigError, "trainer.rollout_data_dir=/proc/no/folder"),
        ("trainer.default_local_dir=/proc/no/folder", ConfigError, "trainer.default_local_dir=/proc/no/folder"),
    ],
)
def test_a_wrong_request_is_an_error_before_training(tmp_path, override, error, words):
    with pytest.raises(error) as caught:
        tiny_run(tmp_path, override)
    assert words in str(caught.value)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_heads_that_do_not_divide_among_workers_are_an_error_before_any_worker_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"the 4 attention heads .* Sizes that work: 1, 2, 4\."):
        tiny_run(tmp_path, "trainer.n_gpus_per_node=8", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=8")
    with pytest.raises(ConfigError, match="the one worker does not divide"):
        # How many workers there are is known when the machine has been looked at.
        tiny_run(tmp_path, "trainer.device=cpu", "critic.ulysses_sequence_parallel_size=2", "critic.enable=true")


def test_a_loss_of_a_script_is_refused_where_workers_are_other_processes(tmp_path):
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode=__main__:loss"
    with pytest.raises(ConfigError, match=f"^{loss}: workers .* cannot import .*trainer.controller=local"):
        tiny_run(tmp_path, loss, "trainer.controller=ray")


def test_a_row_without_a_prompt_is_named_by_file_and_row(tmp_path):
    rows = [row() for _ in range(20)]
    del rows[13]["prompt"]
    path = write_rows(tmp_path / "train.jsonl", rows)
    with pytest.raises(DataError) as caught:
        tiny_run(tmp_path / "run", f"data.train_files={path}")
    assert str(path) in str(caught.value)
    assert "13" in str(caught.value) or "14" in str(caught.value)


def test_a_prompt_that_is_too_long_is_an_error_or_dropped_and_counted(tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [row() for _ in range(20)] + [row(prompt="1+" * 100 + "1=")])
    with pytest.raises(DataError, match="max_prompt_length"):
        tiny_run(tmp_path / "run", f"data.train_files={path}")
    tiny_run(tmp_path / "run", f"data.train_files={path}", "data.truncation=drop", "trainer.total_training_steps=1")
    assert len(logged(tmp_path / "run")) == 1


def test_a_model_folder_without_tokenizer_is_named(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY / "model" / name, model / name)
    with pytest.raises(ModelError, match="tokenizer"):
        tiny_run(tmp_path / "run", f"actor_rollout_ref.model.path={model}")


def test_an_unknown_data_source_is_refused_before_training(tmp_path):
    path = write_rows(tmp_path / "train.jsonl", [row(data_source="my/own") for _ in range(20)])
    with pytest.raises(DataError, match="my/own"):
        tiny_run(tmp_path / "run", f"data.train_files={path}")


def test_batch_sizes_that_do_not_divide_name_the_nearest_that_do(tmp_path):
    with pytest.raises(ConfigError, match="ppo_mini_batch_size=4"):
        tiny_run(tmp_path, "actor_rollout_ref.actor.ppo_mini_batch_size=3")
    with pytest.raises(ConfigError, match="do not divide among 3 workers"):
        tiny_run(tmp_path, "trainer.controller=ray", "trainer.n_gpus_per_node=3")


def flaky(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == ground_truth:
        raise ValueError("no mood")
    return math.nan if len(solution_str) > 2 else 0.5 * len(solution_str)


def test_a_reward_function_that_raises_or_returns_nan_is_counted_and_its_rows_left_out(tmp_path):
    tiny_run(
        tmp_path,
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        parts=Parts(reward_fn=flaky),
    )
    metrics = logged(tmp_path)
    assert sum(m["reward/error_count"] for m in metrics) > 0
    assert sum(m["reward/non_finite_count"] for m in metrics) > 0
    for m in metrics:
        lost = m["reward/error_count"] + m["reward/non_finite_count"]
        assert m["training/num_valid_rows"] == m["training/num_rows"] - lost
        assert all(math.isfinite(value) for value in m.values() if isinstance(value, float))


def test_a_reward_function_that_raises_stops_the_run_if_asked_to(tmp_path):
    with pytest.raises(RewardError, match="no mood"):
        tiny_run(tmp_path, "reward.on_error=raise", parts=Parts(reward_fn=flaky))


def always_raises(data_source, solution_str, ground_truth, extra_info=None):
    raise ValueError("never works")


def test_a_reward_function_that_always_raises_stops_the_run(tmp_path):
    with pytest.raises(RewardError, match="never works"):
        tiny_run(tmp_path, parts=Parts(reward_fn=always_raises))
