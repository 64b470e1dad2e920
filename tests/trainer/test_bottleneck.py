"""Where a step's time goes: shares that add up, gaps by hand, and advice that names keys which exist."""

import subprocess
import sys

import pytest

from burnish.config import PPOTrainerConfig, SFTTrainerConfig, load_config, to_dict
from burnish.config.schema import leaves
from burnish.trainer.ppo.bottleneck import STAGES_BESIDE, STEP_STAGES, bottleneck_metrics, explain, stage_seconds

STEP = {
    "timing_s/gen": 4.0,
    "timing_s/reward": 0.5,
    "timing_s/update_actor": 3.0,
    "timing_s/step": 8.0,
    "timing_per_token_ms/gen": 4.0,
    "timing_per_token_ms/update_actor": 1.0,
    "perf/mfu/actor": 0.1,
}
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def finding(stage, metrics, config=None):
    (found,) = (found for found in explain(metrics, config or {}) if found.stage == stage)
    return found


def nested(**keys):
    """``a__b=1`` -> {"a": {"b": 1}}"""
    config: dict = {}
    for path, value in keys.items():
        *sections, name = path.split("__")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return config


def test_stages_add_up_to_the_step_and_what_follows_it():
    metrics = {**STEP, "timing_s/testing": 2.0, "timing_s/gen_max": 1.0}
    assert stage_seconds(metrics) == {"gen": 4.0, "reward": 0.5, "update_actor": 3.0, "other": 0.5, "testing": 2.0}
    assert sum(found.share for found in explain(metrics, {})) == pytest.approx(1.0)
    assert finding("testing", metrics).share == pytest.approx(0.2)


def test_the_reward_models_passes_lie_inside_generation_and_are_told_apart():
    seconds = stage_seconds({**STEP, "timing_s/reward_model": 1.5})
    assert (seconds["gen"], seconds["reward_model"], seconds["other"]) == (2.5, 1.5, 0.5)


def test_a_reward_model_beside_other_stages_lies_behind_generation():
    beside = {"timing_s/reward_model": 0.3, "timing_s/reward_model_beside": 1.5}
    seconds = stage_seconds({**STEP, **beside})
    assert (seconds["gen"], seconds["reward_model"], seconds["other"]) == (4.0, 0.3, pytest.approx(0.2))


def test_without_a_step_there_is_nothing_to_say():
    assert explain({"timing_s/testing": 3.0, "val-core/x/reward/mean@1": 0.5}, {}) == []
    assert bottleneck_metrics({}) == {}


def test_the_gap_of_an_update_is_what_it_lacks_to_the_pace_that_can_be_reached():
    # A tenth of the operations where two fifths can be had: a quarter of the seconds would do.
    found = finding("update_actor", STEP)
    assert (found.utilisation, found.ceiling) == (0.1, "operations")
    assert found.gap_s == pytest.approx(3.0 * 0.75)
    assert finding("update_actor", {**STEP, "perf/mfu/actor": 0.6}).gap_s == 0.0


def test_sampling_is_measured_against_the_ceiling_that_is_nearer():
    decoding = {**STEP, "perf/mfu/rollout": 0.09, "perf/mbu/rollout": 0.4, "perf/rollout/decode_seconds": 3.0}
    found = finding("gen", decoding)
    assert (found.ceiling, found.utilisation) == ("bandwidth", 0.4)
    assert found.gap_s == pytest.approx(4.0 - 3.0 * 0.4 / 0.5)
    found = finding("gen", {**decoding, "perf/mfu/rollout": 0.36})
    assert (found.ceiling, found.gap_s) == ("operations", pytest.approx(4.0 - 4.0 * 0.36 / 0.45))


def test_what_does_no_work_of_the_model_is_gap_altogether():
    assert finding("reward", STEP).gap_s == 0.5
    assert finding("gen", STEP).gap_s == 4.0


def test_the_largest_gap_comes_first_and_is_logged():
    found = explain(STEP, {})
    assert [f.stage for f in found] == ["gen", "update_actor", "reward", "other"]
    metrics = bottleneck_metrics(STEP)
    assert (metrics["bottleneck/gap_s"], metrics["bottleneck/gap_share"]) == (4.0, 0.5)
    assert metrics["bottleneck/share/update_actor"] == pytest.approx(3 / 8)
    assert metrics["bottleneck/tokens/gen"] == 1000
    assert metrics["bottleneck/tokens/update_actor"] == 3000
    assert "bottleneck/tokens/reward" not in metrics


def test_a_finding_is_a_line_for_people():
    line = str(finding("update_actor", STEP))
    assert line.startswith("update_actor takes 38% of the step (3 s, 10% of the device's operations). ")


def test_every_stage_has_advice_and_it_reads_what_a_run_has(tmp_path):
    metrics = {f"timing_s/{stage}": 1.0 for stage in (*STEP_STAGES, *STAGES_BESIDE, "reward_model")}
    metrics["timing_s/step"] = 20.0
    config = to_dict(load_config(["recipe=demo", f"data.train_files={__file__}"]))
    found = explain(metrics, config)
    assert {f.stage for f in found} == {*STEP_STAGES, *STAGES_BESIDE, "reward_model", "other"} - {"gen"}
    for f in [*found, *explain({**metrics, "timing_s/gen": 3.0}, config), *explain(metrics, {})]:
        assert f.advice.endswith("."), f.stage
        assert set(f.keys) <= set(leaves(SFTTrainerConfig if f.stage == "train" else PPOTrainerConfig)), f.stage


CASES = {
    "hf": ("gen", {}, nested(actor_rollout_ref__rollout__name="hf"), f"{ROLLOUT}.name"),
    "waits for rewards": ("gen", {"perf/rollout/reward_wait_seconds": 2.0}, {}, "reward.num_workers"),
    "preempted": ("gen", {"perf/rollout/preemptions": 3.0}, {}, f"{ROLLOUT}.gpu_memory_utilization"),
    "prompts": ("gen", {"perf/rollout/prefill_seconds": 3.0}, {}, f"{ROLLOUT}.max_num_batched_tokens"),
    "full": (
        "gen",
        {"perf/rollout/max_running": 8.0, "perf/rollout/rows_per_step": 7.0},
        nested(actor_rollout_ref__rollout__max_num_seqs=8),
        f"{ROLLOUT}.max_num_seqs",
    ),
    "stragglers": (
        "gen",
        {"perf/rollout/max_running": 8.0, "perf/rollout/rows_per_step": 2.0},
        nested(actor_rollout_ref__rollout__max_num_seqs=8),
        "data.max_response_length",
    ),
    "eager": (
        "gen",
        {},
        nested(actor_rollout_ref__rollout__enforce_eager=True, trainer__device="cuda"),
        f"{ROLLOUT}.enforce_eager",
    ),
    "few responses": ("gen", {}, {}, "data.train_batch_size"),
    "fp32": (
        "update_actor",
        {},
        nested(actor_rollout_ref__actor__fsdp_config__dtype="float32", trainer__device="cuda"),
        f"{ACTOR}.fsdp_config.dtype",
    ),
    "offload": (
        "update_actor",
        {},
        nested(actor_rollout_ref__actor__fsdp_config__optimizer_offload=True, trainer__device="cuda"),
        f"{ACTOR}.fsdp_config.optimizer_offload",
    ),
    "uneven": (
        "update_actor",
        {"global_seqlen/mean": 100.0, "global_seqlen/balanced_max": 150.0},
        {},
        "trainer.balance_batch",
    ),
    "recomputed": (
        "update_actor",
        {"perf/recomputed_blocks/actor": 5.0},
        {},
        "actor_rollout_ref.model.enable_gradient_checkpointing",
    ),
    "rows": (
        "update_actor",
        {},
        nested(actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=1),
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    ),
    "epochs": ("update_actor", {}, nested(actor_rollout_ref__actor__ppo_epochs=4), f"{ACTOR}.ppo_epochs"),
    "one update": (
        "old_log_prob",
        {"timing_s/old_log_prob": 1.0},
        nested(actor_rollout_ref__actor__ppo_mini_batch_size=4, data__train_batch_size=8),
        f"{ACTOR}.ppo_mini_batch_size",
    ),
    "reference": ("ref", {"timing_s/ref": 1.0}, {}, f"{ACTOR}.use_kl_loss"),
    "driver scores": ("reward", {}, nested(reward__num_workers=0), "reward.num_workers"),
    "timeouts": ("reward", {"reward/timeout_count": 2.0}, {}, "reward.timeout"),
    "rewards afterwards": (
        "reward",
        {},
        nested(reward__num_workers=4, reward__launch_reward_fn_async=False),
        "reward.launch_reward_fn_async",
    ),
    "saves": ("save_checkpoint", {"timing_s/save_checkpoint": 1.0}, {}, "trainer.save_freq"),
    "checks weights": (
        "update_weights",
        {"timing_s/update_weights": 1.0, "perf/rollout/weight_check_seconds": 0.8},
        {},
        f"{ROLLOUT}.name",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_names_the_key_to_turn(case):
    stage, metrics, config, key = CASES[case]
    found = finding(stage, STEP | metrics, config)
    assert key in found.keys
    assert set(found.keys) <= set(leaves())


def test_a_stage_that_fares_well_is_not_told_what_is_wrong_elsewhere():
    even = {"global_seqlen/mean": 100.0, "global_seqlen/balanced_max": 101.0, "perf/recomputed_blocks/actor": 0.0}
    assert "trainer.balance_batch" not in finding("update_actor", STEP | even).keys
    occupied = {"perf/rollout/max_running": 8.0, "perf/rollout/rows_per_step": 7.0}
    config = nested(actor_rollout_ref__rollout__max_num_seqs=1024, actor_rollout_ref__rollout__name="native")
    assert finding("gen", STEP | occupied, config).keys == ("data.train_batch_size", f"{ROLLOUT}.n")


def test_a_report_needs_no_torch():
    code = "import sys, burnish.trainer.ppo.bottleneck; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
