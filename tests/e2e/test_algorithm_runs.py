"""What the algorithms beside plain GRPO and PPO do in whole runs, as metrics and batches show it."""

import json
from typing import ClassVar

import pytest
import torch

from burnish.protocol import DataProto
from burnish.trainer.main_ppo import Parts, TaskRunner
from burnish.utils.errors import ConfigError, RewardError, TrainingError
from tests.e2e.runs import TINY, logged, tiny_run

HOT = "actor_rollout_ref.rollout.temperature=2"


class Recorder(TaskRunner):
    """Keeps what the advantage stage returns, step by step."""

    batches: ClassVar[list[DataProto]]

    def build_trainer(self, config, parts):
        trainer = super().build_trainer(config, parts)
        Recorder.batches = []
        compute = trainer._compute_advantage

        def recorded(batch):
            batch = compute(batch)
            self.batches.append(batch.select(deepcopy=True))
            return batch

        trainer._compute_advantage = recorded
        return trainer


def run(run_dir, *overrides, reward_fn=None, steps=2, task_runner_class=Recorder):
    parts = Parts(reward_fn=reward_fn) if reward_fn else None
    steps = f"trainer.total_training_steps={steps}"
    tiny_run(run_dir, steps, *overrides, parts=parts, task_runner_class=task_runner_class)
    return Recorder.batches


def by_text(data_source, solution_str, ground_truth, extra_info=None):
    """A score that tells any two responses apart."""
    return sum(map(ord, solution_str)) % 97 / 97


# ReMax


def test_remaxs_baseline_is_the_score_of_the_greedy_response(tmp_path):
    train = TINY / "data" / "train.jsonl"
    batches = run(
        tmp_path,
        "algorithm.adv_estimator=remax",
        HOT,
        "data.train_max_samples=8",
        # The same prompts, answered greedily by the same weights.
        f"data.val_files={train}",
        "data.val_max_samples=8",
        "trainer.val_before_train=true",
        f"trainer.validation_data_dir={tmp_path / 'val'}",
        reward_fn=by_text,
        steps=1,
    )
    rows = [json.loads(line) for line in (tmp_path / "val" / "0.jsonl").read_text().splitlines()]
    greedy = {row["uid"].removeprefix("val-"): row["score"] for row in rows}
    batch = batches[0]
    expected = [greedy[uid.removeprefix("epoch0-")] for uid in batch.non_tensor_batch["uid"]]
    assert len(batch) == 32
    assert batch.tensors["reward_baselines"].tolist() == pytest.approx(expected)
    scores = batch.tensors["token_level_scores"].sum(-1)
    assert not torch.allclose(scores, torch.tensor(expected))
    first = batch.tensors["advantages"][:, 0]
    assert torch.allclose(first, scores - torch.tensor(expected), atol=1e-6)
    metrics = logged(tmp_path)[-1]
    assert metrics["reward/baseline_mean"] == pytest.approx(sum(expected) / 32)
    assert metrics["reward/baseline_abstain_count"] == 0
    assert metrics["critic/score/mean"] == pytest.approx(scores.mean().item())


def test_the_greedy_responses_change_nothing_about_the_sampled_ones(tmp_path):
    """Nor does validation: what is sampled depends on its own random stream alone."""
    plain = run(tmp_path / "grpo", "algorithm.adv_estimator=grpo", HOT, reward_fn=by_text, steps=1)[0]
    overrides = ["algorithm.adv_estimator=remax", "trainer.val_before_train=true", HOT]
    beside = run(tmp_path / "remax", *overrides, reward_fn=by_text, steps=1)[0]
    for key in ("responses", "rollout_log_probs", "token_level_scores"):
        assert torch.equal(plain.tensors[key], beside.tensors[key]), key


def test_a_greedy_response_without_a_score_takes_its_prompt_out_of_training(tmp_path):
    calls = []

    def none_to_the_first_greedy(data_source, solution_str, ground_truth, extra_info=None):
        # The greedy responses, one to each of eight prompts, are scored first.
        calls.append(solution_str)
        return None if len(calls) == 1 else by_text(data_source, solution_str, ground_truth)

    batches = run(tmp_path, "algorithm.adv_estimator=remax", HOT, reward_fn=none_to_the_first_greedy, steps=1)
    metrics = logged(tmp_path)[0]
    assert len(calls) == 8 + 32
    assert metrics["reward/baseline_abstain_count"] == 1
    assert metrics["reward/abstain_count"] == 0
    assert metrics["training/num_valid_rows"] == 28
    assert batches[0].tensors["loss_mask"].any(-1).tolist() == [False] * 4 + [True] * 28


# GDPO

GDPO = ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[score,brevity]", HOT]


def correct_and_short(data_source, solution_str, ground_truth, extra_info=None):
    # None for one in a few: what this response is worth in the second respect is not known.
    brevity = None if solution_str.startswith("1") else -len(solution_str)
    return {"score": by_text(data_source, solution_str, ground_truth), "brevity": brevity}


def test_gdpo_trains_on_components_and_leaves_out_rows_without_one(tmp_path):
    batches = run(tmp_path, *GDPO, reward_fn=correct_and_short)
    for metrics, batch in zip(logged(tmp_path), batches, strict=True):
        num_incomplete = metrics["reward/gdpo_incomplete_count"]
        assert 0 < num_incomplete < 32
        assert metrics["training/num_valid_rows"] == 32 - num_incomplete
        assert batch.tensors["reward_components"].shape == (32, 2)
        assert batch.tensors["advantages"].isfinite().all()
        assert metrics["actor/grad_norm"] > 0


def test_gdpo_stops_at_an_incomplete_row_if_asked_to(tmp_path):
    with pytest.raises(RewardError, match="brevity"):
        run(tmp_path, *GDPO, "reward.on_error=raise", reward_fn=correct_and_short)


def test_a_component_that_the_reward_function_does_not_return_is_refused_before_training(tmp_path):
    with pytest.raises(ConfigError, match=r"returns no number brevity.* are: score, acc\."):
        run(tmp_path, *GDPO)
    assert not (tmp_path / "metrics.jsonl").exists()


# PF-PPO


def test_pf_ppo_draws_rows_by_the_seed(tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        # The same responses in all three: only the trainer's own draw differs.
        batches = run(
            tmp_path / name,
            "algorithm.use_pf_ppo=true",
            f"trainer.seed={seed}",
            "data.seed=1",
            "actor_rollout_ref.rollout.seed=1",
            HOT,
            reward_fn=by_text,
            steps=1,
        )
        # The batch stays as it was generated: scores are logged, and responses kept, of every row and not of those drawn.
        others = batches[0].non_tensor_batch
        assert len(set(zip(others["uid"], others["sample_index"], strict=True))) == len(batches[0]) == 32
    first, again, other = (logged(tmp_path / name)[0] for name in "abc")
    assert first == again
    assert first["pf_ppo/num_distinct_rows"] < 32
    assert first["critic/score/mean"] == other["critic/score/mean"]
    assert first["actor/grad_norm"] != other["actor/grad_norm"]


# The rollout's log-probs


def raw_metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_bypass_mode_makes_no_pass_and_takes_the_same_step_where_the_policies_agree(tmp_path):
    decoupled = ["actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    batches = {"decoupled": run(tmp_path / "decoupled", *decoupled, reward_fn=by_text)}
    bypass = [*decoupled, "algorithm.rollout_correction.bypass_mode=true"]
    batches["bypass"] = run(tmp_path / "bypass", *bypass, reward_fn=by_text)
    ours, theirs = (raw_metrics(tmp_path / name)[0] for name in ("decoupled", "bypass"))
    assert "timing_s/old_log_prob" in ours
    assert "timing_s/old_log_prob" not in theirs
    tensors = batches["bypass"][0].tensors
    assert torch.equal(tensors["old_log_probs"], tensors["rollout_log_probs"])
    for key in ("actor/grad_norm", "actor/pg_loss", "actor/ppo_kl"):
        assert theirs[key] == pytest.approx(ours[key], rel=2e-4, abs=1e-5), key


OWN_ESTIMATOR = "algorithm.adv_estimator=tests.e2e.own_estimator:by_surprise"


@pytest.mark.parametrize("bypass", [False, True])
def test_an_estimator_of_ones_own_gets_the_old_log_probs_that_it_names(tmp_path, bypass):
    mode = f"algorithm.rollout_correction.bypass_mode={str(bypass).lower()}"
    (batch,) = run(tmp_path, OWN_ESTIMATOR, mode, reward_fn=by_text, steps=1)
    tensors = batch.tensors
    scores = tensors["token_level_scores"].sum(-1, keepdim=True)
    assert torch.equal(tensors["advantages"], -tensors["old_log_probs"] * scores * tensors["response_mask"])
    assert ("timing_s/old_log_prob" in raw_metrics(tmp_path)[0]) is not bypass
    assert logged(tmp_path)[0]["actor/grad_norm"] > 0


def test_weights_of_a_rollout_that_agrees_with_the_trainer_are_one(tmp_path):
    preset = "algorithm.rollout_correction.preset=decoupled_seq_is_rs"
    batches = run(tmp_path, preset, reward_fn=by_text)
    for metrics, batch in zip(logged(tmp_path), batches, strict=True):
        assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-4)
        assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 0
        assert metrics["rollout_corr/kl"] == pytest.approx(0, abs=1e-4)
        mask = batch.tensors["loss_mask"]
        assert torch.equal(mask, batch.tensors["response_mask"])
        assert torch.allclose(batch.tensors["rollout_is_weights"][mask], torch.ones(()), atol=1e-3)


class Disagreeing(Recorder):
    """The rollout claims other log-probs for the first response to every prompt."""

    def build_trainer(self, config, parts):
        trainer = super().build_trainer(config, parts)
        generate = trainer._generate

        def disagreeing(batch):
            batch = generate(batch)
            first = torch.tensor([index == 0 for index in batch.non_tensor_batch["sample_index"]])
            log_probs = batch.tensors["rollout_log_probs"]
            batch.tensors["rollout_log_probs"] = torch.where(first[:, None], log_probs - 1.0, log_probs)
            return batch

        trainer._generate = disagreeing
        return trainer


REJECTION = [
    "algorithm.rollout_correction.rollout_rs=seq_max_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=2.0",
]


def test_rejected_rows_are_in_no_statistic(tmp_path):
    batches = run(tmp_path, *REJECTION, HOT, reward_fn=by_text, steps=1, task_runner_class=Disagreeing)
    batch = batches[0]
    rejected = ~batch.tensors["loss_mask"].any(-1)
    assert rejected.tolist() == [i % 4 == 0 for i in range(32)]
    assert logged(tmp_path)[0]["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(0.25)
    scores, uids = batch.tensors["token_level_scores"].sum(-1), batch.non_tensor_batch["uid"]
    advantages = batch.tensors["advantages"][:, 0]
    assert not advantages[rejected].any()
    for uid in set(uids):
        rows = torch.tensor([u == uid for u in uids]) & ~rejected
        expected = (scores[rows] - scores[rows].mean()) / (scores[rows].std() + 1e-6)
        assert torch.allclose(advantages[rows], expected, atol=1e-5)


def test_the_distance_of_the_policies_is_logged_wherever_there_was_a_pass(tmp_path):
    run(tmp_path, "actor_rollout_ref.actor.ppo_mini_batch_size=4", steps=1)
    assert logged(tmp_path)[0]["rollout_corr/k3_kl"] == pytest.approx(0, abs=1e-4)


# What must not go on


class WithPoison(TaskRunner):
    """One log-prob of the pass before the update is NaN."""

    def build_trainer(self, config, parts):
        trainer = super().build_trainer(config, parts)
        compute = trainer._compute_old_log_prob

        def poisoned(batch):
            batch = compute(batch)
            log_probs = batch.tensors["old_log_probs"].clone()
            log_probs[3, 0] = torch.nan
            batch.tensors["old_log_probs"] = log_probs
            return batch

        trainer._compute_old_log_prob = poisoned
        return trainer


def test_a_log_prob_that_is_nan_ends_the_run_by_name_and_leaves_the_batch(tmp_path):
    with pytest.raises(TrainingError, match=r"Step 1: old_log_probs holds NaN or inf in 1 .* row 3, token 0"):
        run(tmp_path, "actor_rollout_ref.actor.ppo_mini_batch_size=4", task_runner_class=WithPoison)
    batch = DataProto.load_from_disk(str(tmp_path / "failed_batch_step_1"))
    assert torch.isnan(batch.tensors["old_log_probs"]).sum() == 1
    assert len(set(batch.non_tensor_batch["uid"])) == 8


SILENT = {
    "ppo": ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"],
    "remax": ["algorithm.adv_estimator=remax"],
    "gdpo": ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[score]"],
    "token-baseline": ["algorithm.adv_estimator=optimal_token_baseline", *REJECTION],
    "pf-ppo": ["algorithm.use_pf_ppo=true"],
    "bypass": ["algorithm.rollout_correction.preset=bypass_pg_geo_rs"],
    "kl-cov": ["actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov"],
}


@pytest.mark.parametrize("algorithm", SILENT)
def test_steps_without_a_single_score_are_no_updates_and_end_the_run(tmp_path, algorithm):
    overrides = [*SILENT[algorithm], "trainer.max_skipped_updates=1"]
    with pytest.raises(TrainingError, match=r"Step 2: the (actor|critic) was not updated in 2 steps .* no token"):
        run(tmp_path, *overrides, reward_fn=lambda **_: None, steps=3)
    (metrics,) = logged(tmp_path)
    assert metrics["training/num_valid_rows"] == 0
    assert metrics["actor/empty_updates"] == 1
    batch = DataProto.load_from_disk(str(tmp_path / "failed_batch_step_2"))
    assert not batch.tensors["valid"].any()
    assert not batch.tensors["loss_mask"].any()


# Long responses


def test_long_responses_are_punished_and_the_accuracy_stays_visible(tmp_path):
    run(
        tmp_path,
        "reward.reward_manager.name=dapo",
        "reward.reward_kwargs.overlong_buffer_cfg.enable=true",
        "reward.reward_kwargs.overlong_buffer_cfg.len=8",
        "reward.reward_kwargs.overlong_buffer_cfg.log=true",
        "trainer.val_before_train=true",
        reward_fn=lambda data_source, solution_str, ground_truth, extra_info: 1.0,
        steps=1,
    )
    before, metrics = logged(tmp_path)
    # The limit is 8 tokens and the buffer all of it: every token costs an eighth.
    length = metrics["response_length/mean"]
    assert metrics["reward/acc/mean"] == 1
    assert metrics["reward/overlong/mean"] == 1
    assert metrics["reward/overlong_reward/mean"] == pytest.approx(-length / 8)
    assert metrics["critic/score/mean"] == pytest.approx(1 - length / 8)
    assert before["val-core/burnish/arithmetic/acc/mean@1"] == 1
    assert before["val-aux/burnish/arithmetic/reward/mean@1"] < 1
