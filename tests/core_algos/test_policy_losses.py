"""What every policy loss keeps: extremes, masks, NaN, gradients, metrics, and independence of how a step is cut."""

import math

import pytest
import torch

from burnish.config import FSDPActorConfig
from burnish.config.actor_rollout_ref import PolicyLossConfig
from burnish.conformance.batches import RaggedBatch, ragged_batch
from burnish.conformance.shared_ranks import on_ranks
from burnish.core_algos.aggregation import LOSS_AGG_MODES
from burnish.core_algos.policy_losses import (
    POLICY_LOSSES,
    compute_policy_loss,
    compute_policy_loss_clip,
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
    preparation_of,
    register_policy_loss,
)
from burnish.utils.errors import ConfigError, TrainingError

ALL = pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
# The loss of the bypass mode computes its own weights.
WEIGHTED = pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"bypass_mode"}))
# clip_cov and kl_cov choose several tokens of a small batch.
KEYS = {"clip_cov_ratio": 0.15, "clip_cov_lb": 0.0, "clip_cov_ub": 9.0, "kl_cov_ratio": 0.15}


def settings(info: dict | None = None, **keys) -> FSDPActorConfig:
    return FSDPActorConfig(policy_loss=PolicyLossConfig(**KEYS), global_batch_info=info or {}, **keys)


def call(name: str, old, new, advantages, mask, *args, **kwargs):
    return get_policy_loss_fn(name)(old, new, advantages, mask, "token-mean", settings(), *args, **kwargs)


def assert_finite(name: str, pairs: list[tuple[float, float]], advantage: float) -> None:
    """Of responses with one token (old, new) each, beside one that has not moved."""
    old, log_prob = (torch.tensor([[pair[i], -1.0] for pair in pairs]) for i in range(2))
    log_prob.requires_grad_()
    loss, metrics = call(name, old, log_prob, torch.full(old.shape, advantage), torch.ones(old.shape))
    loss.backward()
    assert loss.isfinite()
    assert log_prob.grad.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())


@ALL
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_extreme_ratio_gives_a_finite_loss_and_gradient(name, advantage):
    far = [-1.0 + difference for difference in (100.0, -100.0, 1000.0, -1000.0)]
    assert_finite(name, [(-1.0, value) for value in far] + [(value, -1.0) for value in far], advantage)


@ALL
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_token_of_probability_one_gives_a_finite_loss_and_gradient(name, advantage):
    pairs = [(near_one, other) for near_one in (0.0, -1e-9, 1e-6) for other in (-0.5, 0.0, -50.0)]
    assert_finite(name, pairs + [(new, old) for old, new in pairs], advantage)


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
@ALL
def test_what_lies_outside_the_mask_changes_neither_loss_nor_gradient_nor_metrics(name, rubbish):
    def run(inputs: list[torch.Tensor], mask: torch.Tensor):
        old, new, advantages, weights = inputs
        new.requires_grad_()
        loss, metrics = call(name, old, new, advantages, mask, weights)
        loss.backward()
        return loss.item(), new.grad[0, 0].item(), {key: value.item() for key, value in metrics.items()}, new.grad

    def inputs(width: int) -> list[torch.Tensor]:
        return [torch.full((1, width), value) for value in (-1.3, -1.2, 0.7, 1.5)]

    alone = run(inputs(1), torch.ones(1, 1))
    for where in range(4):
        wide = inputs(2)
        wide[where][0, 1] = rubbish
        result = run(wide, torch.tensor([[1, 0]]))
        assert result[:2] == pytest.approx(alone[:2])
        assert result[2] == pytest.approx(alone[2])
        assert result[3][0, 1].item() == 0.0


@WEIGHTED
@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
@pytest.mark.parametrize(("where", "argument"), [(0, "old_log_prob"), (1, "advantages"), (2, "rollout_is_weights")])
def test_a_constant_that_is_not_finite_inside_the_mask_is_refused_by_name(name, rubbish, where, argument):
    constants = [torch.full((3, 4), -1.0), torch.ones(3, 4), torch.ones(3, 4)]
    constants[where][2, 1:3] = rubbish
    constants[where][0, 0] = rubbish
    mask = torch.ones(3, 4)
    mask[0, 0] = 0
    old, advantages, weights = constants
    with pytest.raises(TrainingError, match=rf"{argument} holds NaN or inf in 2 of the 11.*first at row 2, token 1"):
        call(name, old, torch.full((3, 4), -1.0), advantages, mask, weights)


@ALL
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_nan_of_the_model_surfaces_in_the_loss_and_in_the_gradient_of_the_model(name, advantage):
    logits = torch.tensor([[0.1, 0.2], [math.nan, 0.3]], requires_grad=True)
    log_prob = logits.log_softmax(-1)[:, 0][None]
    loss, _ = call(name, torch.full((1, 2), -0.8), log_prob, torch.full((1, 2), advantage), torch.ones(1, 2))
    loss.backward()
    assert loss.isnan()
    assert logits.grad.isnan().any()


@ALL
def test_only_the_policy_gets_a_gradient(name):
    tensors = [torch.randn(2, 3, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(4)]
    old, new, advantages, weights = tensors
    loss, metrics = call(name, old, new, advantages, torch.ones(2, 3), weights)
    loss.backward()
    assert new.grad is not None
    assert old.grad is advantages.grad is weights.grad is None
    assert all(not metric.requires_grad and metric.dim() == 0 for metric in metrics.values())


@ALL
def test_log_probs_in_bf16_give_nearly_the_gradient_of_fp32(name):
    b = ragged_batch(5)
    old, new, advantages = (x.bfloat16() for x in (b.old_log_probs, b.log_probs, b.advantages))
    half, full = new.clone().requires_grad_(), new.float().requires_grad_()
    loss, _ = call(name, old, half, advantages, b.mask)
    expected, _ = call(name, old.float(), full, advantages.float(), b.mask)
    loss.backward()
    expected.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(half.grad.float(), full.grad, rtol=2**-8, atol=1e-6)


def prepared(name: str, b: RaggedBatch, ranks: list[list[int]], noise: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the loss decides over the whole batch, its rows spread over ``ranks``; in the order of the batch."""
    config = settings()
    prepare = preparation_of(get_policy_loss_fn(name), config)
    if prepare is None:
        return {}

    def on_rank(rank, collective):
        rows = ranks[rank]
        inputs = (x[rows] for x in (b.old_log_probs, b.log_probs, b.advantages, b.mask))
        return prepare(*inputs, config, noise=noise[rows], collective=collective)

    parts = on_ranks(len(ranks), on_rank)
    order = torch.tensor([row for rows in ranks for row in rows]).argsort()
    return {key: torch.cat([part[key] for part in parts])[order] for key in parts[0]}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@ALL
def test_loss_gradient_and_metrics_do_not_depend_on_how_the_step_is_cut(name, mode, dtype, tolerance):
    b = ragged_batch(7).to(dtype)
    b.mask[2] = False
    weights = b.values.exp()
    noise = torch.rand(b.mask.shape, generator=torch.Generator().manual_seed(1))
    info = {"batch_num_tokens": int(b.mask.sum()), "global_batch_size": int(b.mask.any(-1).sum())}

    def run(ranks: list[list[list[int]]]):
        """The ranks' micro-batches; the gradient is averaged over the ranks, metrics are summed."""
        log_prob = b.log_probs.clone().requires_grad_()
        config = settings(info | {"dp_size": len(ranks), "loss_scale_factor": 16.0})
        keywords = prepared(name, b, [[row for rows in micro for row in rows] for micro in ranks], noise)
        loss, metrics = 0.0, {}
        for rows in (rows for micro_batches in ranks for rows in micro_batches):
            old, new, advantages, mask, weight = (
                x[rows] for x in (b.old_log_probs, log_prob, b.advantages, b.mask, weights)
            )
            part, part_metrics = get_policy_loss_fn(name)(
                old, new, advantages, mask, mode, config, weight, **{key: x[rows] for key, x in keywords.items()}
            )
            (part / len(ranks)).backward()
            loss += part.detach() / len(ranks)
            metrics = {key: metrics.get(key, 0.0) + value for key, value in part_metrics.items()}
        return loss, log_prob.grad, metrics

    rows = list(range(len(b.mask)))
    whole_loss, whole_gradient, whole_metrics = run([[rows]])
    shuffled = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    cuts = {
        "row by row": [[[row] for row in rows]],
        "permuted": [[shuffled[:4], shuffled[4:]]],
        "two ranks": [[rows[:2], rows[2:4]], [rows[4:]]],
        "three ranks, permuted": [[shuffled[:5]], [[row] for row in shuffled[5:9]], [shuffled[9:]]],
    }
    for cut, ranks in cuts.items():
        loss, gradient, metrics = run(ranks)
        assert (loss - whole_loss).abs() <= tolerance * whole_loss.abs().clamp(min=1), cut
        assert (gradient - whole_gradient).norm() <= tolerance * whole_gradient.norm(), cut
        for key, value in whole_metrics.items():
            # Shares of tokens are counted in fp32.
            assert metrics[key].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-6), (cut, key)


@WEIGHTED
def test_rollout_weights_multiply_the_loss(name):
    b = ragged_batch(3)
    args = (b.old_log_probs, b.log_probs, b.advantages, b.mask)
    loss, metrics = call(name, *args)
    weighted_loss, weighted_metrics = call(name, *args, torch.full_like(b.values, 1.7))
    torch.testing.assert_close(weighted_loss, 1.7 * loss)
    torch.testing.assert_close(weighted_metrics, metrics)
    assert call(name, *args, torch.zeros_like(b.values))[0].item() == 0.0


@ALL
def test_a_wrong_mask_or_shape_is_refused_by_name(name):
    b = ragged_batch(0)
    with pytest.raises(TrainingError, match="response_mask holds values other than 0 and 1"):
        call(name, b.old_log_probs, b.log_probs, b.advantages, b.advantages)
    for where, argument in enumerate(["old_log_prob", "advantages", "rollout_is_weights"]):
        constants = [b.old_log_probs, b.advantages, b.values.exp()]
        constants[where] = constants[where][:, :1]
        old, advantages, weights = constants
        # TypeError: the shape annotations, which are enforced in tests.
        with pytest.raises((TrainingError, TypeError), match=argument):
            call(name, old, b.log_probs, advantages, b.mask, weights)


@ALL
def test_an_empty_mask_is_refused_unless_the_step_has_tokens_elsewhere(name):
    log_prob = torch.full((2, 3), -1.0, requires_grad=True)
    args = (torch.full((2, 3), -1.0), log_prob, torch.ones(2, 3), torch.zeros(2, 3))
    with pytest.raises(TrainingError, match="response_mask"):
        call(name, *args)
    config = settings({"batch_num_tokens": 7, "global_batch_size": 3, "dp_size": 2})
    loss, metrics = get_policy_loss_fn(name)(*args, "token-mean", config)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(log_prob.grad, torch.zeros(2, 3))
    assert all(value.isfinite() for value in metrics.values())


@ALL
def test_within_a_step_nothing_is_read_back_from_the_device(name):
    # Meta tensors hold no values: an item(), a nonzero() or an `if` on one of them raises.
    old, new, advantages, weights = (torch.empty(2, 3, device="meta") for _ in range(4))
    new.requires_grad_()
    chosen = torch.empty(2, 3, dtype=torch.bool, device="meta")
    keywords = {"clip_cov": {"keep": chosen}, "kl_cov": {"penalized": chosen}}.get(name, {})
    config = settings({"batch_num_tokens": 7, "global_batch_size": 3, "dp_size": 2})
    loss, metrics = get_policy_loss_fn(name)(old, new, advantages, chosen, "token-mean", config, weights, **keywords)
    loss.backward()
    assert new.grad.device.type == "meta"
    assert {value.device.type for value in metrics.values()} == {"meta"}


@ALL
def test_a_loss_needs_its_config(name):
    with pytest.raises(ConfigError, match="needs config"):
        get_policy_loss_fn(name)(*(torch.zeros(1, 1),) * 3, torch.ones(1, 1))


@pytest.mark.parametrize("name", ["vanilla", "dppo_tv", "dppo_kl"])
def test_the_bound_of_a_ratio_must_be_above_one(name):
    with pytest.raises(ConfigError, match=r"clip_ratio_c=1\.0 must be above 1"):
        get_policy_loss_fn(name)(*(torch.zeros(1, 1),) * 3, torch.ones(1, 1), config=FSDPActorConfig(clip_ratio_c=1.0))


def test_names():
    assert compute_policy_loss is compute_policy_loss_clip is compute_policy_loss_vanilla
    assert get_policy_loss_fn("vanilla") is compute_policy_loss_vanilla
    with pytest.raises(ConfigError, match=r"policy_loss\.loss_mode=vanila.*Did you mean 'vanilla'"):
        get_policy_loss_fn("vanila")


def test_a_registered_loss_is_found_by_its_name_and_has_its_preparation_when_it_is_wanted():
    def prepare(old_log_prob, log_prob, advantages, response_mask, config, *, noise=None, collective=None):
        return None

    @register_policy_loss("of_this_test", prepare=prepare, prepare_when=lambda config: config.clip_ratio > 0.3)
    def mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        return log_prob.sum(), {}

    try:
        assert get_policy_loss_fn("of_this_test") is mine
        assert preparation_of(mine, FSDPActorConfig(clip_ratio=0.4)) is prepare
        assert preparation_of(mine, FSDPActorConfig()) is None
    finally:
        del POLICY_LOSSES._entries["of_this_test"]


def test_only_losses_that_choose_tokens_cost_a_pass():
    wanting = {name for name in POLICY_LOSSES if preparation_of(get_policy_loss_fn(name), settings()) is not None}
    assert wanting == {"clip_cov", "kl_cov"}
