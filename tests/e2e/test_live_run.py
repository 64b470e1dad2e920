"""A run on a terminal shows the live view, and nothing else of it is different."""

import os
import pty
import re
import subprocess
import sys

import pytest

from tests.e2e.runs import REPO, TINY


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("trainer.controller=ray", "trainer.n_gpus_per_node=2")], ids=["local", "ray"])
def test_a_run_on_a_terminal_draws_and_leaves_it_as_it_was(tmp_path, more):
    leader, follower = pty.openpty()
    variables = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR")}
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
    run = subprocess.Popen(
        [sys.executable, "-m", "burnish", "train", *overrides],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        cwd=REPO,
        env=variables | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"},
        start_new_session=True,
    )
    os.close(follower)
    written = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:
            break
        if not part:
            break
        written += part
    os.close(leader)
    text = written.decode("utf-8", "replace")
    assert run.wait(timeout=120) == 0, text
    assert "step 3 of 3  100%" in text
    assert "validation at step 3: burnish/arithmetic/acc/mean@1" in text
    assert "checkpoint of step 3" in text
    assert not re.search(r"step 1  score", text), "lines and view do not come together"
    assert re.findall(r"\x1b\[\?25([lh])", text)[-1] == "h"
    assert f"The run's files are in {tmp_path}" in text[-400:]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
