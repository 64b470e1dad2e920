"""Every algorithm passes every check that applies to it, and none was forgotten."""

import pytest
import torch

from burnish.config import names
from burnish.config.rejection import RULES
from burnish.conformance.batches import advantage_batch
from burnish.conformance.correction import corrections
from burnish.conformance.estimators import built_in_estimators
from burnish.conformance.losses import aggregation_modes, kl_forms, policy_losses
from burnish.conformance.losses.term import reference_inputs
from burnish.conformance.references import ESTIMATOR_REFERENCES
from burnish.conformance.suite import COLUMNS, built_in_algorithms, checks_of

ALGORITHMS = built_in_algorithms()
CHECKS = [(algorithm, column, check) for algorithm in ALGORITHMS for column, check in checks_of(algorithm).items()]

# What an estimator reads of the batch, or is told of the run, is no hyper-parameter.
_NO_HYPER_PARAMETERS = {*advantage_batch(0).keyed(), "config"}

_CLIP = {"clip_ratio", "clip_ratio_low", "clip_ratio_high"}
KEYS_OF_LOSSES = {
    "vanilla": {*_CLIP, "clip_ratio_c"},
    "gspo": {*_CLIP, "loss_agg_mode"},
    "sapo": {"tau_pos", "tau_neg", "loss_agg_mode"},
    "gpg": set(),
    "clip_cov": {*_CLIP, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"},
    "kl_cov": {"kl_cov_ratio", "ppo_kl_coef"},
    "geo_mean": {*_CLIP, "loss_agg_mode"},
    "cispo": _CLIP,
    "dppo_tv": {*_CLIP, "clip_ratio_c"},
    "dppo_kl": {*_CLIP, "clip_ratio_c"},
    "dro": {"dro_beta"},
    "bypass_mode": {
        "loss_type",
        "rollout_is",
        "rollout_is_threshold",
        "rollout_is_batch_normalize",
        "rollout_rs",
        "rollout_rs_threshold",
    },
}


@pytest.mark.parametrize(
    ("algorithm", "check"),
    [
        pytest.param(algorithm, check, id=f"{algorithm.kind}-{algorithm.name}-{column}".replace(" ", "_"))
        for algorithm, column, check in CHECKS
    ],
)
def test_the_algorithm_conforms(algorithm, check):
    check(algorithm)


def test_every_name_has_a_hand_answer_and_a_naive_loop():
    found = {
        "advantage estimator": names.ADV_ESTIMATORS,
        "policy loss": names.POLICY_LOSSES,
        "KL form": names.KL_PENALTIES,
        "aggregation mode": names.LOSS_AGG_MODES,
        "value loss": ("value_loss",),
        "rollout correction": ("rollout_is=token", "rollout_is=sequence", *(f"rollout_rs={rule}" for rule in RULES)),
    }
    for kind, known in found.items():
        of_kind = {algorithm.name: checks_of(algorithm) for algorithm in ALGORITHMS if algorithm.kind == kind}
        assert sorted(of_kind) == sorted(known)
        for name, checks in of_kind.items():
            assert {"hand answer", "naive loop"} <= set(checks), f"{kind} {name}"
    assert set(ESTIMATOR_REFERENCES) == set(names.ADV_ESTIMATORS)


def test_every_hyper_parameter_is_checked():
    for estimator in built_in_estimators():
        covered = {case.setting for case in estimator.cases}
        assert covered >= set(estimator.parameters) - _NO_HYPER_PARAMETERS, estimator.name
    for loss in policy_losses():
        assert {case.setting for case in loss.cases} >= KEYS_OF_LOSSES[loss.name], loss.name


def test_every_column_says_what_it_is_and_is_used():
    assert {column for _, column, _ in CHECKS} == set(COLUMNS)


@pytest.mark.parametrize("estimator", built_in_estimators(), ids=lambda estimator: estimator.name)
def test_the_naive_loop_of_an_estimator_gives_the_hand_answer(estimator):
    for answer in estimator.hand:
        advantages, returns = estimator.expected(answer.batch, **answer.settings)
        torch.testing.assert_close(advantages, wide(answer.advantages), atol=answer.tolerance, rtol=0)
        if answer.returns is not None:
            torch.testing.assert_close(returns, wide(answer.returns), atol=answer.tolerance, rtol=0)


@pytest.mark.parametrize(
    "term", [*policy_losses(), *kl_forms(), *aggregation_modes()], ids=lambda term: f"{term.kind}-{term.name}"
)
def test_the_naive_loop_of_a_loss_gives_the_hand_answer(term):
    for answer in term.hand:
        settings = term.with_settings(**answer.settings)
        loss = term.reference(reference_inputs(answer.batch, settings["weighted"]), settings)
        assert loss == pytest.approx(answer.loss, abs=answer.tolerance)


def test_the_naive_loop_of_a_correction_gives_the_hand_answer():
    from burnish.conformance.correction.answers import BATCH

    for correction in corrections():
        for answer in correction.hand:
            weights, mask = correction.expected(BATCH, {**correction.settings, **answer.settings})
            if answer.weights is not None:
                torch.testing.assert_close(weights, wide(answer.weights), atol=1e-9, rtol=0)
            if answer.mask is not None:
                assert mask.int().tolist() == answer.mask


def wide(matrix):
    return torch.tensor(matrix, dtype=torch.float64)
