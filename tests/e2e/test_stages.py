"""After each stage exactly the keys of the table in burnish/protocol.py are in the batch."""

from itertools import pairwise

import pytest

from burnish.protocol import DataProto
from burnish.trainer.main_ppo import TaskRunner
from tests.e2e.runs import tiny_run

FULL = {"prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask"}
ROLLOUT = FULL | {"rollout_log_probs", "policy_version", "last_policy_version", "num_preemptions"}
REWARD = ROLLOUT | {"token_level_scores", "valid"}
PROMPT_OBJECTS = {"uid", "sample_index", "raw_prompt", "data_source", "reward_model", "extra_info"}

STAGES = [
    "_get_gen_batch",
    "_generate",
    "_compute_reward",
    "_compute_old_log_prob",
    "_compute_ref_log_prob",
    "_compute_values",
    "_compute_advantage",
]


class Recorder(TaskRunner):
    """Runs as usual, and writes down which keys each stage returns."""

    seen: dict[str, tuple[set[str], set[str]]]

    def build_trainer(self, config, parts):
        trainer = super().build_trainer(config, parts)
        type(self).seen = {}
        for name in [*STAGES, "_filter_groups"]:
            setattr(trainer, name, self._recording(name, getattr(trainer, name)))
        return trainer

    def _recording(self, name, method):
        def recorded(*args, **kwargs):
            batch = method(*args, **kwargs)
            assert isinstance(batch, DataProto)
            self.seen[name] = (set(batch.batch.keys()), set(batch.non_tensor_batch))
            return batch

        return recorded


def record(run_dir, *overrides):
    tiny_run(run_dir, "trainer.total_training_steps=1", *overrides, task_runner_class=Recorder)
    return Recorder.seen


def test_grpo_with_one_update_per_batch_skips_the_old_log_prob_pass(tmp_path):
    seen = record(tmp_path)
    tensors = [seen[name][0] for name in STAGES]
    assert tensors == [
        {"input_ids", "attention_mask", "position_ids"},
        ROLLOUT,
        REWARD,
        REWARD,
        REWARD,
        REWARD,
        REWARD | {"token_level_rewards", "advantages", "returns", "loss_mask"},
    ]


def test_ppo_with_critic_and_kl_adds_every_key_of_the_table(tmp_path):
    seen = record(
        tmp_path,
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    )
    old, ref, values = {"old_log_probs"}, {"ref_log_prob"}, {"values"}
    tensors = [seen[name][0] for name in STAGES]
    assert tensors == [
        {"input_ids", "attention_mask", "position_ids"},
        ROLLOUT,
        REWARD,
        REWARD | old,
        REWARD | old | ref,
        REWARD | old | ref | values,
        REWARD | old | ref | values | {"token_level_rewards", "advantages", "returns", "loss_mask"},
    ]


ADVANTAGES = {"token_level_rewards", "advantages", "returns", "loss_mask"}


def added(seen):
    """The tensors that each stage from the rollout on adds to those that were there."""
    tensors = [seen[name][0] for name in STAGES]
    assert all(before <= after for before, after in pairwise(tensors))
    return {name: after - before for name, before, after in zip(STAGES[1:], tensors, tensors[1:], strict=False)}


@pytest.mark.parametrize(
    ("overrides", "stage", "keys"),
    [
        (["algorithm.adv_estimator=remax"], "_generate", {"reward_baselines"}),
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[score,acc]"],
            "_compute_reward",
            {"reward_components"},
        ),
        (
            ["algorithm.adv_estimator=optimal_token_baseline"],
            "_compute_old_log_prob",
            {"old_log_probs", "sum_pi_squared"},
        ),
        (["algorithm.rollout_correction.bypass_mode=true"], "_compute_old_log_prob", {"old_log_probs"}),
        (["algorithm.use_pf_ppo=true"], "_compute_advantage", set()),
    ],
    ids=["remax", "gdpo", "optimal-token-baseline", "bypass", "pf-ppo"],
)
def test_a_variant_adds_its_keys_in_one_stage_and_none_in_the_others(tmp_path, overrides, stage, keys):
    usual = {
        "_generate": ROLLOUT - {"input_ids", "attention_mask", "position_ids"},
        "_compute_reward": {"token_level_scores", "valid"},
        "_compute_old_log_prob": set(),
        "_compute_ref_log_prob": set(),
        "_compute_values": set(),
        "_compute_advantage": ADVANTAGES,
    }
    seen = record(tmp_path, *overrides)
    assert added(seen) == usual | {stage: usual[stage] | keys}


def test_a_corrected_rollout_brings_old_log_probs_and_weights(tmp_path):
    stages = added(record(tmp_path, "algorithm.rollout_correction.rollout_is=token"))
    assert stages["_compute_old_log_prob"] == {"old_log_probs"}
    assert stages["_compute_advantage"] == ADVANTAGES | {"rollout_is_weights"}


def test_the_filter_adds_nothing(tmp_path):
    seen = record(tmp_path, "algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc")
    assert seen["_filter_groups"] == seen["_compute_reward"] == seen["_compute_old_log_prob"]


def test_rows_carry_their_identity_through_every_stage(tmp_path):
    seen = record(tmp_path)
    assert seen["_get_gen_batch"][1] >= PROMPT_OBJECTS
    for name in STAGES[1:]:
        assert seen["_get_gen_batch"][1] | {"finish_reason"} <= seen[name][1], name


@pytest.mark.parametrize(
    ("overrides", "skipped"),
    [
        ([], True),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=4"], False),
        (["actor_rollout_ref.actor.ppo_epochs=2"], False),
        (["algorithm.use_kl_in_reward=true"], False),
    ],
)
def test_the_old_log_prob_pass_is_left_out_only_where_it_changes_nothing(tmp_path, overrides, skipped):
    seen = record(tmp_path, *overrides)
    assert ("old_log_probs" not in seen["_compute_old_log_prob"][0]) == skipped
