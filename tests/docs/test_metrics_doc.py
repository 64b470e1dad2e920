"""docs/metrics.md has every metric that runs log, and nothing that none logs.

That all keys of a run are on the page is looked at after every run of `tests.e2e.runs`.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from burnish.config import TrainerConfig
from burnish.protocol import DataProto, object_array
from burnish.render import load_tokenizer
from burnish.trainer.main_ppo import Parts
from burnish.trainer.ppo.checkpoints import CheckpointManager
from burnish.trainer.ppo.metrics import turn_metrics
from burnish.trainer.ppo.validation import validation_metrics
from burnish.utils.errors import BurnishError
from burnish.utils.tracking.service import GENERATIONS
from tests.conftest import REPO
from tests.docs.metrics_page import logged_keys, produced, rows, undocumented
from tests.e2e.runs import TINY, tiny_run
from tests.e2e.sft import rows as conversations
from tests.e2e.sft import sft_run

PREFIXES = (
    "actor",
    "bottleneck",
    "checkpoint",
    "critic",
    "filter_groups",
    "global_seqlen",
    "logging",
    "num_turns",
    "perf",
    "pf_ppo",
    "prompt_length",
    "response",
    "response_length",
    "response_length_non_aborted",
    "reward",
    "rollout_corr",
    "timing_per_token_ms",
    "timing_s",
    "train",
    "training",
    "val",
    "val-aux",
    "val-core",
)


def test_patterns_tell_names_apart():
    assert undocumented({"actor/entropy", "val-core/openai/gsm8k/acc/mean@16", "reward/my score/mean"}) == set()
    wrong = {"actor/entrop", "val-core/x/acc/mean@", "val-core/x/acc/worst@2/mean", "perf/mfu", "timing_s/nothing"}
    assert undocumented(wrong) == wrong
    assert produced({"val-aux/x/acc/best@2/std"}) == {"val-aux/<source>/<variable>/best@<k>/std"}


def test_every_row_says_what_it_is():
    for line in (REPO / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            assert len(line.strip("|").split("|")) == 3, line
            assert len(line.strip("|").split("|")[1].strip()) > 5, line


def written_keys() -> Iterator[tuple[str, str]]:
    """Metrics that are written out in the code, with their files; not those of a format string."""
    written = re.compile(rf"""(?<!f)"((?:{"|".join(PREFIXES)})(?:/[a-z0-9_]*[a-z0-9])+)\"""")
    for file in sorted((REPO / "burnish").rglob("*.py")):
        for key in written.findall(file.read_text(encoding="utf-8")):
            yield key, str(file.relative_to(REPO))


def test_what_the_code_names_is_on_the_page():
    keys = dict(written_keys())
    assert len(keys) > 40
    # A summary's name, to which mean, max and min are added, parts of names, and a table of texts.
    starts = {name.rpartition("/")[0] for name in rows()} | {GENERATIONS}
    moments = "training/rollout_moment"
    unknown = {key for key in undocumented(keys) if key not in starts and not key.startswith(moments)}
    assert {key: keys[key] for key in unknown} == {}


# Every row is logged by some run.

LOSS, CORRECTION = "actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.rollout_correction"
SEVERAL_UPDATES = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
RUNS: dict[str, list[str]] = {
    "grpo": ["trainer.test_freq=1", "trainer.save_freq=1"],
    "samples": [
        "trainer.val_only=true",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1",
    ],
    "ppo": ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", SEVERAL_UPDATES],
    "kl-loss-hf": ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.rollout.name=hf"],
    "lora": ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.use_kl_loss=true"],
    "dynamic-sampling": ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"],
    "remax": ["algorithm.adv_estimator=remax"],
    "gdpo": ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[score]"],
    "pf-ppo": ["algorithm.use_pf_ppo=true"],
    "correction": [
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_is_batch_normalize=true",
        f"{CORRECTION}.rollout_rs=seq_max_k1",
        f"{CORRECTION}.rollout_rs_threshold=2.0",
    ],
    "bypass": [f"{CORRECTION}.preset=bypass_pg_geo_rs"],
    "early-rewards": ["reward.num_workers=1", "reward.launch_reward_fn_async=true"],
    "copy-of-the-weights": ["actor_rollout_ref.rollout.dtype=bfloat16"],
    "two-ranks": ["trainer.controller=ray", "trainer.n_gpus_per_node=2"],
    "critic-apart": [
        "trainer.controller=ray",
        "algorithm.adv_estimator=gae",
        "critic.nnodes=1",
        "critic.n_gpus_per_node=1",
    ],
    **{name: [f"{LOSS}={name}"] for name in ("sapo", "clip_cov", "kl_cov", "dppo_tv", "dro")},
}

REWARD_MODEL_APART = [
    "trainer.controller=ray",
    SEVERAL_UPDATES,
    "reward_model.enable_resource_pool=true",
    "reward_model.nnodes=1",
    "reward_model.n_gpus_per_node=1",
]

LOOKED_AT_ELSEWHERE = {
    "perf/max_memory_allocated_gb": ("tests/e2e/test_gpu_runs.py", "perf/max_memory_allocated_gb"),
    "perf/max_memory_reserved_gb": ("tests/e2e/test_gpu_runs.py", "perf/max_memory_reserved_gb"),
    "checkpoint/failed_saves": ("tests/trainer/test_checkpoints.py", "checkpoint/failed_saves"),
    "checkpoint/failed_uploads": ("tests/trainer/test_remote_checkpoints.py", "uploads.num_failed"),
    "logging/dropped_values": ("tests/utils/test_tracking.py", "logging/dropped_values"),
}
"""What needs a device or an accident: the test that has it, and what that looks at."""


def reward_model(folder: Path) -> list[str]:
    config = AutoConfig.from_pretrained(TINY / "model", num_labels=1)
    AutoModelForSequenceClassification.from_pretrained(TINY / "model", config=config).save_pretrained(folder)
    load_tokenizer(str(TINY / "model")).save_pretrained(folder)
    return ["reward_model.enable=true", f"reward_model.model.path={folder}"]


def failing(**_):
    raise ValueError("no score")


def keys_without_a_run() -> set[str]:
    """Of responses with several turns, which no engine here gives, and of disks that fail."""
    mask = torch.tensor([[True, False, True]])
    batch = DataProto.from_dict(
        tensors={"response_mask": mask, "token_level_scores": torch.zeros(1, 3), "valid": torch.ones(1).bool()},
        non_tensors={"uid": object_array(["a"])},
        meta_info={"reward_extra_keys": []},
    )
    checkpoints = CheckpointManager(TrainerConfig(default_hdfs_dir="memory://none"))
    checkpoints.num_failed = checkpoints.uploads.num_failed = 1
    return {*turn_metrics("num_turns", mask), *validation_metrics(batch, 3), *checkpoints.metrics()}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_row_is_logged_by_a_run(tmp_path):
    keys = keys_without_a_run()
    scored = reward_model(tmp_path / "reward_model")
    runs = RUNS | {"reward-model": scored, "reward-model-apart": [*scored, *REWARD_MODEL_APART]}
    for name, overrides in runs.items():
        tiny_run(tmp_path / name, "trainer.total_training_steps=1", *overrides)
        keys |= logged_keys(tmp_path / name)
    sft_run(tmp_path / "sft", "trainer.test_freq=1", "trainer.total_training_steps=1", val=conversations(8))
    keys |= logged_keys(tmp_path / "sft")
    parts = Parts(reward_fn=failing)
    with pytest.raises(BurnishError):
        tiny_run(tmp_path / "failed", "reward.on_error=raise", parts=parts)
    keys |= logged_keys(tmp_path / "failed")
    assert undocumented(keys) == set()
    left = rows().keys() - produced(keys)
    assert left <= LOOKED_AT_ELSEWHERE.keys()


@pytest.mark.parametrize("name", LOOKED_AT_ELSEWHERE)
def test_what_no_run_here_can_log_has_a_test_that_names_it(name):
    file, words = LOOKED_AT_ELSEWHERE[name]
    assert name in rows()
    assert words in (REPO / file).read_text(encoding="utf-8")
