"""Dynamic sampling in whole runs: it fills up the batch, it ends, and it resumes."""

import json
import logging

import pytest

from burnish.trainer.main_ppo import Parts
from burnish.utils.errors import ConfigError, TrainingError
from tests.e2e.runs import logged, tiny_run
from tests.e2e.test_resume import assert_equal_files

# Hot, so that responses to a prompt differ.
FILTER = [
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.metric=score",
    "actor_rollout_ref.rollout.temperature=2",
]


def run(run_dir, *overrides, reward_fn=None):
    return tiny_run(run_dir, *FILTER, *overrides, parts=Parts(reward_fn=reward_fn) if reward_fn else None)


def of_odd_truths(data_source, solution_str, ground_truth, extra_info=None):
    """Responses differ in score only where the answer is odd."""
    is_odd = int(ground_truth) % 2
    return {"score": sum(map(ord, solution_str)) % 100 / 100 if is_odd else 1.0, "is_odd": is_odd}


def always_half(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5


def test_further_prompts_are_answered_until_the_batch_is_full(tmp_path):
    run(tmp_path, reward_fn=of_odd_truths)
    metrics = logged(tmp_path)
    assert len(metrics) == 3
    assert max(m["train/num_gen_batches"] for m in metrics) > 1
    for m in metrics:
        counts = [m[f"filter_groups/{kind}_prompts"] for kind in ("kept", "constant", "unscored", "surplus")]
        assert counts[0] == 8
        assert sum(counts) == 8 * m["train/num_gen_batches"]
        assert m["filter_groups/filled"] == 1
        assert m["training/num_rows"] == 32
        # Of all responses of the step, not of those that are trained on.
        assert 0.2 < m["reward/is_odd/mean"] < 0.8
        assert m["actor/grad_norm"] > 0


def test_only_prompts_that_vary_are_trained_on(tmp_path):
    folder = tmp_path / "rollouts"
    run(tmp_path, "trainer.total_training_steps=1", f"trainer.rollout_data_dir={folder}", reward_fn=of_odd_truths)
    rows = [json.loads(line) for line in (folder / "1.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["trained"]]
    assert len(trained) == 32
    assert all(row["is_odd"] == 1 for row in trained)
    # What was sampled and left out is there too, to be looked at and replayed.
    left_out = [row for row in rows if not row["trained"]]
    assert any(row["is_odd"] == 0 for row in left_out)
    assert not {row["uid"] for row in trained} & {row["uid"] for row in left_out}


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        (2, "no group of 2 generation batches (algorithm.filter_groups.max_num_gen_batches=2)"),
        (0, "no group of 2 generation batches (a whole pass over the data)"),
    ],
)
def test_a_constant_reward_ends_the_run_with_what_was_constant(tmp_path, bound, words):
    overrides = [f"algorithm.filter_groups.max_num_gen_batches={bound}", "data.train_max_samples=16"]
    with pytest.raises(TrainingError) as caught:
        run(tmp_path, *overrides, reward_fn=always_half)
    assert words in str(caught.value)
    assert "equal within each of 16 groups (0.5 everywhere)" in str(caught.value)
    assert logged(tmp_path) == []


def test_after_the_bound_the_step_trains_on_what_there_is(tmp_path):
    run(tmp_path, "algorithm.filter_groups.max_num_gen_batches=1", reward_fn=of_odd_truths)
    metrics = logged(tmp_path)
    kept = [m["filter_groups/kept_prompts"] for m in metrics]
    assert all(0 < k < 8 for k in kept)
    assert [m["training/num_rows"] for m in metrics] == [4 * k for k in kept]
    assert not any(m["filter_groups/filled"] for m in metrics)
    assert all(m["actor/grad_norm"] > 0 for m in metrics)


def test_one_response_to_a_prompt_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"rollout\.n=1"):
        run(tmp_path, "actor_rollout_ref.rollout.n=1", "algorithm.adv_estimator=reinforce_plus_plus")


# What else has a state or draws at random: a critic alone at first, passes in orders of their own, rows drawn anew.
MANY_PASSES = [
    "algorithm.adv_estimator=gae",
    "algorithm.use_pf_ppo=true",
    "trainer.critic_warmup=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.shuffle=true",
]


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param([], id="grpo"), pytest.param(MANY_PASSES, id="ppo-with-many-passes", marks=pytest.mark.slow)],
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, algorithm):
    # Four batches an epoch and more than one a step: a step's rounds go over the end of an epoch.
    common = ["trainer.save_freq=1", "trainer.resume_mode=auto", "data.train_max_samples=32", *algorithm]
    run(tmp_path / "whole", "trainer.total_training_steps=4", *common, reward_fn=of_odd_truths)
    run(tmp_path / "parts", "trainer.total_training_steps=2", *common, reward_fn=of_odd_truths)
    run(tmp_path / "parts", "trainer.total_training_steps=4", *common, reward_fn=of_odd_truths)
    whole = logged(tmp_path / "whole")
    assert whole == logged(tmp_path / "parts")
    assert whole[-1]["training/epoch"] > 0
    assert max(metrics["train/num_gen_batches"] for metrics in whole) > 1
    assert [("actor/grad_norm" in metrics) for metrics in whole] == [not algorithm, not algorithm, True, True]
    assert_equal_files(tmp_path / "whole" / "global_step_4", tmp_path / "parts" / "global_step_4")


def test_a_metric_that_the_reward_function_does_not_return_is_refused_before_training(tmp_path):
    with pytest.raises(ConfigError, match=r"filter_groups\.metric=accuracy: .* are: score, is_odd\."):
        run(tmp_path, "algorithm.filter_groups.metric=accuracy", reward_fn=of_odd_truths)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_the_built_in_functions_accuracy_is_a_metric(tmp_path):
    run(tmp_path, "algorithm.filter_groups.metric=acc", "trainer.total_training_steps=1")
    assert logged(tmp_path)[0]["filter_groups/kept_prompts"] > 0


def dislikes_silence(data_source, solution_str, ground_truth, extra_info=None):
    if not solution_str:
        raise ValueError("say something")
    return float(len(solution_str))


def test_a_function_that_fails_on_the_probe_is_asked_again_by_the_first_batch(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with pytest.raises(TrainingError, match=r"metric=accuracy: .* are: score\."):
        run(tmp_path, "algorithm.filter_groups.metric=accuracy", reward_fn=dislikes_silence)
    assert "the first batch checks what it returns" in caplog.text


@pytest.mark.slow
def test_two_ranks_collect_what_one_collects(tmp_path):
    common = ["trainer.total_training_steps=1"]
    run(tmp_path / "one", *common, reward_fn=of_odd_truths)
    two_ranks = ["trainer.controller=ray", "trainer.n_gpus_per_node=2"]
    run(tmp_path / "two", *common, *two_ranks, reward_fn=of_odd_truths)
    one, two = logged(tmp_path / "one")[0], logged(tmp_path / "two")[0]
    for key in one:
        if key.startswith(("filter_groups/", "reward/", "train/", "critic/score", "training/num")):
            assert two[key] == one[key], key
    assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=2e-4)
