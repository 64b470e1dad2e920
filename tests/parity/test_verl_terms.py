"""Aggregation, KL, value loss, KL controllers and PF-PPO's weights against verl's."""

import pytest
import torch
from omegaconf import OmegaConf

from burnish.config.algorithm import KLControlConfig
from burnish.conformance.batches import literal_batch, loss_batch, ragged_batch
from burnish.core_algos.aggregation import LOSS_AGG_MODES, agg_loss
from burnish.core_algos.kl import KL_PENALTIES, get_kl_controller, kl_penalty
from burnish.core_algos.resampling import compute_pf_ppo_reweight_data
from burnish.core_algos.value_loss import compute_value_loss
from burnish.protocol import DataProto

INFOS = [
    {},
    {"batch_num_tokens": 91, "global_batch_size": 23, "dp_size": 4, "loss_scale_factor": 12},
]


def gradient_of(loss, of):
    (gradient,) = torch.autograd.grad(loss.sum(), of)
    return gradient


@pytest.mark.parametrize("info", INFOS, ids=["alone", "of a larger step"])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_aggregation(verl, mode, info):
    for seed in range(4):
        batch = loss_batch(seed)  # with rows that have no token
        losses = batch.advantages.clone().requires_grad_()
        got, expected = (
            agg_loss(losses, batch.mask, mode, **info),
            verl.agg_loss(losses, batch.mask.double(), mode, **info),
        )
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(gradient_of(got, losses), gradient_of(expected, losses), rtol=1e-7, atol=1e-8)


def test_an_empty_mask_is_an_error_and_nan_there(verl):
    losses, empty = torch.ones(2, 3), torch.zeros(2, 3)
    with pytest.raises(Exception, match="loss_mask is empty"):
        agg_loss(losses, empty, "token-mean")
    assert verl.agg_loss(losses, empty, "token-mean").isnan()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", KL_PENALTIES)
def test_kl_estimators_and_their_gradients(verl, name, dtype):
    for seed in range(4):
        batch = ragged_batch(seed).to(dtype)
        log_prob = batch.log_probs.clone().requires_grad_()
        got, expected = (
            kl_penalty(log_prob, batch.ref_log_probs, name),
            verl.kl_penalty(log_prob, batch.ref_log_probs, name),
        )
        tolerance = 1e-7 if dtype == torch.float64 else 2e-6
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(
            gradient_of(got, log_prob), gradient_of(expected, log_prob), rtol=tolerance, atol=tolerance
        )


def test_k3_of_near_policies_is_right_in_float32_and_noise_there(verl):
    """exp(x) - 1 - x of an x near 0 has no correct digit in float32."""
    log_prob, ref = torch.full((1, 1), -1.0), torch.full((1, 1), -1.0 - 1e-4)
    exact = 0.5 * (log_prob - ref).double().square().item()
    assert kl_penalty(log_prob, ref, "k3").item() == pytest.approx(exact, rel=1e-3)
    assert verl.kl_penalty(log_prob, ref, "k3").item() == 0


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_value_loss(verl, mode):
    for info in INFOS:
        batch = loss_batch(3)
        vpreds = batch.vpreds.clone().requires_grad_()
        got, clipped = compute_value_loss(vpreds, batch.returns, batch.values, batch.mask, 0.4, mode, info)
        expected, share = verl.compute_value_loss(
            vpreds, batch.returns, batch.values, batch.mask.double(), 0.4, mode, **info
        )
        torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(gradient_of(got, vpreds), gradient_of(expected, vpreds), rtol=1e-7, atol=1e-8)
        if not info:
            assert clipped.item() == pytest.approx(share.item(), rel=1e-6)


def test_kl_controllers(verl):
    settings = {"type": "adaptive", "kl_coef": 0.2, "target_kl": 0.1, "horizon": 300}
    mine, other = get_kl_controller(KLControlConfig(**settings)), verl.get_kl_controller(OmegaConf.create(settings))
    for current_kl in (0.03, 0.4, 0.11, 0.0, 5.0):
        mine.update(current_kl, 64)
        other.update(current_kl, 64)
        assert mine.value == pytest.approx(other.value, rel=1e-12)


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_pf_ppo_draws_rows_with_the_same_shares(verl, verl_protocol, method):
    """4,000 rows of four scores: shares within five standard errors of each other."""
    scores = [0.0, 0.5, 1.0, 0.25] * 1000
    batch = literal_batch([[1]] * 4000, rewards=[[s] for s in scores])
    tensors = {"token_level_scores": batch.rewards, "loss_mask": batch.mask, "row": torch.tensor(scores)[:, None]}
    torch.manual_seed(0)
    theirs = verl.compute_pf_ppo_reweight_data(verl_protocol.DataProto.from_dict(tensors=tensors), method, 2.0)
    ours = compute_pf_ppo_reweight_data(DataProto.from_dict(tensors=tensors), method, 2.0)
    for score in (0.0, 0.25, 0.5, 1.0):
        shares = [(data.batch["row"] == score).double().mean().item() for data in (ours, theirs)]
        assert shares[0] == pytest.approx(shares[1], abs=5 * (2 * 0.25 / 4000) ** 0.5)
