"""Warnings come where something is wrong and stay away where nothing is; what they advise exists."""

import math
import re

import pytest

from burnish.config.schema import leaves, sections
from burnish.report.rollouts import Row
from burnish.report.series import Series
from burnish.report.warnings import find_warnings

STEPS = 60


def healthy(step):
    return {
        "actor/pg_clipfrac": 0.01,
        "actor/ppo_kl": 0.002,
        "actor/kl_loss": 0.02,
        "actor/entropy": 1.0 - 0.005 * step,
        "actor/grad_norm": 0.5 + 0.1 * math.sin(step),
        "actor/skipped_updates": 0.0,
        "actor/empty_updates": 0.0,
        "critic/score/mean": 0.2 + 0.01 * step,
        "critic/score/min": 0.0,
        "critic/score/max": 1.0,
        "critic/vf_explained_var": 0.4,
        "critic/vf_clipfrac": 0.02,
        "response_length/mean": 100.0 + step,
        "response_length/clip_ratio": 0.02,
        "prompt_length/clip_ratio": 0.0,
        "response/aborted_ratio": 0.0,
        "reward/error_count": 0.0,
        "reward/timeout_count": 0.0,
        "training/num_rows": 64.0,
        "training/rollout_probs_diff_mean": 1e-3,
        "training/rollout_actor_probs_pearson_corr": 0.9999,
        "val-core/math/acc/mean@1": 0.2 + 0.005 * step,
    }


def found(changes=None, train=None, steps=STEPS):
    rows = []
    for step in range(1, steps + 1):
        row = {"step": step} | healthy(step)
        row |= {name: value(step) for name, value in (changes or {}).items()}
        rows.append(row)
    return find_warnings(Series(rows), train or {})


def groups(share_constant):
    def row(group, sample):
        score = 0.0 if group < 10 * share_constant else float(sample % 2)
        return Row(group, f"u{group}", sample, score, 10, "", "stop", True, True, 10, 0, 0, 10)

    return {step: [row(group, sample) for group in range(10) for sample in range(4)] for step in range(1, STEPS + 1)}


CASES = {
    "clip_fraction": {"actor/pg_clipfrac": lambda step: 0.35},
    "ppo_kl": {"actor/ppo_kl": lambda step: 0.4 if step in (20, 41) else 0.0},
    "reference_kl": {"actor/kl_loss": lambda step: 0.02 * step},
    "entropy_collapse": {"actor/entropy": lambda step: math.exp(-0.1 * step)},
    "entropy_explosion": {"actor/entropy": lambda step: 0.3 + 0.05 * step},
    "truncation": {"response_length/clip_ratio": lambda step: 0.3},
    "reward_errors": {"reward/timeout_count": lambda step: 3.0 if step > 50 else 0.0},
    "grad_norm_spikes": {"actor/grad_norm": lambda step: 40.0 if step in (30, 44) else 0.5},
    "skipped_updates": {"actor/skipped_updates": lambda step: float(step == 33)},
    "empty_updates": {"actor/empty_updates": lambda step: float(step == 33)},
    "rollout_gap": {"training/rollout_probs_diff_mean": lambda step: 0.001 if step < 40 else 0.05},
    "explained_variance": {"critic/vf_explained_var": lambda step: -0.3},
    "constant_score": {f"critic/score/{name}": lambda step: 0.0 for name in ("mean", "min", "max")},
    "validation_falls": {"val-core/math/acc/mean@1": lambda step: 0.5 - 0.4 * abs(step - 30) / 30},
    "non_finite": {"actor/pg_loss": lambda step: math.nan if step == 12 else 0.1},
    "length_drift": {"response_length/mean": lambda step: 100.0 * 1.02**step, "critic/score/mean": lambda step: 0.5},
    "aborted": {"response/aborted_ratio": lambda step: 0.1},
    "failed_steps": {"training/failed": lambda step: float(step == STEPS)},
    "failed_saves": {"checkpoint/failed_saves": lambda step: 2.0},
    "failed_uploads": {"checkpoint/failed_uploads": lambda step: 2.0},
    "dropped_values": {"logging/dropped_values": lambda step: float(step > 9)},
    "filtered_groups": {
        "filter_groups/constant_prompts": lambda step: 90.0,
        "filter_groups/kept_prompts": lambda step: 8.0,
    },
    "overfitting": {
        "val/loss": lambda step: 1.0 + 0.5 * abs(step - 30) / 30,
        "train/loss": lambda step: 2.0 - 0.02 * step,
    },
    "rejected_tokens": {"rollout_corr/rollout_rs_masked_fraction": lambda step: 0.5},
}


def test_a_healthy_run_has_no_warnings():
    assert found() == []
    assert found(train=groups(0.1)) == []


@pytest.mark.parametrize("kind", CASES)
def test_what_is_wrong_is_told_with_numbers_and_advice(kind):
    warnings = found(CASES[kind])
    assert [warning.kind for warning in warnings] == [kind]
    (warning,) = warnings
    assert re.search(r"\d", warning.seen)
    assert warning.why.endswith(".")
    assert warning.tries
    known = {*healthy(1), *CASES[kind], "critic/vf_loss", "train/num_gen_batches"}
    assert known.issuperset(warning.metrics)


@pytest.mark.parametrize("kind", ["worker_death", "hang", "out_of_disk", "restart"])
def test_what_happened_to_the_run_is_told_from_its_events(kind):
    events = [{"time": 1, "step": step, "kind": kind, "message": f"It was step {step}."} for step in (3, 9)]
    (warning,) = find_warnings(Series([]), {}, [*events, {"kind": "checkpoint", "step": 9}])
    assert warning.kind == kind
    assert warning.seen == "2 times, in steps 3 and 9. The last: It was step 9."
    assert find_warnings(Series([]), {}, [{"kind": kind}])[0].seen.startswith("Once. ")


def test_a_loss_that_rises_with_that_of_training_is_no_overfitting():
    rising = {"val/loss": CASES["overfitting"]["val/loss"], "train/loss": lambda step: 1.0 + 0.02 * step}
    assert found(rising) == []


def test_groups_that_do_not_vary_are_seen_in_the_dumps():
    (warning,) = found(train=groups(0.7))
    assert warning.kind == "zero_variance_groups"
    assert "140 of 200" in warning.seen
    assert "too hard" in warning.why
    assert found(train=groups(1.0))[0].severity == "bad"


def test_the_worst_comes_first():
    warnings = found(CASES["aborted"] | CASES["non_finite"])
    assert [warning.severity for warning in warnings] == ["bad", "warning"]


def test_nothing_is_said_of_what_was_not_measured():
    assert find_warnings(Series([]), {}) == []
    assert find_warnings(Series([{"step": 1, "critic/score/mean": 0.5}]), {}) == []


def test_every_key_in_the_advice_exists():
    text = " ".join(
        sentence for kind in CASES for warning in found(CASES[kind]) for sentence in (warning.why, *warning.tries)
    ) + " ".join(found(train=groups(1.0))[0].tries)
    roots = "actor_rollout_ref|algorithm|critic|data|reward|trainer"
    keys = set(re.findall(rf"(?<![\w.])((?:{roots})(?:\.[a-z_0-9]+)+)", text))
    assert len(keys) > 15
    assert {key for key in keys if key not in leaves() and key not in sections()} == set()
