"""Validation metrics by hand and against plain enumeration of all draws; what `validate` keeps of its batches."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from burnish.protocol import DataProto
from burnish.reward.result import RewardResult
from burnish.trainer.ppo.validation import validate, validation_metrics

MAX_LENGTH = 4


def scored(rows, extra_keys=()):
    """rows: (uid, source, score, valid, extras)"""
    objects = {
        "uid": np.array([r[0] for r in rows], dtype=object),
        "data_source": np.array([r[1] for r in rows], dtype=object),
    }
    for key in extra_keys:
        objects[key] = np.array([r[4].get(key) for r in rows], dtype=object)
    return DataProto.from_dict(
        tensors={
            "token_level_scores": torch.tensor([[0.0, r[2]] for r in rows]),
            "response_mask": torch.ones(len(rows), 2, dtype=torch.bool),
            "valid": torch.tensor([r[3] for r in rows]),
        },
        non_tensors=objects,
        meta_info={"reward_extra_keys": list(extra_keys)},
    )


def metrics_of(rows, extra_keys=()):
    return validation_metrics(scored(rows, extra_keys), MAX_LENGTH)


def samples(scores, preds=None, source="x"):
    """Rows of several prompts: their scores, and the answers that the responses give."""
    return [
        (f"{source}{prompt}", source, score, True, {} if preds is None else {"pred": preds[prompt][i]})
        for prompt, row in enumerate(scores)
        for i, score in enumerate(row)
    ]


def all_draws(row, k):
    """Every draw of k with replacement, each as likely."""
    return list(itertools.product(range(len(row)), repeat=k))


def test_float_rewards_alone_give_a_core_metric_per_source():
    metrics = metrics_of([("a", "x", 1.0, True, {}), ("b", "x", 0.0, True, {}), ("c", "y", 0.5, True, {})])
    assert metrics["val-core/x/reward/mean@1"] == 0.5
    assert metrics["val-core/y/reward/mean@1"] == 0.5


@pytest.mark.timeout(20)
def test_many_sources_take_the_time_of_their_rows():
    num_sources, num_rows = 1000, 30_000
    extras = {"acc": 1.0, "format": True, "length": 5}
    rows = [(f"p{row}", f"s{row % num_sources}", 1.0, True, extras) for row in range(num_rows)]
    metrics = metrics_of(rows, tuple(extras))
    assert all(metrics[f"val-core/s{source}/acc/mean@1"] == 1.0 for source in range(num_sources))
    assert all(metrics[f"val-aux/s{source}/num_prompts"] == num_rows / num_sources for source in range(num_sources))


def test_one_sample_a_prompt_has_a_mean_and_nothing_of_several():
    metrics = metrics_of(samples([[1.0], [0.0]]))
    assert [name for name in metrics if "@" in name] == ["val-core/x/reward/mean@1", "val-aux/x/reward/stderr@1"]


@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_best_and_worst_are_those_of_all_draws_with_replacement(n):
    generator = np.random.default_rng(n)
    rows = generator.normal(size=(3, n)).round(1)
    metrics = metrics_of(samples(rows))
    sizes = [2**power for power in range(1, 4) if 2**power < n] + [n]
    assert {name.split("/")[3] for name in metrics if "/best@" in name} == {f"best@{k}" for k in sizes}
    for k in sizes:
        for name, extreme in (("best", max), ("worst", min)):
            of_draws = [[extreme(row[i] for i in draw) for draw in all_draws(row, k)] for row in rows.tolist()]
            section = "val-core" if name == "best" and k == n else "val-aux"
            found = metrics[f"{section}/x/reward/{name}@{k}/mean"], metrics[f"{section}/x/reward/{name}@{k}/std"]
            assert found[0] == pytest.approx(np.mean([np.mean(draws) for draws in of_draws]), abs=1e-6)
            assert found[1] == pytest.approx(np.mean([np.std(draws) for draws in of_draws]), abs=1e-6)


def test_the_majority_is_that_of_all_draws_and_ties_are_shared():
    scores, preds = [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]], [["7", "8", "9"], ["1", "2", "2"]]

    def majority(row, answers, draw):
        votes = Counter(answers[i] for i in draw)
        tied = [answer for answer, count in votes.items() if count == max(votes.values())]
        return np.mean([np.mean([row[answers.index(answer)]]) for answer in tied])

    metrics = metrics_of(samples(scores, preds), ("pred",))
    for k, section in ((2, "val-aux"), (3, "val-core")):
        wanted = np.mean(
            [
                np.mean([majority(row, answers, draw) for draw in all_draws(row, k)])
                for row, answers in zip(scores, preds, strict=True)
            ]
        )
        assert metrics[f"{section}/x/reward/maj@{k}/mean"] == pytest.approx(wanted)
        assert f"{section}/x/reward/maj@{k}/std" in metrics


def test_no_answers_no_majority():
    assert not [name for name in metrics_of(samples([[1.0, 0.0]])) if "maj@" in name]


def test_pass_at_k_is_of_different_samples_and_only_of_right_and_wrong():
    metrics = metrics_of(samples([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]))
    assert metrics["val-aux/x/reward/pass@2"] == pytest.approx((0.5 + (1 - 1 / 6)) / 2)
    assert metrics["val-aux/x/reward/pass@4"] == 1.0
    assert not [name for name in metrics_of(samples([[0.5, 0.0]])) if "pass@" in name]


def test_only_the_most_samples_of_the_core_variable_stand_under_core():
    rows = [(*row[:4], {"acc": row[2] > 0.5, "pred": "1"}) for row in samples([[1.0, 0.2, 0.9]])]
    core = {name.split("/", 3)[3] for name in metrics_of(rows, ("acc", "pred")) if name.startswith("val-core/")}
    assert core == {"mean@3", "best@3/mean", "best@3/std", "maj@3/mean", "maj@3/std"}


def test_a_larger_number_of_samples_that_starts_with_the_same_digit_is_told_apart():
    core = {
        name.split("/", 3)[3] for name in metrics_of(samples([list(np.linspace(0, 0.9, 20))])) if "val-core" in name
    }
    assert core == {"mean@20", "best@20/mean", "best@20/std"}


def test_every_prompt_counts_once_whatever_its_number_of_samples():
    metrics = metrics_of(samples([[1.0, 1.0, 1.0], [0.0]]))
    assert metrics["val-core/x/reward/mean@3"] == 0.5
    assert metrics["val-core/x/reward/best@3/mean"] == 0.5
    # Of the prompts that have so many.
    assert metrics["val-aux/x/reward/pass@3"] == 1.0


def test_the_order_of_rows_changes_nothing():
    rows = samples([[1.0, 0.0, 0.5], [0.25, 0.0, 1.0]], [["a", "b", "a"], ["c", "c", "d"]])
    wanted = metrics_of(rows, ("pred",))
    assert metrics_of(rows[::-1], ("pred",)) == pytest.approx(wanted)
    assert metrics_of(rows[::2] + rows[1::2], ("pred",)) == pytest.approx(wanted)


def test_accuracy_is_the_core_variable_where_the_reward_function_returns_it():
    rows = [("a", "x", 0.3, True, {"acc": True, "note": "fine"}), ("b", "x", 0.1, True, {"acc": False, "note": "no"})]
    metrics = metrics_of(rows, ("acc", "note"))
    assert metrics["val-core/x/acc/mean@1"] == 0.5
    assert metrics["val-aux/x/reward/mean@1"] == pytest.approx(0.2)
    assert not any("note" in key for key in metrics)


def test_a_number_that_some_rows_lack_is_a_mean_of_those_that_have_it():
    rows = [("a", "x", 1.0, True, {"speed": 2.0}), ("b", "x", 1.0, True, {}), ("b", "x", 1.0, True, {"speed": 4.0})]
    metrics = metrics_of(rows, ("speed",))
    assert metrics["val-aux/x/speed/mean@2"] == 3.0
    lacking = metrics_of([*rows, ("c", "y", 1.0, True, {})], ("speed",))
    assert math.isnan(lacking["val-aux/y/speed/mean@1"])


def test_rows_without_a_score_are_counted_and_left_out():
    metrics = metrics_of([("a", "x", 1.0, True, {}), ("b", "x", 0.0, False, {})])
    assert metrics["val-core/x/reward/mean@1"] == 1.0
    assert metrics["val-aux/x/num_invalid"] == 1.0
    assert metrics["val-aux/x/num_prompts"] == 2.0
    nothing = metrics_of([("a", "x", 0.0, False, {})])
    assert (nothing["val-aux/x/num_invalid"], [name for name in nothing if "@" in name]) == (1.0, [])


def test_the_name_of_a_metric_does_not_depend_on_which_rows_have_a_score():
    rows = [
        ("a", "x", 1.0, True, {}),
        ("a", "x", 0.0, False, {}),
        ("b", "x", 0.0, True, {}),
        ("b", "x", 0.0, False, {}),
    ]
    assert metrics_of(rows)["val-core/x/reward/mean@2"] == 0.5
    everything = metrics_of([(*row[:3], True, {}) for row in rows])
    assert set(metrics_of(rows)) | {"val-aux/x/reward/pass@2"} == set(everything)


def test_sets_that_have_a_name_are_measured_by_it():
    batch = scored([("a", "x", 1.0, True, {}), ("b", "y", 0.0, True, {}), ("c", "x", 0.5, True, {})])
    batch.non_tensor_batch["validation_set"] = np.array(["one", "one", "two"], dtype=object)
    metrics = validation_metrics(batch, MAX_LENGTH)
    assert (metrics["val-core/one/reward/mean@1"], metrics["val-core/two/reward/mean@1"]) == (0.5, 0.5)
    assert metrics["val-aux/one/num_prompts"] == 2
    assert not [name for name in metrics if "/x/" in name]


def test_lengths_are_of_all_responses_and_of_each_source():
    batch = scored(samples([[1.0], [1.0]]) + samples([[0.0]], source="y"))
    batch.tensors["response_mask"] = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    batch.tensors["token_level_scores"] = torch.zeros(3, 4)
    metrics = validation_metrics(batch, MAX_LENGTH)
    assert metrics["val-aux/response_length/mean"] == pytest.approx(7 / 3)
    assert metrics["val-aux/response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert (metrics["val-aux/response_length/max"], metrics["val-aux/y/response_length/max"]) == (4.0, 1.0)
    assert metrics["val-aux/x/response_length/clip_ratio"] == 0.5


def test_turns_are_counted_where_a_response_has_several():
    batch = scored(samples([[1.0], [1.0]]))
    assert not [name for name in validation_metrics(batch, MAX_LENGTH) if "num_turns" in name]
    batch.tensors["response_mask"] = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]]).bool()
    batch.tensors["token_level_scores"] = torch.zeros(2, 4)
    metrics = validation_metrics(batch, MAX_LENGTH)
    assert {name: value for name, value in metrics.items() if "num_turns" in name} == {
        "val-aux/num_turns/mean": 1.5,
        "val-aux/num_turns/max": 2.0,
        "val-aux/num_turns/min": 1.0,
    }


def respond(batch_dict):
    """As the trainer answers: tensors of which a validation reads some only."""
    num = len(batch_dict["uid"])
    tensors = {name: torch.zeros(num, 3, dtype=torch.int64) for name in ("prompts", "responses", "input_ids")}
    tensors |= {
        "attention_mask": torch.ones(num, 6, dtype=torch.int64),
        "response_mask": torch.ones(num, 3, dtype=torch.bool),
        "rollout_log_probs": torch.zeros(num, 3),
    }
    objects = {"uid": np.array(batch_dict["uid"], dtype=object), "data_source": np.array(["x"] * num, dtype=object)}
    return DataProto.from_dict(tensors=tensors, non_tensors=objects)


class HalfRight:
    """A reward function that finds every other row right and counts one error a batch."""

    def __call__(self, batch):
        scores = torch.zeros(len(batch), 3)
        scores[::2, -1] = 1.0
        return RewardResult(
            token_level_scores=scores,
            valid=torch.ones(len(batch), dtype=torch.bool),
            extras={},
            metrics={"reward/error_count": 1.0, "reward/other": 2.0},
        )


@pytest.mark.parametrize("keeps_texts", [False, True])
def test_every_prompt_is_answered_once_and_only_what_is_read_is_kept(keeps_texts):
    batches = [{"uid": ["a", "b"]}, {"uid": ["c", "d"]}, {"uid": ["e"]}]
    batch, metrics = validate(batches, respond, HalfRight(), max_response_length=3, keeps_texts=keeps_texts)
    assert batch.non_tensor_batch["uid"].tolist() == list("abcde")
    assert metrics["val-core/x/reward/mean@1"] == pytest.approx(3 / 5)
    assert metrics["val-aux/reward/error_count"] == 3.0
    assert "val-aux/reward/other" not in metrics
    texts = {"prompts", "responses", "attention_mask"} if keeps_texts else set()
    assert set(batch.tensors.keys()) == {"token_level_scores", "valid", "response_mask"} | texts
