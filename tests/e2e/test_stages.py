"""After each stage exactly the keys of the table in burnish/protocol.py are in the batch."""

import pytest

from burnish.protocol import DataProto
from burnish.trainer.main_ppo import TaskRunner
from tests.e2e.runs import tiny_run

FULL = {"prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask"}
ROLLOUT = FULL | {"rollout_log_probs", "policy_version"}
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
        for name in STAGES:
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
