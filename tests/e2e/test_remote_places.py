"""A run whose model and data lie elsewhere is the run whose model and data lie here."""

import uuid
from pathlib import Path

import pytest

from burnish.trainer.main_ppo import Parts
from burnish.utils import storage
from burnish.utils.storage import cache
from tests.e2e.runs import TINY, logged, tiny_run


def test_a_run_from_urls_equals_one_from_this_machines_disk(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    cache._localized.cache_clear()
    place = f"memory://{uuid.uuid4().hex}"
    storage.upload_folder(TINY, place)
    rewards = tmp_path / "reward.py"
    rewards.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) / 8"
    )
    storage.write_text(f"{place}/code/reward.py", rewards.read_text())

    def run(name: str, model: str, rewards: str) -> list[dict[str, float]]:
        tiny_run(
            tmp_path / name,
            "trainer.total_training_steps=2",
            "actor_rollout_ref.actor.use_kl_loss=true",
            f"actor_rollout_ref.model.path={model}/model",
            f"data.train_files={model}/data/train.jsonl",
            f"data.val_files={model}/data/test*",
            "trainer.val_before_train=true",
            f"reward.custom_reward_function.path={rewards}",
            parts=Parts(),
        )
        return logged(tmp_path / name)

    assert run("far", place, f"{place}/code/reward.py") == run("here", str(TINY), str(rewards))
    assert place in (tmp_path / "far" / "config.yaml").read_text()


@pytest.mark.slow
def test_the_workers_of_a_cluster_fetch_the_model_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    cache._localized.cache_clear()
    place = f"file://{tmp_path}/store"
    storage.upload_folder(TINY, place)
    overrides = ["trainer.controller=ray", "trainer.n_gpus_per_node=2", "trainer.total_training_steps=1"]
    env_vars = f"ray_kwargs.ray_init.runtime_env.env_vars.BURNISH_CACHE={tmp_path / 'cache'}"
    models = {"far": place, "here": str(TINY)}
    for name, model in models.items():
        tiny_run(
            tmp_path / name,
            *overrides,
            f"++{env_vars}",
            f"actor_rollout_ref.model.path={model}/model",
            f"data.train_files={model}/data/train.jsonl",
        )
    assert logged(tmp_path / "far") == logged(tmp_path / "here")
    assert len(list((tmp_path / "cache").rglob("model.safetensors"))) == 1
