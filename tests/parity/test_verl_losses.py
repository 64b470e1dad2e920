"""Policy losses against verl's: value, gradient and metrics, and the places where they differ on purpose."""

import math
from dataclasses import replace

import pytest
import torch

from burnish.config import FSDPActorConfig
from burnish.config.names import LOSS_AGG_MODES, POLICY_LOSSES
from burnish.conformance.batches import literal_batch, ragged_batch
from tests.parity.losses import NAMES, SETTINGS, ours, theirs

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-5}
# Means over responses by definition, which is where verl aggregates them as it is told (gspo), or as burnish does.
OF_RESPONSES = ("gspo", "sapo", "geo_mean")


def batches(dtype=torch.float64, count=4):
    for seed in range(count):
        yield ragged_batch(seed, (3, 4, 3), width=8).to(dtype)


def assert_same(got, expected, tolerance):
    assert got.loss == pytest.approx(expected.loss, rel=tolerance, abs=tolerance)
    torch.testing.assert_close(got.gradient, expected.gradient, rtol=tolerance, atol=tolerance)


def test_every_loss_of_verl_is_compared(verl):
    assert set(NAMES) == set(verl.POLICY_LOSS_REGISTRY) == set(POLICY_LOSSES)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_are_verls_to_rounding(verl, verl_config, name, mode, dtype):
    their_mode = "seq-mean-token-mean" if name == "gspo" else mode
    correction = {"bypass_mode": True} if name == "bypass_mode" else None
    for batch in batches(dtype):
        # One token of those that may be left out is drawn at random, so clip_cov is compared where all of them are.
        for settings in (SETTINGS[name],) if name == "clip_cov" else ({}, SETTINGS[name]):
            for weighted in (False, True):
                kwargs = {"weighted": weighted, "correction": correction, **settings}
                got = ours(name, batch, mode, **kwargs)
                assert_same(got, theirs(verl, verl_config, name, batch, their_mode, **kwargs), TOLERANCE[dtype])


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", [n for n in NAMES if n != "geo_mean"])
def test_with_the_counts_of_a_whole_optimizer_step(verl, verl_config, name, mode):
    """A micro-batch of a larger step on two ranks."""
    info = {"dp_size": 2, "batch_num_tokens": 211, "global_batch_size": 37, "loss_scale_factor": 16}
    their_mode = "seq-mean-token-mean" if name == "gspo" else mode
    correction = {"bypass_mode": True} if name == "bypass_mode" else None
    for batch in batches(count=2):
        kwargs = {"correction": correction, "info": info, **SETTINGS[name]}
        got = ours(name, batch, mode, **kwargs)
        assert_same(got, theirs(verl, verl_config, name, batch, their_mode, **kwargs), 1e-6)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("gpg", "kl_cov", "clip_cov")])
def test_metrics_of_the_same_name_are_the_same_number(verl, verl_config, name):
    correction = {"bypass_mode": True} if name == "bypass_mode" else None
    for batch in batches():
        kwargs = {"correction": correction, **SETTINGS[name]}
        got = ours(name, batch, "token-mean", **kwargs).metrics
        expected = theirs(verl, verl_config, name, batch, "token-mean", **kwargs).metrics
        shared = set(got) & set(expected)
        assert "actor/ppo_kl" in shared
        if name == "geo_mean":
            shared.discard("actor/pg_clipfrac")
        for metric in shared:
            assert got[metric] == pytest.approx(expected[metric], abs=1e-6), metric


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize(
    "correction",
    [
        {"rollout_is": "token", "rollout_is_threshold": 1.5},
        {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
        {"rollout_is": "token", "rollout_is_threshold": 1.5, "rollout_is_batch_normalize": True},
        {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": 1.4},
        {"rollout_is": None, "rollout_rs": "seq_mean_k3,token_k2", "rollout_rs_threshold": "0.2,0.3"},
        {"rollout_is": "sequence", "rollout_rs": "seq_max_k2", "rollout_rs_threshold": "0.5"},
    ],
    ids=lambda correction: ",".join(f"{key.removeprefix('rollout_')}={value}" for key, value in correction.items()),
)
def test_the_bypass_loss_corrects_as_verls_does(verl, verl_config, correction, loss_type, mode):
    for batch in batches():
        correction = {**correction, "bypass_mode": True, "loss_type": loss_type}
        got = ours("bypass_mode", batch, mode, correction=correction)
        assert_same(got, theirs(verl, verl_config, "bypass_mode", batch, mode, correction=correction), 1e-6)


# ---- where they differ on purpose --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
def test_gspo_is_a_mean_over_responses_and_aggregated_as_one_likes_there(verl, verl_config, mode):
    (batch,) = batches(count=1)
    got = ours("gspo", batch, mode, **SETTINGS["gspo"])
    assert got.loss != pytest.approx(theirs(verl, verl_config, "gspo", batch, mode, **SETTINGS["gspo"]).loss, rel=0.01)


def test_geo_mean_counts_the_rows_with_a_token_and_all_rows_there(verl, verl_config):
    """Two of nine rows have no token that counts: verl's mean is 7/9 of burnish's, in each micro-batch."""
    batch = ragged_batch(0, (3, 3, 3), width=8, empty_rows=2)
    got = ours("geo_mean", batch, "token-mean", **SETTINGS["geo_mean"])
    other = theirs(verl, verl_config, "geo_mean", batch, "token-mean", **SETTINGS["geo_mean"])
    assert other.loss == pytest.approx(got.loss * 7 / 9, rel=1e-6)
    torch.testing.assert_close(other.gradient, got.gradient * 7 / 9)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "geo_mean"])
def test_a_ratio_beyond_all_bounds_is_finite_and_infinite_there(verl, verl_config, name):
    """log_prob - old_log_prob = 800: exp of it is inf, which verl clamps in the other losses only."""
    batch = literal_batch([[1, 1]], old_log_probs=[[-801.0, -1.0]], log_probs=[[-1.0, -1.1]], advantages=[[-1.0, -0.5]])
    settings = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    got = ours(name, batch, "token-mean", **settings)
    other = theirs(verl, verl_config, name, batch, "token-mean", **settings)
    assert torch.tensor(got.loss).isfinite()
    assert got.gradient.isfinite().all()
    assert not torch.tensor(other.loss).isfinite()


def test_nan_outside_the_mask_is_nothing_and_nan_in_means_over_responses_there(verl, verl_config):
    (batch,) = batches(count=1)
    poisoned = replace(batch, log_probs=torch.where(batch.mask, batch.log_probs, torch.nan))
    got, clean = (ours("vanilla", b, "seq-mean-token-mean") for b in (poisoned, batch))
    assert got.loss == clean.loss
    assert torch.equal(got.gradient, clean.gradient)
    assert math.isnan(theirs(verl, verl_config, "vanilla", poisoned, "seq-mean-token-mean").loss)
    assert theirs(verl, verl_config, "vanilla", poisoned, "token-mean").loss == pytest.approx(
        ours("vanilla", batch, "token-mean").loss
    )


def test_kl_covs_distance_has_a_sign_and_none_there(verl, verl_config):
    (batch,) = batches(count=1)
    got = ours("kl_cov", batch, "token-mean").metrics["actor/ppo_kl"]
    other = theirs(verl, verl_config, "kl_cov", batch, "token-mean").metrics["actor/ppo_kl"]
    difference = (batch.log_probs - batch.old_log_probs)[batch.mask]
    assert got == pytest.approx(-difference.mean().item())
    assert other == pytest.approx(difference.abs().mean().item())


def test_clip_cov_counts_ppos_clip_and_what_it_leaves_out_there(verl, verl_config):
    (batch,) = batches(count=1)
    got = ours("clip_cov", batch, "token-mean", **SETTINGS["clip_cov"]).metrics
    other = theirs(verl, verl_config, "clip_cov", batch, "token-mean", **SETTINGS["clip_cov"]).metrics
    assert got["actor/clip_cov_frac"] == pytest.approx(other["actor/pg_clipfrac"])
    assert got["actor/pg_clipfrac"] != pytest.approx(other["actor/pg_clipfrac"])


def test_geo_mean_counts_where_the_clip_bounds_and_where_it_would_for_the_other_sign_there(verl, verl_config):
    """Both tokens moved down: with A > 0 nothing is bounded."""
    batch = literal_batch([[1, 1]], old_log_probs=[[-1.0, -1.0]], log_probs=[[-2.0, -2.0]], advantages=[[1.0, 1.0]])
    assert ours("geo_mean", batch, "token-mean").metrics["actor/pg_clipfrac"] == 0
    assert theirs(verl, verl_config, "geo_mean", batch, "token-mean").metrics["actor/pg_clipfrac"] == pytest.approx(1)


def test_clip_ratio_alone_sets_both_bounds_and_neither_there(verl_config):
    """`actor.clip_ratio=0.3`: verl's own 0.2 for both sides counts more."""
    assert FSDPActorConfig(clip_ratio=0.3).clip_ratio_low is None
    config = verl_config.ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.3)
    assert (config.clip_ratio_low, config.clip_ratio_high) == (0.2, 0.2)
