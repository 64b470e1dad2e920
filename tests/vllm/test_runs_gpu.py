"""On a GPU vLLM sleeps between rollouts, forgets its weights and gets them again, and the run goes on as with native."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.e2e.runs import logged, tiny_run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
ROLLOUT = "actor_rollout_ref.rollout"
LORA = ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.target_modules=all-linear")


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(("mode", "controller"), [("sync", "local"), ("async", "local"), ("async", "ray")])
def test_three_steps_with_a_validation_after_each(tmp_path: Path, mode: str, controller: str, adapters: bool) -> None:
    tiny_run(
        tmp_path,
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.mode={mode}",
        f"{ROLLOUT}.gpu_memory_utilization=0.2",
        # Stated, vLLM does not measure: it refuses to start where another program gives memory of the GPU back meanwhile.
        f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes={8 << 30}",
        "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16",
        "trainer.device=cuda",
        "trainer.n_gpus_per_node=1",
        f"trainer.controller={controller}",
        # The second generation between two updates: the weights that it forgot are sent again.
        "trainer.test_freq=1",
        *(LORA if adapters else ()),
    )
    steps = logged(tmp_path)
    assert [step["step"] for step in steps if "critic/score/mean" in step] == [1, 2, 3]
    for step in steps:
        if "training/rollout_probs_diff_mean" in step:
            assert step["training/rollout_probs_diff_mean"] < 0.02
            assert step["training/rollout_actor_probs_pearson_corr"] > 0.99
