import numpy as np
import torch

from burnish.protocol import DataProto
from burnish.trainer.ppo.validation import validation_metrics


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
            "valid": torch.tensor([r[3] for r in rows]),
        },
        non_tensors=objects,
        meta_info={"reward_extra_keys": list(extra_keys)},
    )


def test_float_rewards_alone_give_a_core_metric_per_source():
    metrics = validation_metrics(
        scored([("a", "x", 1.0, True, {}), ("b", "x", 0.0, True, {}), ("c", "y", 0.5, True, {})])
    )
    assert metrics["val-core/x/reward/mean@1"] == 0.5
    assert metrics["val-core/y/reward/mean@1"] == 0.5


def test_every_prompt_counts_once_whatever_its_number_of_samples():
    rows = [("a", "x", 1.0, True, {})] * 3 + [("b", "x", 0.0, True, {})]
    assert validation_metrics(scored(rows))["val-core/x/reward/mean@3"] == 0.5


def test_accuracy_is_the_core_variable_where_the_reward_function_returns_it():
    rows = [("a", "x", 0.3, True, {"acc": True, "note": "fine"}), ("b", "x", 0.1, True, {"acc": False, "note": "no"})]
    metrics = validation_metrics(scored(rows, ("acc", "note")))
    assert metrics["val-core/x/acc/mean@1"] == 0.5
    assert np.isclose(metrics["val-aux/x/reward/mean@1"], 0.2)
    assert not any("note" in key for key in metrics)


def test_rows_without_a_score_are_counted_and_left_out():
    metrics = validation_metrics(scored([("a", "x", 1.0, True, {}), ("b", "x", 0.0, False, {})]))
    assert metrics["val-core/x/reward/mean@1"] == 1.0
    assert metrics["val-aux/x/num_invalid"] == 1.0
    assert metrics["val-aux/x/num_prompts"] == 2.0


def test_the_name_of_a_metric_does_not_depend_on_which_rows_have_a_score():
    rows = [
        ("a", "x", 1.0, True, {}),
        ("a", "x", 0.0, False, {}),
        ("b", "x", 0.0, True, {}),
        ("b", "x", 0.0, False, {}),
    ]
    assert validation_metrics(scored(rows))["val-core/x/reward/mean@2"] == 0.5


def test_sets_that_have_a_name_are_measured_by_it():
    batch = scored([("a", "x", 1.0, True, {}), ("b", "y", 0.0, True, {}), ("c", "x", 0.5, True, {})])
    batch.non_tensor_batch["validation_set"] = np.array(["one", "one", "two"], dtype=object)
    metrics = validation_metrics(batch)
    assert (metrics["val-core/one/reward/mean@1"], metrics["val-core/two/reward/mean@1"]) == (0.5, 0.5)
    assert metrics["val-aux/one/num_prompts"] == 2
    assert not [name for name in metrics if "/x/" in name]
