"""A run on several nodes is the run on one, and what is wrong with a cluster is said before workers are started."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from burnish.render import load_tokenizer
from burnish.utils.events import read_events
from tests.e2e.runs import REPO, TINY, logged
from tests.e2e.test_resume import assert_equal_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROGRAM = Path(__file__).with_name("cluster_program.py")
GAE = ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"]
STEPS = ["trainer.total_training_steps=2", "trainer.save_freq=2"]
REPLICATED = "actor_rollout_ref.actor.fsdp_config.fsdp_size=1"


def layout(nodes: int, workers: int) -> list[str]:
    return [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={workers}"]


def on_cluster(folder: Path, *cases: dict[str, Any], cwd: Path = REPO) -> dict[str, Any]:
    """What became of each case; see `cluster_program`."""
    path = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, str(PROGRAM), str(folder), json.dumps(cases)]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    results: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


def case(name: str, *overrides: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "overrides": list(overrides), **more}


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("reward_model")
    config = AutoConfig.from_pretrained(TINY / "model", num_labels=1)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(TINY / "model", config=config, dtype=torch.float32)
    model.save_pretrained(folder)
    load_tokenizer(str(TINY / "model")).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, reward_model: str) -> tuple[Path, dict[str, Any]]:
    """All runs that end well, on one cluster of two nodes."""
    folder = tmp_path_factory.mktemp("runs")
    more = ["trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.resume_mode=auto"]
    pool = ["reward_model.enable=true", f"reward_model.model.path={reward_model}"]
    pool += [f"reward_model.{key}" for key in ("enable_resource_pool=true", "n_gpus_per_node=1", "nnodes=1")]
    pool += ["reward.reward_model.model.fsdp_config.dtype=float32"]
    results = on_cluster(
        folder,
        case("one node", *STEPS, *layout(1, 2)),
        case("two nodes", *STEPS, *layout(2, 1)),
        case("replicated, one node", *STEPS, *layout(1, 2), REPLICATED),
        case("replicated, two nodes", *STEPS, *layout(2, 1), REPLICATED),
        case("four workers, one node", *STEPS, *layout(1, 4)),
        case("four workers, two nodes", *STEPS, *layout(2, 2)),
        case("whole", *GAE, *more, *layout(2, 1)),
        case("stopped", *GAE, *more, *layout(2, 1), "trainer.total_training_steps=2", run_dir="resumed"),
        case("resumed", *GAE, *more, *layout(2, 1)),
        case("pools", *STEPS, *GAE, *pool, *layout(2, 1), "critic.nnodes=2", "critic.n_gpus_per_node=1"),
    )
    for name, result in results.items():
        assert result.get("status") == 0, (name, result)
    return folder, results


def step_of(folder: Path, step: int) -> Path:
    return folder / f"global_step_{step}"


@pytest.mark.parametrize("what", ["", "replicated, ", "four workers, "])
def test_nodes_change_nothing(runs: tuple[Path, dict[str, Any]], what: str) -> None:
    folder, _ = runs
    one, two = folder / f"{what}one node", folder / f"{what}two nodes"
    assert logged(one) == logged(two)
    assert logged(one)
    weights = [step_of(run, 2) / "actor" / "model.safetensors" for run in (one, two)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_run_on_two_nodes_that_was_stopped_ends_as_one_that_was_not(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = runs
    assert logged(folder / "whole")[-1] == logged(folder / "resumed")[-1]
    assert_equal_files(step_of(folder / "whole", 3), step_of(folder / "resumed", 3))
    # Each rank's part of the optimizer's state came to one folder.
    assert len(list((step_of(folder / "whole", 3) / "critic").rglob("*00001_of_00002*"))) > 0


def test_critic_and_reward_model_have_nodes_of_their_own(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = runs
    metrics = logged(folder / "pools")[-1]
    assert {"reward/rm_score/mean", "critic/vf_loss"} <= metrics.keys()
    assert metrics["critic/skipped_updates"] == 0


def test_a_cluster_is_checked_node_by_node(tmp_path: Path) -> None:
    asks = [
        case("enough", *layout(2, 2), check=True),
        case("too many nodes", *layout(4, 1), check=True),
        case("too many a node", *layout(1, 8), check=True),
        case("its own number", *layout(2, 2), "ray_kwargs.ray_init.num_cpus=8", check=True),
        case("too many nodes, run", *layout(4, 1)),
        case("the runner on the cluster", *layout(2, 1), *STEPS, runner_is_actor=True),
    ]
    found = on_cluster(tmp_path, *asks)
    levels = {name: {level for level, _ in result["said"]} for name, result in found.items() if "facts" in result}
    assert levels["enough"] == {"note"}
    assert [node["total"] for node in found["enough"]["facts"]["nodes"]] == [4, 4]
    assert "Asked, workers on each node: global_pool [2, 2]" in found["enough"]["said"][-1][1]
    for name, part in {"too many nodes": "on 4 node(s)", "too many a node": "Asked: 8 CPU on 1 node(s)"}.items():
        (error,) = [message for level, message in found[name]["said"] if level == "error"]
        assert part in error
    (refusal,) = found["its own number"]["said"]
    assert refusal[0] == "error"
    assert "is there already, so ray_kwargs.ray_init.num_cpus=8 cannot be chosen any more" in refusal[1]
    assert found["the runner on the cluster"] == {"steps": 2, "status": 0}
    assert found["too many nodes, run"]["error"] == "ResourceError"
    assert "on 4 node(s)" in found["too many nodes, run"]["said"]


def test_relative_paths_mean_what_they_mean_to_the_driver(tmp_path: Path) -> None:
    model = os.path.relpath(TINY / "model", tmp_path)
    found = on_cluster(
        tmp_path, case("relative", *layout(2, 1), *STEPS, f"actor_rollout_ref.model.path={model}"), cwd=tmp_path
    )
    assert found["relative"].get("status") == 0, found


def test_a_node_that_dies_is_named_and_the_run_goes_on_where_there_is_another(tmp_path: Path) -> None:
    keys = [*layout(2, 1), "trainer.total_training_steps=4", "trainer.save_freq=1"]
    saved = "global_step_1/manifest.json"
    found = on_cluster(
        tmp_path,
        case("undisturbed", *keys, nodes=3),
        case("goes on", *keys, "trainer.max_restarts=1", kill_at=saved),
        case("ends", *keys, kill_at=saved),
    )
    assert found["undisturbed"].get("status") == 0, found
    assert found["goes on"].get("status") == 0, found
    kinds = [event["kind"] for event in read_events(tmp_path / "goes on")]
    assert (kinds.count("worker_death"), kinds.count("restart"), kinds.count("resume")) == (1, 1, 1)
    assert logged(tmp_path / "goes on")[-1] == logged(tmp_path / "undisturbed")[-1]
    assert found["ends"]["error"] == "WorkerDiedError", found
    assert re.search(r"rank [01] of 2 \(node [\d.]+, pid \d+\) died in ", found["ends"]["said"]), found
