"""The same runs on a GPU: bfloat16 compute over float32 masters, decoding on the trained weights."""

import json

import pytest
import torch

from tests.e2e.runs import logged, tiny_run

pytestmark = pytest.mark.gpu

ACCURACY = "val-core/burnish/arithmetic/acc/mean@1"


@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_the_tiny_model_learns_on_gpus(tmp_path, estimator, num_gpus):
    if torch.cuda.device_count() < num_gpus:
        pytest.skip("needs a second GPU")
    tiny_run(
        tmp_path,
        "trainer.device=cuda",
        f"trainer.n_gpus_per_node={num_gpus}",
        f"algorithm.adv_estimator={estimator}",
        "data.train_batch_size=64",
        "data.val_max_samples=256",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.rollout.n=8",
        "trainer.total_training_steps=25",
        "trainer.val_before_train=true",
        "trainer.test_freq=1000",
    )
    metrics = logged(tmp_path)
    assert metrics[-1][ACCURACY] - metrics[0][ACCURACY] >= 0.30
    # bfloat16 on both sides, by the same kernels: the probabilities differ by rounding.
    assert all(step["training/rollout_probs_diff_mean"] < 0.02 for step in metrics[1:])


def test_float32_on_a_gpu_agrees_with_the_rollout_to_rounding(tmp_path):
    tiny_run(
        tmp_path,
        "trainer.device=cuda",
        "trainer.n_gpus_per_node=1",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    )
    assert all(step["training/rollout_probs_diff_max"] < 1e-3 for step in logged(tmp_path))
    metrics = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < metrics["perf/max_memory_allocated_gb"] <= metrics["perf/max_memory_reserved_gb"]
    assert all(0 < metrics[f"perf/{share}/rollout"] < 1 for share in ("mfu", "mbu"))
