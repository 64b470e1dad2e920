"""The minimal loop: short, without Ray, and it learns."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from burnish.protocol import DataProto
from examples.minimal.grpo_loop import GRPO, Settings

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "minimal" / "grpo_loop.py"


def test_the_loop_fits_in_two_hundred_lines() -> None:
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 200


def test_script_learns_without_ray_and_ends_with_its_accuracies_as_json() -> None:
    sizes = ["--steps", "6", "--num-prompts", "32", "--num-test", "128"]
    program = (
        f"import runpy, sys; sys.argv = [{str(SCRIPT)!r}, *{sizes}]\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "sys.exit('ray was imported' if 'ray' in sys.modules else 0)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    last = json.loads(run.stdout.splitlines()[-1])
    assert set(last) == {"accuracy_before", "accuracy_after"}
    assert last["accuracy_after"] - last["accuracy_before"] >= 0.30
    assert run.stdout.count("step ") == 6


def test_one_seed_gives_one_run() -> None:
    def weights(seed: int) -> torch.Tensor:
        loop = GRPO(Settings(steps=1, num_prompts=4, n=4, num_test=4, seed=seed))
        loop.fit()
        return torch.cat([parameter.detach().flatten() for parameter in loop.policy.parameters()])

    first = weights(0)
    assert torch.equal(first, weights(0))
    assert not torch.equal(first, weights(1))


def test_log_probs_of_rollout_and_training_agree() -> None:
    loop = GRPO(Settings(steps=1, num_prompts=8, n=4))
    rows = next(iter(loop.dataloader(loop.settings.train_file, 8, shuffle=True)))
    metrics = loop.step(DataProto.from_single_dict(rows))
    assert metrics["log_prob_difference_max"] < 1e-4
