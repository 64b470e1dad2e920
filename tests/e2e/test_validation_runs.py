"""Validation in whole runs: under its names for any number of samples and sources, in every sink, and every prompt once."""

import json

import pytest

from burnish.trainer.main_ppo import Parts
from burnish.utils.errors import RewardError
from tests.e2e.runs import logged, tiny_run

SEVEN = [
    {"prompt": f"{number}+1=", "data_source": "odd" if number % 2 else "even", "ground_truth": str(number + 1)}
    for number in range(7)
]
VAL = "actor_rollout_ref.rollout.val_kwargs"


def by_length(data_source, solution_str, ground_truth, extra_info):
    """A float that is the whole return value, and another for each length."""
    return len(solution_str) / 10


@pytest.fixture
def tensorboard_steps():
    """Steps of a metric in the run's event files."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def steps(run_dir, name):
        (folder,) = {file.parent for file in run_dir.rglob("events.out.tfevents*")}
        events = accumulator.EventAccumulator(str(folder))
        events.Reload()
        return [event.step for event in events.Scalars(name)]

    return steps


@pytest.mark.parametrize("n", [1, 3])
def test_float_rewards_of_two_sources_are_in_every_sink_at_the_last_step(tmp_path, n, tensorboard_steps):
    seen = []
    tiny_run(
        tmp_path,
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.val_batch_size=4",
        "trainer.logger=[file,tensorboard]",
        "trainer.test_freq=2",
        f"{VAL}.n={n}",
        f"{VAL}.do_sample={n > 1}",
        f"{VAL}.temperature=1.0",
        parts=Parts(val_rows=SEVEN, reward_fn=by_length, callbacks=(seen.append,)),
    )
    lines = logged(tmp_path)
    # After step 2, and after the last one, which test_freq does not divide.
    assert [line["step"] for line in lines if any(key.startswith("val-core/") for key in line)] == [2, 3]
    for source, prompts in (("even", 4), ("odd", 3)):
        name = f"val-core/{source}/reward/mean@{n}"
        assert lines[-1][f"val-aux/{source}/num_prompts"] == prompts
        assert lines[-1][name] == pytest.approx(seen[-1].metrics[name])
        assert tensorboard_steps(tmp_path, name) == [2, 3]
        assert (f"val-core/{source}/reward/best@{n}/mean" in lines[-1]) == (n > 1)


def test_validation_alone_is_logged_with_its_seconds_and_its_sampling(tmp_path):
    def mean(name, *overrides):
        parts = Parts(val_rows=SEVEN[:3], reward_fn=by_length)
        tiny_run(tmp_path / name, "trainer.val_only=true", *overrides, parts=parts)
        (line,) = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        assert (line["step"], line["timing_s/testing"] > 0) == (0, True)
        return line["val-aux/response_length/mean"], [value for key, value in line.items() if "val-core" in key]

    greedy = mean("greedy")
    assert mean("top-1", f"{VAL}.do_sample=true", f"{VAL}.top_k=1", f"{VAL}.temperature=3.0") == greedy
    hot = mean("hot", f"{VAL}.do_sample=true", f"{VAL}.temperature=30.0", f"{VAL}.n=2")
    assert hot[0] != greedy[0]
    assert len(hot[1]) == 6


@pytest.mark.slow
def test_rows_that_fill_up_the_ranks_are_counted_by_nobody(tmp_path):
    lines = []
    for name, ranks in (("one", []), ("two", ["trainer.controller=ray", "trainer.n_gpus_per_node=2"])):
        parts = Parts(val_rows=SEVEN, reward_fn=by_length)
        tiny_run(tmp_path / name, "trainer.val_only=true", f"{VAL}.n=3", f"{VAL}.do_sample=true", *ranks, parts=parts)
        lines += logged(tmp_path / name)
    assert lines[0] == lines[1]
    assert lines[0]["val-aux/even/num_prompts"] + lines[0]["val-aux/odd/num_prompts"] == 7


def test_a_step_that_fails_leaves_what_its_stages_have_measured(tmp_path):
    calls = []

    def fails_in_step_two(data_source, solution_str, ground_truth, extra_info):
        calls.append(solution_str)
        if len(calls) > 32:
            raise ValueError("out of words")
        return 1.0

    with pytest.raises(RewardError, match="out of words"):
        tiny_run(tmp_path, "reward.on_error=raise", parts=Parts(reward_fn=fails_in_step_two))
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert "training/failed" not in first
    assert (second["step"], second["training/failed"]) == (2, 1.0)
    assert second["timing_s/gen"] > 0
    assert "timing_s/update_actor" not in second
