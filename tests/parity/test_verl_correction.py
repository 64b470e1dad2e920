"""Importance weights, rejection and the policies' distance against verl's, and where they differ on purpose."""

import math

import pytest
import torch

from burnish.config import RolloutCorrectionConfig
from burnish.config.rejection import PRESETS, RULES
from burnish.conformance.batches import literal_batch, ragged_batch
from burnish.core_algos.rollout_correction import compute_rollout_correction_and_rejection_mask

# Bounds that reject some of a random batch. Of k1 they are v and 1/v: see the last tests.
BOUNDS = {"k1": 1.6, "k2": 0.15, "k3": 0.15}
TOLERANCE = 1e-6


def ours(batch, **settings):
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        batch.old_log_probs, batch.rollout_log_probs, batch.mask, RolloutCorrectionConfig(**settings)
    )
    return weights, mask, metrics


def theirs(module, batch, **settings):
    if settings.get("rollout_rs_threshold") is not None:
        settings["rollout_rs_threshold"] = str(settings["rollout_rs_threshold"])
    proto, mask, metrics = module.compute_rollout_correction_and_rejection_mask(
        batch.old_log_probs, batch.rollout_log_probs, batch.mask.double(), **settings
    )
    return None if proto is None else proto.batch["rollout_is_weights"], mask.bool(), metrics


def assert_same(module, batch, metrics=(), **settings):
    (weights, mask, told), (their_weights, their_mask, their_metrics) = (
        ours(batch, **settings),
        theirs(module, batch, **settings),
    )
    assert (weights is None) == (their_weights is None)
    if weights is not None:
        torch.testing.assert_close(weights, their_weights, rtol=TOLERANCE, atol=TOLERANCE)
    assert torch.equal(mask, their_mask)
    for name in metrics:
        name = f"rollout_corr/{name}"
        assert told[name] == pytest.approx(their_metrics[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("threshold", [2.0, 1.2, "0.6_1.8"], ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights(verl_correction, level, threshold):
    for seed in range(5):
        assert_same(
            verl_correction,
            ragged_batch(seed),
            ("rollout_is_mean", "rollout_is_std", "rollout_is_eff_sample_size", "rollout_is_seq_mean"),
            rollout_is=level,
            rollout_is_threshold=threshold,
        )


@pytest.mark.parametrize("threshold", [1.3, "0.6_1.8"], ids=str)
def test_normalised_token_weights(verl_correction, threshold):
    for seed in range(5):
        assert_same(
            verl_correction,
            ragged_batch(seed),
            ("rollout_is_batch_norm_factor",),
            rollout_is="token",
            rollout_is_threshold=threshold,
            rollout_is_batch_normalize=True,
        )


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "seq_max_k1"])
def test_every_rule_of_rejection(verl_correction, rule):
    rejected = 0
    for seed in range(8):
        batch = ragged_batch(seed)
        settings = {"rollout_rs": rule, "rollout_rs_threshold": BOUNDS[rule[-2:]]}
        assert_same(
            verl_correction, batch, (f"rollout_rs_{rule}_masked_fraction", "rollout_rs_masked_fraction"), **settings
        )
        rejected += int((batch.mask & ~ours(batch, **settings)[1]).sum())
    assert rejected


def test_several_rules_and_weights_together(verl_correction):
    for seed in range(5):
        assert_same(
            verl_correction,
            ragged_batch(seed),
            rollout_is="sequence",
            rollout_rs="token_k1,seq_mean_k2,seq_max_k3",
            rollout_rs_threshold="0.4_2.5,0.3,0.6",
        )


def test_the_rules_of_verl_are_known(verl_correction):
    assert set(RULES) - set(verl_correction.SUPPORTED_ROLLOUT_RS_OPTIONS) == {"seq_max_k1"}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_verls(verl_config, name):
    """What verl's class methods of these names set."""
    from verl.trainer.config import RolloutCorrectionConfig as Theirs

    made = getattr(Theirs, name)()
    for key in ("rollout_is", "rollout_rs", "bypass_mode"):
        assert PRESETS[name][key] == getattr(made, key), key
    if PRESETS[name]["rollout_is"] is not None:
        assert made.rollout_is_threshold == PRESETS[name]["rollout_is_threshold"]
    if PRESETS[name]["rollout_rs"] is not None:
        assert str(made.rollout_rs_threshold) == PRESETS[name]["rollout_rs_threshold"]
    if PRESETS[name]["bypass_mode"]:
        assert PRESETS[name]["loss_type"] == made.loss_type


def test_the_distance_of_the_policies(verl_correction):
    names = (
        "kl k3_kl training_ppl training_log_ppl rollout_ppl rollout_log_ppl log_ppl_diff log_ppl_abs_diff log_ppl_diff_max "
        "log_ppl_diff_min ppl_ratio chi2_token chi2_seq"
    )
    for seed in range(5):
        assert_same(verl_correction, ragged_batch(seed), names.split())


# ---- where they differ on purpose --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log_ratio", "kept", "kept_there"), [(math.log(1.8), True, False), (math.log(0.55), False, True)]
)
@pytest.mark.parametrize("rule", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_bounds_of_k1_are_of_the_ratio_and_of_its_inverse_there(verl_correction, rule, log_ratio, kept, kept_there):
    """0.6 to 2: r = 1.8 lies within, and 1 / 1.8 does not."""
    batch = literal_batch([[1]], old_log_probs=[[-1.0 + log_ratio]], rollout_log_probs=[[-1.0]])
    settings = {"rollout_rs": rule, "rollout_rs_threshold": "0.6_2.0"}
    assert ours(batch, **settings)[1].item() is kept
    assert theirs(verl_correction, batch, **settings)[1].item() is kept_there


def test_sequence_weights_are_normalised_over_tokens_and_over_rows_there(verl_correction):
    """Rows of 3 and 1 tokens with weights 1 and 2: their mean is 5/4 over tokens and 3/2 over rows."""
    batch = literal_batch(
        [[1, 1, 1], [1, 0, 0]],
        old_log_probs=[[-1.0] * 3, [-1.0 + math.log(2), 0, 0]],
        rollout_log_probs=[[-1.0] * 3, [-1.0, 0, 0]],
    )
    settings = {"rollout_is": "sequence", "rollout_is_batch_normalize": True}
    key = "rollout_corr/rollout_is_batch_norm_factor"
    assert ours(batch, **settings)[2][key] == pytest.approx(5 / 4)
    assert theirs(verl_correction, batch, **settings)[2][key] == pytest.approx(3 / 2)


def test_normalising_leaves_out_what_is_rejected_and_counts_it_there(verl_correction):
    batch = literal_batch([[1, 1, 1]], old_log_probs=[[-1.0, -1.0, -1.0 + math.log(4)]], rollout_log_probs=[[-1.0] * 3])
    settings = {
        "rollout_is": "token",
        "rollout_is_threshold": 5.0,
        "rollout_is_batch_normalize": True,
        "rollout_rs": "token_k1",
        "rollout_rs_threshold": 2.0,
    }
    key = "rollout_corr/rollout_is_batch_norm_factor"
    assert ours(batch, **settings)[2][key] == pytest.approx(1.0)
    assert theirs(verl_correction, batch, **settings)[2][key] == pytest.approx(2.0)


def test_the_largest_token_ratio_is_told_before_it_is_truncated_and_after_there(verl_correction):
    batch = literal_batch([[1, 1]], old_log_probs=[[-1.0 + math.log(4), -1.0]], rollout_log_probs=[[-1.0] * 2])
    key = "rollout_corr/rollout_is_max"
    assert ours(batch, rollout_is="token")[2][key] == pytest.approx(4.0)
    assert theirs(verl_correction, batch, rollout_is="token")[2][key] == pytest.approx(2.0)
