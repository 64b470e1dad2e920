"""Conformance can fail: algorithms that are wrong in one way each are found by the check that is meant for it."""

import math
from dataclasses import replace

import pytest
import torch

from burnish.conformance.comparison import Violation, close
from burnish.conformance.correction import corrections
from burnish.conformance.estimators import Estimator, built_in_estimators
from burnish.conformance.losses import aggregation_modes, kl_forms, policy_loss, policy_losses, value_loss
from burnish.conformance.own import own_algorithms
from burnish.conformance.references import ESTIMATOR_REFERENCES, LOSS_REFERENCES
from burnish.conformance.suite import COLUMNS, checks_of, run_checks
from burnish.core_algos.aggregation import agg_loss
from burnish.core_algos.rollout_correction import compute_rollout_correction_and_rejection_mask
from tests.conformance import mutants

ESTIMATORS = {estimator.name: estimator for estimator in built_in_estimators()}
LOSSES = {loss.name: loss for loss in policy_losses()}
KL_FORMS = {form.name: form for form in kl_forms()}
CORRECTIONS = {correction.name: correction for correction in corrections()}


def failures(algorithm, columns=COLUMNS) -> set[str]:
    return set(run_checks(algorithm, columns).failures)


def refuse(algorithm, column: str, sentence: str) -> None:
    with pytest.raises(Violation, match=sentence):
        checks_of(algorithm)[column](algorithm)


WRONG_ESTIMATORS = [
    ("grpo", "by_position", "group interleaving", "behind each other"),
    ("grpo", "by_position", "row order", "another order"),
    ("grpo", "by_position", "hand answer", "hand-computed"),
    ("grpo", "of_the_batch", "naive loop", "On random batch 0, the advantage of row"),
    ("grpo", "biased_deviation", "hand answer", "must be -?0.70"),
    ("grpo", "biased_deviation", "naive loop", "On random batch"),
    ("grpo", "one_pass_variance", "extremes and NaN", "rewards around 10000"),
    ("grpo", "noise_of_equal_rewards", "extremes and NaN", "all 0.1 gets an advantage of .* not exactly 0"),
    ("grpo", "swallows_nan", "extremes and NaN", "NaN inside the mask of rewards does not surface"),
    ("grpo", "writes_into_its_input", "extremes and NaN", "writes into its input rewards"),
    ("gae", "tool_tokens_accumulate", "naive loop", "On random batch"),
    ("gae", "tool_tokens_accumulate", "padding", "four columns"),
    ("gae", "mask_by_multiplication", "extremes and NaN", "nan outside the mask"),
    ("gae", "ignores_gamma", "hyper-parameters", "With gamma=0 nothing later counts"),
    ("grpo", "scores_under_autocast", "fp32", "In torch.float32 on random batch"),
    ("gae", "in_the_dtype_of_the_inputs", "bf16", "compared with float64"),
    ("remax", "mean_over_the_width", "padding", "four columns of padding, the advantage"),
    ("remax", "by_place_in_the_batch", "row order", "another order"),
]


@pytest.mark.parametrize(("like", "mutant", "column", "sentence"), WRONG_ESTIMATORS)
def test_a_wrong_estimator_is_found(like, mutant, column, sentence):
    # Some sum the rewards of a whole row, as one may: they are to be found for what is wrong with them.
    wrong = replace(ESTIMATORS[like], function=getattr(mutants, mutant), masks_rewards=False)
    refuse(wrong, column, sentence)


WRONG_LOSSES = [
    ("vanilla", "micro_batch_mean", {"micro-batches", "ranks", "packing"}),
    ("vanilla", "no_dp_size", {"ranks"}),
    ("vanilla", "mean_as_metric", {"micro-batches"}),
    ("cispo", "cispo_without_stop_gradient", {"gradient"}),
    ("vanilla", "masked_by_multiplication", {"extremes and NaN"}),
    ("vanilla", "unclamped", {"extremes and NaN"}),
    ("vanilla", "clamped_too_late", {"extremes and NaN"}),
    ("vanilla", "silent_about_nan", {"extremes and NaN"}),
    ("vanilla", "ratio_under_autocast", {"fp32"}),
    ("vanilla", "in_bfloat16", {"bf16"}),
    ("clip_cov", "chooses_in_every_micro_batch", {"micro-batches", "ranks"}),
    ("clip_cov", "clip_cov_of_one_rank", {"ranks"}),
    ("vanilla", "rows_are_counted_by_width", {"padding"}),
    ("vanilla", "weighs_rows_by_place", {"row order"}),
    ("vanilla", "plain", {"hand answer", "naive loop", "hyper-parameters"}),
]


@pytest.mark.parametrize(("like", "mutant", "columns"), WRONG_LOSSES)
def test_a_wrong_loss_is_found(like, mutant, columns):
    of_the_right_one = LOSSES[like]
    wrong = policy_loss(
        f"tests.conformance.mutants:{mutant}",
        LOSS_REFERENCES[like],
        hand=of_the_right_one.hand,
        cases=of_the_right_one.cases,
        settings=of_the_right_one.settings,
    )
    assert failures(wrong, columns) == columns


def test_a_loss_that_swallows_nan_of_the_old_policy_is_found():
    wrong = policy_loss(
        "tests.conformance.mutants:silent_about_nan_of_the_old_policy", constants=("old_log_probs", "advantages")
    )
    refuse(wrong, "extremes and NaN", "NaN inside the mask of old_log_probs surfaces neither")


def test_a_token_baseline_that_swallows_nan_of_what_it_weighs_by_is_found():
    right = ESTIMATORS["optimal_token_baseline"]

    def wrong(token_level_rewards, response_mask, index, old_log_probs, sum_pi_squared):
        return right.function(
            token_level_rewards, response_mask, index, old_log_probs, torch.nan_to_num(sum_pi_squared)
        )

    refuse(replace(right, function=wrong), "extremes and NaN", "NaN inside the mask of sum_pi_squared does not surface")


def test_a_mutant_fails_no_more_than_it_must():
    # Without the naive loop of another loss beside it, dp_size is all that is wrong with this one.
    assert failures(policy_loss("tests.conformance.mutants:no_dp_size")) == {"ranks"}
    assert failures(policy_loss("tests.conformance.mutants:mean_as_metric")) == {"micro-batches"}
    assert failures(policy_loss("tests.conformance.mutants:plain")) == set()


def test_k3_with_the_wrong_sign_is_found():
    def wrong(batch, settings, info, prepared):
        d = torch.where(batch.mask, batch.log_probs - batch.ref_log_probs, 0.0).clamp(-20, 20)
        return agg_loss(d.exp() - d - 1, batch.mask, settings["loss_agg_mode"], **info), {}

    columns = {"hand answer", "naive loop", "gradient"}
    assert failures(replace(KL_FORMS["k3"], compute=wrong), columns) == columns


def test_a_plus_form_without_its_gradient_is_found():
    wrong = replace(KL_FORMS["k3+"], compute=KL_FORMS["k3"].compute)
    assert failures(wrong, {"hand answer", "naive loop", "gradient", "row order"}) == {"hand answer", "gradient"}


def test_a_value_loss_that_takes_the_smaller_error_is_found():
    def wrong(batch, settings, info, prepared):
        clip = settings["cliprange_value"]
        clipped = torch.clamp(batch.vpreds, batch.values - clip, batch.values + clip)
        errors = torch.minimum((batch.vpreds - batch.returns).square(), (clipped - batch.returns).square())
        return 0.5 * agg_loss(errors, batch.mask, settings["loss_agg_mode"], **info), {}

    columns = {"hand answer", "naive loop", "gradient", "hyper-parameters"}
    assert failures(replace(value_loss(), compute=wrong), columns) == columns


def test_a_mode_of_aggregation_that_counts_its_own_rows_is_found():
    mode = next(mode for mode in aggregation_modes() if mode.name == "seq-mean-token-mean")

    def wrong(batch, settings, info, prepared):
        return agg_loss(batch.values, batch.mask, "seq-mean-token-mean"), {}

    with pytest.raises(Exception, match="denominator|empty"):
        checks_of(mode)["micro-batches"](replace(mode, compute=wrong))


WRONG_CORRECTIONS = [
    ("rollout_is=token", lambda w, m: (w.clamp(max=1.5), m), "hand answer"),
    ("rollout_is=token", lambda w, m: (w * 0 + 1, m), "naive loop"),
    ("rollout_is=sequence", lambda w, m: (w / w.mean(), m), "naive loop"),
    ("rollout_is=token", lambda w, m: (w.to(torch.bfloat16), m), "fp32"),
    ("rollout_is=token", lambda w, m: (w.to(torch.bfloat16), m), "bf16"),
    ("rollout_is=token", lambda w, m: (w.clone().requires_grad_(), m), "extremes and NaN"),
    ("rollout_rs=token_k1", lambda w, m: (w, m | True), "naive loop"),
    ("rollout_rs=seq_max_k2", lambda w, m: (w, m & m.all(dim=1, keepdim=True)), "padding"),
    ("rollout_rs=token_k3", lambda w, m: (w, m & (torch.arange(len(m)) % 2 == 0)[:, None]), "row order"),
    ("rollout_rs=seq_sum_k1", lambda w, m: (w, m & False), "hyper-parameters"),
]


@pytest.mark.parametrize(("name", "change", "column"), WRONG_CORRECTIONS)
def test_a_wrong_correction_is_found(name, change, column):
    def wrong(*args):
        weights, mask, metrics = compute_rollout_correction_and_rejection_mask(*args)
        return *change(weights, mask), metrics

    assert failures(replace(CORRECTIONS[name], function=wrong), {column}) == {column}


@pytest.mark.parametrize(
    ("algorithms", "found"),
    [
        (ESTIMATORS, {column for _, _, column, _ in WRONG_ESTIMATORS}),
        (LOSSES, {column for _, _, columns in WRONG_LOSSES for column in columns}),
        (CORRECTIONS, {column for _, _, column in WRONG_CORRECTIONS}),
    ],
    ids=["estimators", "losses", "corrections"],
)
def test_every_check_finds_something_that_is_wrong(algorithms, found):
    assert found == {column for algorithm in algorithms.values() for column in checks_of(algorithm)}


@pytest.mark.parametrize("nothing_to_compare_with", [math.inf, -math.inf, math.nan])
def test_nothing_is_close_to_what_is_not_finite(nothing_to_compare_with):
    for got in (1.0, nothing_to_compare_with):
        with pytest.raises(Violation, match="The loss cannot be checked: what it must be holds NaN or inf"):
            close("The loss", [0.0, got], [0.0, nothing_to_compare_with])


def test_an_algorithm_of_ones_own_passes_and_has_no_hand_answer():
    names = ("tests.conformance.mutants:centered", "tests.conformance.mutants:plain")
    for algorithm in own_algorithms(*names):
        outcome = run_checks(algorithm)
        assert outcome.failures == {}
        assert {outcome.cell(column) for column in ("hand answer", "naive loop", "hyper-parameters")} == {"-"}
        assert {outcome.cell(column) for column in ("padding", "row order", "fp32", "extremes and NaN")} == {"pass"}


def test_the_reference_of_ones_own_algorithm_is_compared():
    own = "tests.conformance.mutants:"
    (right,) = own_algorithms(f"{own}centered", None, f"{own}centered_loop")
    assert run_checks(right).cell("naive loop") == "pass"
    (wrong,) = own_algorithms(f"{own}by_place_in_the_batch", None, f"{own}centered_loop")
    assert failures(wrong, {"naive loop"}) == {"naive loop"}
    # A loop that knows one mode of aggregation is no reference for five.
    (one_mode,) = own_algorithms(None, f"{own}plain", f"{own}plain_loop")
    assert failures(one_mode, {"naive loop", "gradient"}) == {"naive loop", "gradient"}


def test_what_an_algorithm_raises_is_a_failure_with_its_name():
    def broken(token_level_rewards, response_mask):
        raise ZeroDivisionError("by zero")

    outcome = run_checks(Estimator(name="broken", function=broken, reference=ESTIMATOR_REFERENCES["remax"]))
    assert set(outcome.failures) == set(outcome.checked)
    assert "ZeroDivisionError: by zero" in outcome.failures["padding"]


def test_a_parameter_of_ones_own_keeps_its_default_and_anything_may_be_taken_by_keyword():
    seen = []

    def mine(token_level_rewards, response_mask, alpha=0.5, **kwargs):
        seen.append((alpha, kwargs["num_repeat"], len(kwargs["index"]), kwargs["config"].gamma))
        return token_level_rewards, token_level_rewards

    assert run_checks(Estimator(name="mine", function=mine), {"padding"}).failures == {}
    assert seen[-1] == (0.5, 4, 18, 0.97)


def test_an_estimator_that_needs_an_unknown_key_is_told_which():
    def needy(token_level_rewards, response_mask, judge_votes):
        raise AssertionError("never called")

    outcome = run_checks(Estimator(name="needy", function=needy))
    assert "needs 'judge_votes'" in outcome.failures["padding"]
