"""Small runs of the real code path, for the end-to-end tests."""

import json
from pathlib import Path

from burnish.config import load_config
from burnish.trainer.main_ppo import Parts, RunSummary, TaskRunner, run_ppo
from burnish.trainer.ppo.metrics import NON_DETERMINISTIC_PREFIXES
from tests.docs.metrics_page import logged_keys, undocumented

REPO = Path(__file__).resolve().parents[2]
TINY = REPO / "examples" / "tiny_model"


def tiny_config(run_dir: Path, *overrides: str):
    """The demo's recipe on the tiny model, cut down to 3 steps of 8 prompts x 4 samples in float32."""
    return load_config(
        [
            "recipe=demo",
            f"actor_rollout_ref.model.path={TINY / 'model'}",
            f"data.train_files={TINY / 'data' / 'train.jsonl'}",
            f"data.val_files={TINY / 'data' / 'test.jsonl'}",
            "data.train_batch_size=8",
            # Rendering thousands of rows would take longer than the steps.
            "data.train_max_samples=256",
            "data.val_max_samples=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.rollout.n=4",
            f"trainer.default_local_dir={run_dir}",
            "trainer.total_training_steps=3",
            "trainer.logger=[file]",
            "trainer.save_freq=-1",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            "reward.num_workers=0",
            *overrides,
        ]
    )


def tiny_run(
    run_dir: Path, *overrides: str, parts: Parts | None = None, task_runner_class: type[TaskRunner] | None = None
) -> RunSummary:
    """Runs, and looks whether all that was logged is on the page of metrics."""
    config = tiny_config(run_dir, *overrides)
    summary = run_ppo(config, task_runner_class, parts=parts, quiet=True)
    if (run_dir / "metrics.jsonl").exists():
        assert undocumented(logged_keys(run_dir)) == set(), "docs/metrics.md has no row for these"
    return summary


def logged(run_dir: Path) -> list[dict[str, float]]:
    """The metrics of the steps that the run has finished, without those that measure time or tell how rows lie on ranks."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    left_out = (*NON_DETERMINISTIC_PREFIXES, "global_seqlen/")
    return [
        {key: value for key, value in line.items() if not key.startswith(left_out)}
        for line in lines
        if "training/failed" not in line
    ]
