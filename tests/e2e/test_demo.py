"""The demo learns: accuracy on held-out prompts rises by 30 points and more, by every way to run it."""

import json
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from burnish.cli.app import app
from tests.e2e.runs import REPO, logged

POINTS = 0.30
SMALL = (
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "data.val_max_samples=16",
)


def run_demo(tmp_path, *args: str) -> dict:
    """By the command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "burnish", "demo", "--json", *args],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_learned(result: dict, steps: int) -> None:
    assert result["accuracy_after"] - result["accuracy_before"] >= POINTS, result
    assert result["steps"] == steps


def test_the_demo_learns_and_says_so_in_json(tmp_path, monkeypatch):
    # In this process, which has imported already what takes half as long as the training.
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["demo", "--json", "--steps", "6"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    assert_learned(result, 6)
    assert set(result) == {"accuracy_before", "accuracy_after", "steps", "seconds", "run_dir"}
    run_dir = tmp_path / "runs"
    assert result["run_dir"].startswith(str(run_dir))
    (only,) = run_dir.iterdir()
    metrics = logged(only)
    assert metrics[-1]["reward/acc/mean"] > metrics[1]["reward/acc/mean"]
    assert (only / "global_step_6" / "actor" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("trainer.controller=ray", "trainer.n_gpus_per_node=2"),
        ("algorithm.adv_estimator=gae",),
        ("algorithm.adv_estimator=rloo",),
        ("algorithm.adv_estimator=reinforce_plus_plus",),
    ],
    ids=["grpo", "two-ray-workers", "ppo", "rloo", "reinforce_plus_plus"],
)
def test_the_demo_learns_for_every_seed_and_algorithm(tmp_path, seed, overrides):
    result = run_demo(tmp_path, "--seed", str(seed), *overrides)
    assert_learned(result, 40)
    assert result["seconds"] < 120


@pytest.mark.slow
def test_ctrl_c_ends_a_run_cleanly(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "burnish", "demo", "--json", "--steps", "10000", *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    metrics = None
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        metrics = next(tmp_path.glob("runs/*/metrics.jsonl"), None)
        if metrics is not None and len(metrics.read_text().splitlines()) > 2:
            break
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    result = json.loads(out.splitlines()[-1])
    assert 1 < result["steps"] < 10000
    # Every line that was written is whole.
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(result["steps"] + 1))


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["here", "alone"])
def test_the_python_call_trains_with_rows_and_a_function(tmp_path, alone):
    script = f"""
import burnish
rows = [{{"prompt": f"{{a}}+{{b}}=", "ground_truth": str(a + b)}} for a in range(20, 40) for b in range(20, 40)]
def reward(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)
run = burnish.train(
    model={str(REPO / "examples" / "tiny_model" / "model")!r}, dataset=rows, reward_fn=reward, recipe="demo",
    data={{"train_batch_size": 16}}, actor_rollout_ref={{"actor": {{"ppo_mini_batch_size": 16}}}},
    reward={{"num_workers": 1}},
    trainer={{"total_training_steps": 3, "default_local_dir": {str(tmp_path / "run")!r}}},
)
assert len(run.curve("critic/score/mean")) == 3
assert run.metrics["training/global_step"] == 3
print(run.run_dir)
"""
    if not alone:
        # As typed into a Python that has imported burnish already.
        exec(script, {"__name__": "__main__"})
        return
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(tmp_path / "run")
