"""The bypass loss against hand-computed answers and naive loops, and its independence of how a mini-batch is cut."""

import math
from dataclasses import replace

import pytest
import torch

from burnish.config import FSDPActorConfig, RolloutCorrectionConfig
from burnish.config.actor_rollout_ref import PolicyLossConfig
from burnish.config.rejection import PRESETS
from burnish.conformance.batches import ragged_batch
from burnish.conformance.losses.term import reference_inputs
from burnish.conformance.references import LOSS_REFERENCES, LOSS_SETTINGS
from burnish.conformance.shared_ranks import on_ranks
from burnish.core_algos.aggregation import LOSS_AGG_MODES
from burnish.core_algos.policy_losses import (
    compute_policy_loss_bypass_mode,
    compute_policy_loss_vanilla,
    preparation_of,
)
from burnish.core_algos.rollout_correction import compute_rollout_correction_and_rejection_mask
from burnish.utils.errors import ConfigError, TrainingError

LOG2 = math.log(2.0)
BYPASS_PRESETS = [name for name in PRESETS if name.startswith("bypass")]
# Both need the whole mini-batch, and rows as well as tokens are rejected.
ALL_OF_IT = {
    "loss_type": "reinforce",
    "rollout_is": "sequence",
    "rollout_is_batch_normalize": True,
    "rollout_rs": "token_k1,seq_mean_k3,seq_max_k2",
    "rollout_rs_threshold": "0.5_2.0,0.15,0.6",
}


def actor(correction: dict | None = None, **keys) -> FSDPActorConfig:
    of_loss = PolicyLossConfig(loss_mode="bypass_mode")
    if correction is not None:
        of_loss.rollout_correction = RolloutCorrectionConfig(**correction)
    return FSDPActorConfig(policy_loss=of_loss, **keys)


def one_row(log_ratios: list[float], advantages: list[float], **correction):
    """Loss, gradient and metrics of one row whose rollout log-probs are -1."""
    log_prob = (torch.tensor([log_ratios], dtype=torch.float64) - 1.0).requires_grad_()
    old, mask = torch.full_like(log_prob, -1.0), torch.ones_like(log_prob)
    loss, metrics = compute_policy_loss_bypass_mode(
        old, log_prob, torch.tensor([advantages], dtype=torch.float64), mask, "token-mean", actor(correction)
    )
    loss.backward()
    return loss.item(), log_prob.grad[0].tolist(), {name: value.item() for name, value in metrics.items()}


def test_reinforce_weighs_log_probs_and_its_weights_have_no_gradient():
    loss, gradient, metrics = one_row(
        [LOG2, -LOG2, 2.0], [1.0, -1.0, 0.5], loss_type="reinforce", rollout_is="token", rollout_is_threshold=3.0
    )
    assert loss == pytest.approx(-(2.0 * (LOG2 - 1) * 1.0 + 0.5 * (-LOG2 - 1) * -1.0 + 3.0 * 1.0 * 0.5) / 3)
    assert gradient == pytest.approx([-2.0 / 3, 0.5 / 3, -1.5 / 3])
    assert metrics == pytest.approx(
        {
            "actor/ppo_kl": -2.0 / 3,
            "rollout_corr/kl": -2.0 / 3,
            "rollout_corr/k3_kl": ((1 - LOG2) + (LOG2 - 0.5) + (math.exp(2) - 3)) / 3,
            "rollout_corr/rollout_is_mean": 5.5 / 3,
            "rollout_corr/rollout_is_max": math.exp(2),
            "rollout_corr/rollout_is_min": 0.5,
        }
    )


def test_reinforce_leaves_out_what_is_outside_of_two_bounds():
    correction = {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": "0.6_2.5"}
    loss, gradient, metrics = one_row([LOG2, -LOG2, 2.0], [1.0, -1.0, 0.5], **correction)
    assert loss == pytest.approx(-2.0 * (LOG2 - 1) / 3)
    assert gradient == pytest.approx([-2.0 / 3, 0.0, 0.0])
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(2.0 / 3)


def test_reinforce_takes_the_product_over_the_row():
    _, gradient, _ = one_row([LOG2, -2 * LOG2], [1.0, 1.0], loss_type="reinforce", rollout_is="sequence")
    assert gradient == pytest.approx([-0.25, -0.25])


def test_reinforce_without_weights_is_reinforce():
    loss, gradient, metrics = one_row([5.0, -5.0], [1.0, 2.0], loss_type="reinforce")
    assert loss == pytest.approx(-(4.0 - 12.0) / 2)
    assert gradient == pytest.approx([-0.5, -1.0])
    assert not any("rollout_is" in name or "rollout_rs" in name for name in metrics)


@pytest.mark.parametrize("rollout_is", [None, "token", "sequence"])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_ppo_clip_is_vanilla_and_only_reports_its_weights(mode, rollout_is):
    b = ragged_batch(0)
    args = (b.old_log_probs, b.log_probs, b.advantages, b.mask, mode)
    loss, metrics = compute_policy_loss_bypass_mode(
        *args, actor({"rollout_is": rollout_is, "rollout_is_threshold": 1.1})
    )
    vanilla, vanilla_metrics = compute_policy_loss_vanilla(*args, actor())
    torch.testing.assert_close(loss, vanilla, rtol=1e-12, atol=0)
    assert {name: metrics[name] for name in vanilla_metrics} == vanilla_metrics
    assert ("rollout_corr/rollout_is_mean" in metrics) == (rollout_is is not None)


def test_weights_that_are_given_are_multiplied_by_reinforce_alone_and_get_no_gradient():
    b = ragged_batch(3)
    weights = b.values.exp().requires_grad_()
    args = (b.old_log_probs, b.log_probs, b.advantages, b.mask, "token-mean")
    clipped, _ = compute_policy_loss_bypass_mode(*args, actor({"rollout_is": "token"}), weights)
    torch.testing.assert_close(clipped, compute_policy_loss_vanilla(*args, actor())[0], rtol=1e-12, atol=0)
    log_prob = b.log_probs.clone().requires_grad_()
    loss, _ = compute_policy_loss_bypass_mode(
        args[0], log_prob, *args[2:], actor({"rollout_is": "token", "loss_type": "reinforce"}), weights
    )
    loss.backward()
    expected = torch.where(b.mask, -weights.detach() * b.advantages, 0.0) / b.mask.sum()
    torch.testing.assert_close(log_prob.grad, expected, rtol=1e-12, atol=0)
    assert weights.grad is None


@pytest.mark.parametrize("normalize", [False, True])
def test_weights_that_are_given_do_not_keep_it_from_rejecting(normalize):
    b = ragged_batch(3)
    weights = b.values.exp()
    keys = {**ALL_OF_IT, "rollout_is_batch_normalize": normalize}
    args = (b.old_log_probs, b.log_probs, b.advantages)
    loss, metrics = compute_policy_loss_bypass_mode(*args, b.mask, "token-mean", actor(keys), weights)
    _, kept, _ = compute_rollout_correction_and_rejection_mask(
        b.log_probs, b.old_log_probs, b.mask, RolloutCorrectionConfig(**keys)
    )
    assert 0 < kept.sum() < b.mask.sum()
    expected = (-weights * b.advantages * b.log_probs)[kept].mean()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"].item() == pytest.approx(1 - kept.sum() / b.mask.sum())


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("rollout_is", [None, "token", "sequence"])
@pytest.mark.parametrize("rollout_rs", [None, "token_k1,seq_mean_k3"])
def test_once_prepared_nothing_is_read_back_from_the_device(loss_type, rollout_is, rollout_rs):
    # Meta tensors hold no values: an item(), a nonzero() or an `if` on one of them raises.
    old, new, advantages, weights, fraction = (torch.empty(2, 3, device="meta") for _ in range(5))
    new.requires_grad_()
    correction = {"loss_type": loss_type, "rollout_is": rollout_is, "rollout_rs": rollout_rs}
    config = actor(
        {**correction, "rollout_rs_threshold": "2.0,0.1" if rollout_rs else None, "rollout_is_batch_normalize": True},
        global_batch_info={"batch_num_tokens": 7, "global_batch_size": 3, "dp_size": 2},
    )
    loss, metrics = compute_policy_loss_bypass_mode(
        old,
        new,
        advantages,
        torch.empty(2, 3, dtype=torch.bool, device="meta"),
        "token-mean",
        config,
        weights if rollout_is else None,
        None if rollout_rs is None else fraction,
    )
    loss.backward()
    assert new.grad.device.type == "meta"
    assert {value.device.type for value in metrics.values()} == {"meta"}


def test_without_a_section_of_its_own_it_is_ppo_clip_without_correction():
    b = ragged_batch(1)
    args = (b.old_log_probs, b.log_probs, b.advantages, b.mask, "token-mean")
    loss, _ = compute_policy_loss_bypass_mode(*args, actor(None))
    torch.testing.assert_close(loss, compute_policy_loss_vanilla(*args, actor())[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_what_is_rejected_has_no_gradient_and_is_in_no_denominator(loss_type):
    keys = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    loss, gradient, metrics = one_row([0.1, 3.0, -3.0], [1.0, 1.0, 1.0], loss_type=loss_type, **keys)
    alone, alone_gradient, _ = one_row([0.1], [1.0], loss_type=loss_type)
    assert loss == pytest.approx(alone)
    assert gradient == pytest.approx([alone_gradient[0], 0.0, 0.0])
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 3)
    assert metrics["rollout_corr/kl"] == pytest.approx(-0.1)


@pytest.mark.parametrize("preset", BYPASS_PRESETS)
def test_on_policy_every_preset_is_the_policy_gradient(preset):
    b = ragged_batch(2)
    log_prob = b.old_log_probs.clone().requires_grad_()
    loss, metrics = compute_policy_loss_bypass_mode(
        b.old_log_probs, log_prob, b.advantages, b.mask, "token-mean", actor(PRESETS[preset])
    )
    loss.backward()
    expected = torch.where(b.mask, -b.advantages, 0.0) / b.mask.sum()
    torch.testing.assert_close(log_prob.grad, expected, rtol=1e-12, atol=1e-15)
    assert metrics["rollout_corr/kl"] == metrics["rollout_corr/k3_kl"] == 0.0
    assert metrics.get("rollout_corr/rollout_is_mean", 1.0) == 1.0
    assert metrics.get("rollout_corr/rollout_rs_masked_fraction", 0.0) == 0.0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_alone_it_equals_the_correction_of_the_whole_batch_and_a_naive_loop(loss_type, mode, seed):
    b = ragged_batch(seed)
    correction = {**ALL_OF_IT, "loss_type": loss_type}
    loss, metrics = compute_policy_loss_bypass_mode(
        b.old_log_probs, b.log_probs, b.advantages, b.mask, mode, actor(correction, clip_ratio=0.2)
    )
    weights, kept, of_batch = compute_rollout_correction_and_rejection_mask(
        b.log_probs, b.old_log_probs, b.mask, RolloutCorrectionConfig(**correction)
    )
    assert 0 < kept.sum() < b.mask.sum()
    inputs = reference_inputs(replace(b, mask=kept, weights=weights), weighted=loss_type == "reinforce")
    naive = LOSS_REFERENCES["vanilla" if loss_type == "ppo_clip" else "gpg"]
    expected = naive(inputs, {**LOSS_SETTINGS, "loss_agg_mode": mode, "loss_scale_factor": b.mask.shape[1]})
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    fraction = "rollout_corr/rollout_rs_masked_fraction"
    assert metrics[fraction].item() == pytest.approx(of_batch[fraction], rel=1e-6)


def split_step(b, config, cuts: list[list[slice]], mode: str = "token-mean"):
    """One optimizer step, prepared and then taken in micro-batches, over as many ranks as there are lists of them."""
    prepare = preparation_of(compute_policy_loss_bypass_mode, config)
    rows_of_rank = [[row for cut in rank for row in range(len(b.mask))[cut]] for rank in cuts]

    def prepared_rows(rank: int, collective):
        c = b.map(lambda tensor: tensor[rows_of_rank[rank]])
        tensors = prepare(c.old_log_probs, c.log_probs, c.advantages, c.mask, config, collective=collective)
        assert not any(tensor.requires_grad for tensor in tensors.values())
        return tensors

    prepared = on_ranks(len(cuts), prepared_rows) if prepare is not None else [{} for _ in cuts]
    masks = [tensors.pop("response_mask", b.mask[rows]) for tensors, rows in zip(prepared, rows_of_rank, strict=True)]
    counted = torch.cat(masks)
    info = {
        "dp_size": len(cuts),
        "batch_num_tokens": int(counted.sum()),
        "global_batch_size": int(counted.any(-1).sum()),
        "loss_scale_factor": 9,
    }
    config = actor(vars_of(config), global_batch_info=info)
    log_prob = b.log_probs.clone().requires_grad_()
    parts = []
    for rank, slices in enumerate(cuts):
        position = 0
        for cut in slices:
            here = slice(position, position + len(range(len(b.mask))[cut]))
            position = here.stop
            tensors = {name: tensor[here] for name, tensor in prepared[rank].items()}
            loss, metrics = compute_policy_loss_bypass_mode(
                b.old_log_probs[cut], log_prob[cut], b.advantages[cut], masks[rank][here], mode, config, **tensors
            )
            parts.append((loss / len(cuts), metrics))
    total = sum(loss for loss, _ in parts)
    total.backward()
    return total.item(), log_prob.grad, joined([metrics for _, metrics in parts])


def vars_of(config: FSDPActorConfig) -> dict:
    correction = config.policy_loss.rollout_correction
    return {name: getattr(correction, name) for name in correction.__slots__}


def joined(parts: list[dict]) -> dict[str, float]:
    by_suffix = {"_max": max, "_min": min}
    return {name: by_suffix.get(name[-4:], sum)(part[name].item() for part in parts) for name in parts[0]}


CUTS = {
    "halves": [[slice(0, 6), slice(6, 12)]],
    "rows": [[slice(row, row + 1) for row in range(12)]],
    "two ranks": [[slice(0, 2), slice(2, 7)], [slice(7, 12)]],
    "three ranks, rows dealt out": [[slice(rank, None, 3)] for rank in range(3)],
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_a_step_does_not_depend_on_how_it_is_cut_and_spread(loss_type, mode, cuts):
    b = ragged_batch(4)
    config = actor({**ALL_OF_IT, "loss_type": loss_type})
    whole_loss, whole_gradient, whole_metrics = split_step(b, config, [[slice(None)]], mode)
    loss, gradient, metrics = split_step(b, config, cuts, mode)
    assert whole_gradient.any()
    assert loss == pytest.approx(whole_loss, rel=1e-10)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-10, atol=1e-14)
    assert metrics == pytest.approx(whole_metrics, rel=1e-6)
    if mode == "token-mean":
        log_prob = b.log_probs.clone().requires_grad_()
        alone, alone_metrics = compute_policy_loss_bypass_mode(
            b.old_log_probs, log_prob, b.advantages, b.mask, mode, config
        )
        alone.backward()
        torch.testing.assert_close(gradient, log_prob.grad, rtol=1e-10, atol=1e-14)
        assert metrics == pytest.approx({name: value.item() for name, value in alone_metrics.items()}, rel=1e-6)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_plain_weights_need_no_preparation_and_do_not_depend_on_the_cut(cuts):
    b = ragged_batch(5)
    config = actor({"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_threshold": 1.3})
    assert preparation_of(compute_policy_loss_bypass_mode, config) is None
    whole = split_step(b, config, [[slice(None)]])
    cut = split_step(b, config, cuts)
    torch.testing.assert_close(cut[1], whole[1], rtol=1e-12, atol=0)
    assert cut[2] == pytest.approx(whole[2], rel=1e-12)


def test_a_rank_whose_rows_are_all_rejected_takes_part():
    b = ragged_batch(6)
    b.log_probs[:6] = b.old_log_probs[:6] + 5.0
    config = actor({**ALL_OF_IT, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "2.0"})
    whole_loss, whole_gradient, whole_metrics = split_step(b, config, [[slice(None)]])
    loss, gradient, metrics = split_step(b, config, [[slice(0, 3), slice(3, 6)], [slice(6, 12)]])
    assert loss == pytest.approx(whole_loss, rel=1e-10)
    assert not gradient[:6].any()
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-10, atol=1e-14)
    assert metrics == pytest.approx(whole_metrics, rel=1e-6)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] >= b.mask[:6].sum() / b.mask.sum() - 1e-6
    assert metrics["rollout_corr/rollout_is_max"] < math.exp(5.0)


def test_if_everything_is_rejected_the_prepared_mask_is_empty_and_finite():
    b = ragged_batch(7)
    config = actor({**ALL_OF_IT, "rollout_rs": "token_k2", "rollout_rs_threshold": "1e-12"})
    prepared = preparation_of(compute_policy_loss_bypass_mode, config)(
        b.old_log_probs, b.log_probs, b.advantages, b.mask, config
    )
    assert not prepared["response_mask"].any()
    assert torch.all(prepared["rejected_fraction"] == 1.0)
    assert prepared["rollout_is_weights"].isfinite().all()
    with pytest.raises(TrainingError, match="empty"):
        compute_policy_loss_bypass_mode(b.old_log_probs, b.log_probs, b.advantages, b.mask, "token-mean", config)


@pytest.mark.parametrize(
    ("correction", "keys"),
    [
        ({}, None),
        ({"loss_type": "reinforce", "rollout_is": "token"}, None),
        ({"rollout_is": "token", "rollout_is_batch_normalize": True}, None),
        ({"loss_type": "reinforce", "rollout_is_batch_normalize": True}, None),
        (
            {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_batch_normalize": True},
            {"rollout_is_weights"},
        ),
        (
            {"rollout_is": "token", "rollout_rs": "token_k2", "rollout_rs_threshold": "1"},
            {"response_mask", "rejected_fraction"},
        ),
        (
            {"loss_type": "reinforce", "rollout_is": "token", "rollout_rs": "token_k2", "rollout_rs_threshold": "1"},
            {"response_mask", "rejected_fraction", "rollout_is_weights"},
        ),
    ],
)
def test_a_pass_before_the_update_is_asked_for_only_where_something_needs_it(correction, keys):
    b = ragged_batch(0)
    config = actor(correction)
    prepare = preparation_of(compute_policy_loss_bypass_mode, config)
    assert (prepare is None) == (keys is None)
    if prepare is not None:
        assert prepare(b.old_log_probs, b.log_probs, b.advantages, b.mask, config).keys() == keys


@pytest.mark.parametrize("correction", [ALL_OF_IT, {"loss_type": "reinforce", "rollout_is": "token"}, {}])
def test_nan_of_the_policy_is_neither_rejected_nor_an_error_but_surfaces(correction):
    b = ragged_batch(1)
    # Every other token of its row would be rejected.
    b.log_probs[2] += 5.0
    b.log_probs[2, b.mask[2].nonzero()[0, 0]] = math.nan
    b.log_probs[~b.mask] = math.nan
    loss, _ = compute_policy_loss_bypass_mode(
        b.old_log_probs, b.log_probs, b.advantages, b.mask, "token-mean", actor(correction)
    )
    assert loss.isnan()


@pytest.mark.parametrize("correction", [ALL_OF_IT, {}])
@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
def test_what_is_not_finite_in_the_rollouts_log_probs_is_told(correction, rubbish):
    b = ragged_batch(1)
    column = b.mask[3].nonzero()[0, 0]
    b.old_log_probs[3, column] = rubbish
    with pytest.raises(TrainingError, match=f"old_log_prob holds NaN or inf.*row 3, token {column}"):
        compute_policy_loss_bypass_mode(
            b.old_log_probs, b.log_probs, b.advantages, b.mask, "token-mean", actor(correction)
        )


@pytest.mark.parametrize("correction", [ALL_OF_IT, {"loss_type": "reinforce", "rollout_is": "sequence"}])
@pytest.mark.parametrize("difference", [100.0, -100.0, 1000.0, -1000.0])
def test_an_extreme_ratio_gives_a_finite_loss_and_gradient(correction, difference):
    log_prob = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-1.0 - difference, -1.0], [-1.0, -1.0]])
    loss, metrics = compute_policy_loss_bypass_mode(
        old, log_prob, torch.ones(2, 2), torch.ones(2, 2), "token-mean", actor(correction)
    )
    loss.backward()
    assert loss.isfinite()
    assert log_prob.grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())


def test_an_empty_micro_batch_is_neutral():
    config = actor(
        {"loss_type": "reinforce", "rollout_is": "token"}, global_batch_info={"batch_num_tokens": 8, "dp_size": 1}
    )
    log_prob = torch.full((2, 3), math.nan, requires_grad=True)
    loss, metrics = compute_policy_loss_bypass_mode(
        torch.zeros(2, 3), log_prob, torch.ones(2, 3), torch.zeros(2, 3), "token-mean", config
    )
    loss.backward()
    assert loss.item() == 0.0
    assert not log_prob.grad.any()
    assert metrics.pop("rollout_corr/rollout_is_max") == pytest.approx(math.exp(-20))
    assert metrics.pop("rollout_corr/rollout_is_min") == pytest.approx(math.exp(20))
    assert not any(metrics.values())


def test_what_is_missing_or_unknown_in_its_section_is_told():
    b = ragged_batch(0)
    args = (b.old_log_probs, b.log_probs, b.advantages, b.mask, "token-mean")
    with pytest.raises(ConfigError, match="needs config"):
        compute_policy_loss_bypass_mode(*args)
    with pytest.raises(ConfigError, match=r"rollout_correction\.loss_type=pg: .*Known: ppo_clip, reinforce"):
        compute_policy_loss_bypass_mode(*args, actor({"loss_type": "pg"}))
    with pytest.raises(ConfigError, match=r"rollout_rs=token_k9: 'token_k9' is no rule"):
        compute_policy_loss_bypass_mode(*args, actor({"rollout_rs": "token_k9", "rollout_rs_threshold": "1"}))
