"""KL estimators (values and gradients), the controllers, and the penalty in the reward."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from burnish.config import KLControlConfig
from burnish.conformance.batches import ragged_batch
from burnish.conformance.references import KL_REFERENCES
from burnish.core_algos.aggregation import agg_loss
from burnish.core_algos.kl import (
    KL_PENALTIES,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    get_kl_controller,
    kl_penalty,
)
from burnish.protocol import DataProto
from burnish.utils.errors import ConfigError, TrainingError


def value_and_gradient(difference: float, name: str) -> tuple[float, float]:
    log_prob = torch.tensor([[difference]], dtype=torch.float64, requires_grad=True)
    kl = kl_penalty(log_prob, torch.zeros(1, 1, dtype=torch.float64), name)
    kl.sum().backward()
    return kl.item(), log_prob.grad.item()


def test_the_estimators_are_different_functions():
    assert value_and_gradient(1.0, "k1")[0] == 1.0
    assert value_and_gradient(1.0, "k2")[0] == 0.5
    assert value_and_gradient(1.0, "k3")[0] == pytest.approx(math.exp(-1))
    assert value_and_gradient(-1.0, "abs")[0] == 1.0
    assert value_and_gradient(-1.0, "k1")[0] == -1.0


@pytest.mark.parametrize("difference", [-30.0, -1.5, -0.1, 0.0, 0.3, 2.0, 30.0])
@pytest.mark.parametrize("name", KL_PENALTIES)
def test_value_equals_the_formula_and_the_plus_forms_have_the_gradient_of_k2(name, difference):
    value, gradient = value_and_gradient(difference, name)
    assert value == pytest.approx(KL_REFERENCES[name](difference), abs=1e-12)
    if name.endswith("+"):
        assert gradient == pytest.approx(difference)


@pytest.mark.parametrize(("name", "gradient"), [("k1", 1.0), ("abs", 1.0), ("k2", 0.7), ("k3", 1 - math.exp(-0.7))])
def test_plain_forms_have_their_own_gradient(name, gradient):
    assert value_and_gradient(0.7, name)[1] == pytest.approx(gradient)


@pytest.mark.parametrize("name", ["k3", "low_var_kl", "k3+"])
def test_in_float32_k3_of_nearly_equal_policies_is_right_and_never_negative(name):
    log_prob = 1e-3 * torch.randn(1, 20000, generator=torch.Generator().manual_seed(0))
    kl = kl_penalty(log_prob, torch.zeros_like(log_prob), name)
    exact = kl_penalty(log_prob.double(), torch.zeros_like(log_prob).double(), name)
    assert kl.dtype == torch.float32
    assert kl.min().item() >= 0.0
    torch.testing.assert_close(kl.double(), exact, rtol=0, atol=1e-9)
    assert kl.double().mean().item() == pytest.approx(exact.mean().item(), rel=1e-4)


@pytest.mark.parametrize("name", ["k3", "low_var_kl", "k3+"])
@pytest.mark.parametrize("difference", [100.0, -100.0, 1000.0, -1000.0])
def test_extremes_stay_finite(name, difference):
    value, gradient = value_and_gradient(difference, name)
    assert math.isfinite(gradient)
    assert abs(value) <= 10.0


@pytest.mark.parametrize("name", KL_PENALTIES)
@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
def test_what_lies_outside_the_mask_reaches_neither_loss_nor_gradient(name, rubbish):
    mask = torch.tensor([[1, 0]])
    log_prob = torch.tensor([[0.5, 0.0]], requires_grad=True)
    kl = kl_penalty(log_prob, torch.tensor([[0.0, rubbish]]), name, mask)
    agg_loss(kl, mask, "token-mean").backward()
    assert kl[0, 1].item() == 0.0
    assert log_prob.grad[0, 1].item() == 0.0
    assert log_prob.grad.isfinite().all()


@pytest.mark.parametrize("name", KL_PENALTIES)
@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
def test_inside_the_mask_nan_of_the_policy_surfaces_and_one_of_the_reference_is_refused(name, rubbish):
    good, bad, mask = torch.zeros(2, 2), torch.tensor([[0.0, 0.0], [0.0, rubbish]]), torch.ones(2, 2)
    with pytest.raises(TrainingError, match="ref_logprob holds NaN or inf in 1 of the 4.*row 1, token 1"):
        kl_penalty(good, bad, name, mask)
    assert kl_penalty(bad.masked_fill(bad != 0, math.nan), good, name, mask)[1, 1].isnan()


@pytest.mark.parametrize("name", KL_PENALTIES)
def test_the_reference_gets_no_gradient(name):
    log_prob, reference = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
    kl_penalty(log_prob, reference, name).sum().backward()
    assert log_prob.grad is not None
    assert reference.grad is None


@pytest.mark.parametrize("name", ["full", "full+"])
def test_full_is_refused_with_the_reason(name):
    with pytest.raises(ConfigError, match="needs the logits"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), name)


def test_an_unknown_estimator_lists_the_choices_and_a_wrong_mask_is_refused():
    with pytest.raises(ConfigError, match=r"kl_penalty=k4.*k3\+"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "k4")
    with pytest.raises(TrainingError, match="response_mask"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "k1", torch.full((1, 1), 0.5))


def expected_gradient(logits: torch.Tensor, reference: torch.Tensor, name: str) -> tuple[float, torch.Tensor]:
    """Exact KL, and the expectation over the policy's own tokens of the estimator's gradient (one token a row)."""
    probabilities = logits.softmax(-1)
    exact = (probabilities * (logits.log_softmax(-1) - reference.log_softmax(-1))).sum()
    parameter = logits.clone().requires_grad_()
    kl = kl_penalty(parameter.log_softmax(-1)[None, :], reference.log_softmax(-1)[None, :], name)
    (kl[0] * probabilities).sum().backward()
    return exact.item(), parameter.grad


@pytest.mark.parametrize("name", ["k2", "k3", "k1+", "k3+", "abs+"])
def test_minimising_the_estimate_lowers_the_exact_kl(name):
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5, 0.2], dtype=torch.float64)
    reference = torch.tensor([-0.5, 0.7, 0.0, 0.1, 1.0], dtype=torch.float64)
    history = []
    for _ in range(20):
        exact, gradient = expected_gradient(logits, reference, name)
        history.append(exact)
        logits = logits - 0.5 * gradient
    assert all(later < earlier for earlier, later in pairwise(history))
    assert history[-1] < 0.2 * history[0]


def test_in_expectation_k1_has_no_gradient_and_the_plus_forms_have_that_of_the_kl():
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    reference = torch.tensor([-0.5, 0.7, 0.0], dtype=torch.float64)
    parameter = logits.clone().requires_grad_()
    (parameter.softmax(-1) * (parameter.log_softmax(-1) - reference.log_softmax(-1))).sum().backward()
    torch.testing.assert_close(expected_gradient(logits, reference, "k1+")[1], parameter.grad)
    torch.testing.assert_close(expected_gradient(logits, reference, "k1")[1], torch.zeros(3).double())
    assert not torch.allclose(expected_gradient(logits, reference, "k3")[1], parameter.grad)


def test_controllers():
    fixed = get_kl_controller(KLControlConfig(type="fixed", kl_coef=0.03))
    fixed.update(current_kl=100.0, n_steps=64)
    assert isinstance(fixed, FixedKLController)
    assert fixed.value == 0.03
    adaptive = get_kl_controller(KLControlConfig(type="adaptive", kl_coef=0.1, target_kl=0.5, horizon=1000))
    assert isinstance(adaptive, AdaptiveKLController)
    adaptive.update(current_kl=0.55, n_steps=100)
    assert adaptive.value == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    adaptive.update(current_kl=50.0, n_steps=100)
    assert adaptive.value == pytest.approx(0.1 * 1.01 * (1 + 0.2 * 0.1))
    adaptive.update(current_kl=0.0, n_steps=100)
    assert adaptive.value == pytest.approx(0.1 * 1.01 * 1.02 * (1 - 0.2 * 0.1))


def test_bad_controllers_are_refused():
    with pytest.raises(ConfigError, match="horizon=0"):
        AdaptiveKLController(0.1, 0.1, 0)
    with pytest.raises(ConfigError, match=r"kl_ctrl\.type=linear.*adaptive, fixed"):
        get_kl_controller(KLControlConfig(type="linear"))


def scored_batch(**extra: torch.Tensor) -> DataProto:
    b = ragged_batch(0)
    tensors = {
        "token_level_scores": b.rewards,
        "old_log_probs": torch.where(b.mask, b.old_log_probs, math.nan),
        "ref_log_prob": torch.where(b.mask, b.ref_log_probs, math.inf),
        "response_mask": b.mask,
        **extra,
    }
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": b.uids})


@pytest.mark.parametrize("name", ["kl", "k2", "low_var_kl", "abs", "k3+"])
def test_the_reward_is_the_score_less_the_penalty(name):
    b, data = ragged_batch(0), scored_batch()
    result, metrics = apply_kl_penalty(data, FixedKLController(0.3), name)
    assert result is data
    row_means = []
    for row, mask in enumerate(b.mask.tolist()):
        kls = []
        for t, inside in enumerate(mask):
            d = (b.old_log_probs[row, t] - b.ref_log_probs[row, t]).item()
            kl = KL_REFERENCES[name](d) if inside else 0.0
            kls += [kl] if inside else []
            assert data.batch["token_level_rewards"][row, t].item() == pytest.approx(
                b.rewards[row, t].item() - 0.3 * kl
            )
        row_means.append(sum(kls) / len(kls))
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(np.mean(row_means), rel=1e-6)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.3
    assert torch.equal(data.batch["token_level_scores"], b.rewards)


@pytest.mark.parametrize("key", ["old_log_probs", "ref_log_prob"])
def test_a_log_prob_that_is_not_finite_is_refused_by_its_key_in_rows_that_count(key):
    data = scored_batch(valid=torch.tensor([True] * 11 + [False]))
    row, token = 11, int(data.batch["response_mask"][11].int().argmax())
    data.batch[key][row, token] = math.nan
    _, metrics = apply_kl_penalty(data, FixedKLController(0.3))
    assert math.isfinite(metrics["actor/reward_kl_penalty"])
    data.batch["valid"][row] = True
    with pytest.raises(TrainingError, match=f"{key} holds NaN or inf in 1 of .*row {row}, token {token}"):
        apply_kl_penalty(data, FixedKLController(0.3))


def test_abstained_rows_do_not_steer_the_controller():
    valid = torch.tensor([True] * 6 + [False] * 6)
    adaptive, reference = (AdaptiveKLController(0.1, 0.01, 100) for _ in range(2))
    _, metrics = apply_kl_penalty(scored_batch(valid=valid), adaptive, "k2")
    _, alone = apply_kl_penalty(scored_batch().select_idxs(valid), reference, "k2")
    assert metrics == pytest.approx(alone)
    assert adaptive.value == pytest.approx(reference.value)
    # The coefficient logged is the one that was applied.
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert adaptive.value == pytest.approx(0.1 * (1 + 0.2 * 6 / 100))


def test_a_batch_of_abstained_rows_leaves_the_controller_alone():
    adaptive = AdaptiveKLController(0.1, 0.01, 100)
    _, metrics = apply_kl_penalty(scored_batch(valid=torch.zeros(12, dtype=torch.bool)), adaptive)
    assert adaptive.value == 0.1
    assert metrics["actor/reward_kl_penalty"] == 0.0
