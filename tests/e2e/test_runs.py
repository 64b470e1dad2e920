"""Whole runs: determinism, both controllers, resume, several ranks, every estimator."""

import json

import pytest
import torch

from burnish.config import load_config
from burnish.engine import rows
from burnish.model.packing import pack
from burnish.trainer.main_ppo import Parts, TaskRunner, run_ppo
from burnish.trainer.ppo.bottleneck import stage_seconds
from burnish.trainer.ppo.ray_trainer import RayPPOTrainer
from burnish.utils.errors import ResourceError, TrainingError
from tests.e2e.runs import logged, tiny_run


def test_two_runs_with_one_seed_are_identical_and_another_seed_differs(tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        tiny_run(tmp_path / name, f"trainer.seed={seed}", "trainer.total_training_steps=2")
    first, second, other = (logged(tmp_path / name) for name in "abc")
    assert len(first) == 2
    assert first == second
    assert first != other


@pytest.mark.slow
def test_local_and_ray_controllers_are_the_same_to_the_bit(tmp_path):
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    common = ["trainer.total_training_steps=2", "algorithm.adv_estimator=gae", kl]
    tiny_run(tmp_path / "local", "trainer.controller=local", *common)
    tiny_run(tmp_path / "ray", "trainer.controller=ray", *common)
    assert logged(tmp_path / "local") == logged(tmp_path / "ray")


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param((), marks=pytest.mark.slow),
        # An odd number of groups over two ranks; seven prompts to validate, in batches of four and three.
        (
            "data.train_batch_size=3",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=3",
            "data.val_max_samples=7",
            "data.val_batch_size=4",
            "trainer.test_freq=1",
        ),
    ],
    ids=["even", "uneven"],
)
def test_two_ranks_learn_what_one_learns(tmp_path, batch):
    common = ["trainer.total_training_steps=1", *batch]
    tiny_run(tmp_path / "one", *common)
    tiny_run(tmp_path / "two", *common, "trainer.controller=ray", "trainer.n_gpus_per_node=2")
    one, two = logged(tmp_path / "one"), logged(tmp_path / "two")
    # The first step starts from equal weights: same samples, same gradient; only the order of sums differs.
    for key in ("critic/score/mean", "response_length/mean", "actor/pg_loss", "actor/entropy", "actor/grad_norm"):
        assert two[0][key] == pytest.approx(one[0][key], rel=2e-4, abs=1e-5), key
    assert [set(metrics) for metrics in two] == [set(metrics) for metrics in one]
    if batch:
        assert one[0]["training/num_rows"] == two[0]["training/num_rows"] == 12
        assert one[0]["val-aux/burnish/arithmetic/num_prompts"] == two[0]["val-aux/burnish/arithmetic/num_prompts"] == 7
        assert "val-core/burnish/arithmetic/acc/mean@1" in two[0]


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    common = ["trainer.save_freq=2", "trainer.resume_mode=auto", "algorithm.adv_estimator=gae"]
    tiny_run(tmp_path / "whole", "trainer.total_training_steps=4", *common)
    tiny_run(tmp_path / "parts", "trainer.total_training_steps=2", *common)
    tiny_run(tmp_path / "parts", "trainer.total_training_steps=4", *common)
    assert logged(tmp_path / "whole") == logged(tmp_path / "parts")


def test_a_run_that_is_complete_already_ends_at_once(tmp_path):
    common = ["trainer.save_freq=1", "trainer.resume_mode=auto", "trainer.total_training_steps=1"]
    tiny_run(tmp_path, *common)
    assert tiny_run(tmp_path, *common).steps == 1
    assert len(logged(tmp_path)) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        # Without a critic there is none to warm up.
        ["algorithm.adv_estimator=rloo", "trainer.critic_warmup=9"],
        ["algorithm.adv_estimator=reinforce_plus_plus", "actor_rollout_ref.rollout.n=1"],
        ["algorithm.norm_adv_by_std_in_grpo=false", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"],
        ["algorithm.adv_estimator=gae", "trainer.critic_warmup=1", "algorithm.use_kl_in_reward=true"],
        ["actor_rollout_ref.rollout.name=hf"],
        [
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=5",
        ],
        ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64"],
    ],
)
def test_every_way_to_train_trains(tmp_path, overrides):
    tiny_run(tmp_path, "trainer.total_training_steps=2", *overrides)
    metrics = logged(tmp_path)
    assert len(metrics) == 2
    warming_up = "trainer.critic_warmup=1" in overrides
    assert ("actor/grad_norm" in metrics[0]) == (not warming_up)
    assert metrics[1]["actor/grad_norm"] > 0
    if "algorithm.adv_estimator=gae" in overrides:
        assert metrics[0]["critic/grad_norm"] > 0


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_shared_prompts_change_no_step(tmp_path, monkeypatch, ranks):
    packed = []
    monkeypatch.setattr(rows, "pack", lambda *args, **how: packed.append(pack(*args, **how)) or packed[-1])
    common = ["trainer.total_training_steps=1", "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"]
    if ranks == 2:
        common += ["trainer.controller=ray", "trainer.n_gpus_per_node=2", "trainer.balance_batch=true"]
    num_tokens = []
    for share in ("false", "true", "null"):
        packed.clear()
        tiny_run(tmp_path / share, *common, f"actor_rollout_ref.actor.use_prefix_grouper={share}")
        num_tokens.append(sum(each.num_tokens for each in packed))
    alone, shared, left_open = (logged(tmp_path / share)[0] for share in ("false", "true", "null"))
    keys = [key for key in alone if key.startswith(("actor/", "critic/", "training/"))]
    assert {"actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "training/rollout_probs_diff_mean"} <= set(keys)
    for key in keys:
        assert shared[key] == pytest.approx(alone[key], rel=2e-4, abs=1e-5), key
    if ranks == 1:
        # Prompts of the demo are about as long as its responses, of which there are four.
        assert num_tokens[1] < 0.8 * num_tokens[0]
        assert num_tokens[2] == num_tokens[1]
    assert left_open == shared


def test_rollout_and_trainer_agree_on_the_probabilities(tmp_path):
    tiny_run(tmp_path)
    assert all(metrics["training/rollout_probs_diff_max"] < 1e-4 for metrics in logged(tmp_path))


def test_generations_are_dumped_whole_and_validation_counts_every_prompt(tmp_path):
    tiny_run(
        tmp_path,
        "trainer.total_training_steps=1",
        f"trainer.rollout_data_dir={tmp_path / 'rollouts'}",
        f"trainer.validation_data_dir={tmp_path / 'val'}",
        "trainer.val_before_train=true",
        "data.val_batch_size=7",
        "data.val_max_samples=16",
    )
    rows = [json.loads(line) for line in (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()]
    assert len(rows) == 32
    assert all(row["uid"] and row["prompt"] and "score" in row and row["step"] == 1 for row in rows)
    assert len((tmp_path / "val" / "0.jsonl").read_text().splitlines()) == 16
    assert logged(tmp_path)[0]["val-aux/burnish/arithmetic/num_prompts"] == 16


def test_tokens_of_validation_do_not_count_for_the_pace_of_the_rollout(tmp_path):
    tiny_run(tmp_path, "trainer.total_training_steps=1", "trainer.test_freq=1")
    (metrics,) = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert "timing_s/testing" in metrics
    num_tokens = metrics["timing_s/gen"] * 1000 / metrics["timing_per_token_ms/gen"]
    assert num_tokens == pytest.approx(metrics["response_length/mean"] * metrics["training/num_rows"])
    assert metrics["perf/rollout/response_tokens"] == pytest.approx(num_tokens)
    assert metrics["perf/rollout/prompt_tokens"] == metrics["prompt_length/mean"] * metrics["training/num_rows"]
    # The samples of a prompt share it.
    assert metrics["perf/rollout/prefilled_tokens"] <= metrics["perf/rollout/prompt_tokens"] / 4
    assert metrics["perf/rollout/decode_steps"] >= metrics["response_length/max"]
    assert metrics["perf/rollout/preemptions"] == 0


def test_a_reward_function_given_as_a_python_object_is_used(tmp_path):
    def longer_is_better(data_source, solution_str, ground_truth, extra_info=None):
        return float(len(solution_str))

    tiny_run(tmp_path, "trainer.total_training_steps=1", parts=Parts(reward_fn=longer_is_better))
    assert logged(tmp_path)[0]["critic/score/mean"] > 1


@pytest.mark.slow
def test_a_critic_in_a_pool_of_its_own_learns_what_a_colocated_one_does(tmp_path):
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    updates = ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "critic.ppo_mini_batch_size=2"]
    common = ["algorithm.adv_estimator=gae", "trainer.total_training_steps=2", "trainer.controller=ray", kl, *updates]
    tiny_run(tmp_path / "together", *common)
    tiny_run(tmp_path / "apart", *common, "critic.nnodes=1", "critic.n_gpus_per_node=1")
    together, apart = logged(tmp_path / "together"), logged(tmp_path / "apart")
    for one, other in zip(together, apart, strict=True):
        assert one.keys() == other.keys()
        # Threads per worker differ, and with them the order of sums.
        for key in ("critic/vf_loss", "critic/grad_norm", "actor/pg_loss", "actor/grad_norm"):
            assert other[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key
    lines = [json.loads(line) for line in (tmp_path / "apart" / "metrics.jsonl").read_text().splitlines()]
    for step in lines:
        # The stages take turns in what the step waits for, so their seconds are no more than its own.
        assert step["timing_s/values_beside"] > 0
        assert step["timing_s/update_critic_beside"] > 0
        assert sum(stage_seconds(step).values()) == pytest.approx(step["timing_s/step"], rel=1e-3)


@pytest.mark.slow
def test_more_workers_than_the_cluster_has_are_refused_with_both_numbers(tmp_path):
    with pytest.raises(ResourceError, match="64"):
        tiny_run(tmp_path, "trainer.controller=ray", "trainer.n_gpus_per_node=64", "actor_rollout_ref.rollout.n=8")


def test_the_run_leaves_its_configuration_behind(tmp_path):
    tiny_run(tmp_path / "first", "trainer.total_training_steps=1", "trainer.seed=11")
    saved = tmp_path / "first" / "config.yaml"
    assert "seed: 11" in saved.read_text()
    again = load_config([f"trainer.default_local_dir={tmp_path / 'second'}"], "config", str(saved.parent))
    run_ppo(again, quiet=True)
    assert logged(tmp_path / "first") == logged(tmp_path / "second")


def test_updates_that_are_skipped_too_often_end_the_run(tmp_path):
    with pytest.raises(TrainingError, match="max_skipped_updates=1"):
        tiny_run(
            tmp_path,
            "trainer.total_training_steps=20",
            "trainer.max_skipped_updates=1",
            task_runner_class=WithPoisonedScores,
        )
    metrics = logged(tmp_path)
    assert metrics[-1]["actor/skipped_updates"] == 1


class WithPoisonedScores(TaskRunner):
    """From the second step on, advantages are so large that the gradient is not finite."""

    def build_trainer(self, config, parts):
        trainer = super().build_trainer(config, parts)
        compute = trainer._compute_advantage

        def poisoned(batch):
            batch = compute(batch)
            if trainer.global_steps >= 2:
                batch.tensors["advantages"] = torch.full_like(batch.tensors["advantages"], 3e38)
            return batch

        trainer._compute_advantage = poisoned
        return trainer


class GreedyForPraise(RayPPOTrainer):
    """A trainer with a stage of its own: every response scores 7."""

    def _compute_reward(self, batch):
        batch = super()._compute_reward(batch)
        scores = batch.tensors["token_level_scores"]
        batch.tensors["token_level_scores"] = torch.where(scores != 0, 7.0, scores)
        return batch


class WithOwnTrainer(TaskRunner):
    def trainer_class(self):
        return GreedyForPraise


def test_a_task_runner_brings_a_trainer_with_a_stage_of_its_own(tmp_path):
    tiny_run(tmp_path, "trainer.total_training_steps=1", task_runner_class=WithOwnTrainer)
    assert logged(tmp_path)[0]["critic/score/max"] == 7.0
