"""A run on a terminal shows the live view, and nothing else of it is different."""

import re
import sys

import pytest

from tests.e2e.runs import TINY
from tests.terminal import run_on_a_terminal


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("trainer.controller=ray", "trainer.n_gpus_per_node=2")], ids=["local", "ray"])
def test_a_run_on_a_terminal_draws_and_leaves_it_as_it_was(tmp_path, more):
    overrides = [
        "recipe=demo",
        f"actor_rollout_ref.model.path={TINY / 'model'}",
        f"data.train_files={TINY / 'data' / 'train.jsonl'}",
        f"data.val_files={TINY / 'data' / 'test.jsonl'}",
        "data.val_max_samples=16",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=3",
        f"trainer.default_local_dir={tmp_path}",
        *more,
    ]
    command = [sys.executable, "-m", "burnish", "train", *overrides]
    status, text = run_on_a_terminal(command, columns=100, lines=40, timeout=120)
    assert status == 0, text
    assert "step 3 of 3  100%" in text
    assert "validation at step 3: burnish/arithmetic/acc/mean@1" in text
    assert "checkpoint of step 3" in text
    assert not re.search(r"step 1  score", text), "lines and view do not come together"
    assert re.findall(r"\x1b\[\?25([lh])", text)[-1] == "h"
    assert f"The run's files are in {tmp_path}" in text[-400:]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
