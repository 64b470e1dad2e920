"""Runs with a reward model, and rewards that are scored while generation runs, equal however they are laid out."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from burnish.config import load_config
from burnish.render import load_tokenizer
from burnish.trainer.ppo.bottleneck import stage_seconds
from burnish.utils.errors import ConfigError
from tests.e2e.runs import TINY, logged, tiny_config, tiny_run

MY_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info, scale=1.0):
    return {"score": scale * (len(solution_str) % 3), "seen": extra_info["index"]}
"""


@pytest.fixture
def reward_model(tmp_path: Path) -> str:
    folder = tmp_path / "reward_model"
    config = AutoConfig.from_pretrained(TINY / "model", num_labels=1)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(TINY / "model", config=config, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    load_tokenizer(str(TINY / "model")).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def my_reward(tmp_path: Path) -> str:
    file = tmp_path / "my_reward.py"
    file.write_text(MY_REWARD)
    return f"reward.custom_reward_function.path={file}"


def keys_of(reward_model: str, *more: str) -> list[str]:
    return [
        "reward_model.enable=true",
        f"reward_model.model.path={reward_model}",
        "reward.reward_model.model.fsdp_config.dtype=float32",
        "trainer.total_training_steps=1",
        *more,
    ]


def test_the_reward_models_score_is_the_score_unless_a_function_is_given_weight(
    tmp_path: Path, reward_model: str, my_reward: str
) -> None:
    alone = tiny_run(tmp_path / "alone", *keys_of(reward_model)).metrics
    assert alone["critic/score/mean"] == pytest.approx(alone["reward/rm_score/mean"], abs=1e-6)
    both = tiny_run(
        tmp_path / "both",
        *keys_of(reward_model, my_reward, "reward.reward_model.function_weight=0.5", "reward.num_workers=0"),
    ).metrics
    assert both["reward/rm_score/mean"] == pytest.approx(alone["reward/rm_score/mean"], abs=1e-6)
    assert both["reward/function_score/mean"] > 0
    total = both["reward/rm_score/mean"] + 0.5 * both["reward/function_score/mean"]
    assert both["critic/score/mean"] == pytest.approx(total, abs=1e-6)


def test_a_function_that_would_never_be_called_is_refused(my_reward: str) -> None:
    with pytest.raises(ConfigError, match="never be called.*function_weight"):
        load_config(["data.train_files=x.jsonl", "reward_model.enable=true", "reward_model.model.path=x", my_reward])


def test_a_generative_reward_model_is_sent_to_the_judges(caplog: pytest.LogCaptureFixture) -> None:
    load_config(["data.train_files=x.jsonl", "reward_model.rollout.name=vllm"])
    assert "a generative one is a judge behind a server (reward.judge.url)" in caplog.text


def test_a_pool_needs_workers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nnodes and reward.reward_model.n_gpus_per_node above 0"):
        tiny_config(tmp_path, *keys_of("x", "reward.reward_model.enable_resource_pool=true"))


@pytest.mark.slow
@pytest.mark.parametrize("own_pool", [False, True])
def test_a_reward_model_gives_the_same_on_two_workers_and_in_a_pool_of_its_own(
    tmp_path: Path, reward_model: str, own_pool: bool
) -> None:
    tiny_run(tmp_path / "one", *keys_of(reward_model))
    pool = [f"reward_model.{name}" for name in ("enable_resource_pool=true", "n_gpus_per_node=1", "nnodes=1")]
    workers = ["trainer.controller=ray", "ray_kwargs.ray_init.num_cpus=4"]
    workers += pool if own_pool else ["trainer.n_gpus_per_node=2"]
    tiny_run(tmp_path / "other", *keys_of(reward_model, *workers))
    (one,), (other,) = logged(tmp_path / "one"), logged(tmp_path / "other")
    assert other["reward/rm_score/mean"] == pytest.approx(one["reward/rm_score/mean"], abs=1e-5)
    assert other["critic/score/max"] == pytest.approx(one["critic/score/max"], abs=1e-5)


@pytest.mark.slow
def test_a_reward_model_beside_the_passes_gives_what_it_gives_in_its_turn(
    tmp_path: Path, reward_model: str, my_reward: str
) -> None:
    updates = ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "critic.ppo_mini_batch_size=4"]
    validation = ["trainer.test_freq=1", "reward.reward_model.function_weight=0.5", "reward.num_workers=1"]
    common = ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true", *updates, *validation]
    pool = [f"reward_model.{name}" for name in ("enable_resource_pool=true", "n_gpus_per_node=1", "nnodes=1")]
    apart = {
        "turns": [],
        "beside": pool,
        "both_beside": [*pool, "critic.nnodes=1", "critic.n_gpus_per_node=1"],
        "filtering": [*pool, "algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score"],
    }
    for name, keys in apart.items():
        dumps = f"trainer.rollout_data_dir={tmp_path / name / 'rows'}"
        workers = ["trainer.controller=ray", "ray_kwargs.ray_init.num_cpus=4", dumps]
        tiny_run(tmp_path / name, my_reward, *keys_of(reward_model, *common, *workers, *keys))
    (turns,), lines, rows = logged(tmp_path / "turns"), {}, {}
    for name in apart:
        lines[name] = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])
        written = (tmp_path / name / "rows" / "1.jsonl").read_text().splitlines()
        rows[name] = {(row["uid"], row["response"]): row["score"] for row in map(json.loads, written)}
        assert ("timing_s/reward_model_beside" in lines[name]) == name.endswith("beside")
        seconds = stage_seconds(lines[name])
        whole = lines[name]["timing_s/step"] + lines[name]["timing_s/testing"]
        assert sum(seconds.values()) == pytest.approx(whole, rel=1e-3)
    for name in ("beside", "both_beside"):
        (beside,) = logged(tmp_path / name)
        assert beside.keys() == turns.keys()
        # Threads per worker differ, and with them the order of sums.
        for key in turns:
            if key.startswith(("reward/", "critic/", "actor/", "val-core/", "val-aux/")):
                assert beside[key] == pytest.approx(turns[key], rel=2e-3, abs=1e-4), key
        assert rows[name] == pytest.approx(rows["turns"], abs=1e-4)


@pytest.mark.slow
def test_rewards_while_generating_equal_those_of_the_driver_under_every_controller(
    tmp_path: Path, my_reward: str
) -> None:
    dumped = {}
    for name, keys in {
        "driver": ["reward.launch_reward_fn_async=false", "reward.num_workers=1"],
        "early": ["reward.num_workers=1"],
        "ray": ["reward.num_workers=1", "trainer.controller=ray", "trainer.n_gpus_per_node=2"],
    }.items():
        folder = tmp_path / f"{name}_rows"
        cpus = ["ray_kwargs.ray_init.num_cpus=4"] if name == "ray" else []
        steps = ["trainer.total_training_steps=1", f"trainer.rollout_data_dir={folder}"]
        tiny_run(tmp_path / name, my_reward, *keys, *cpus, *steps)
        rows = [json.loads(line) for line in (folder / "1.jsonl").read_text().splitlines()]
        dumped[name] = sorted((row["uid"], row["response"], row["score"], row["seen"]) for row in rows)
        assert all(row["seen"] == row["extra_info"]["index"] for row in rows)
    assert dumped["driver"] == dumped["early"] == dumped["ray"]
