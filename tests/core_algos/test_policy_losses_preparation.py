"""Which tokens clip_cov and kl_cov choose from a mini-batch: the right ones, as many as wanted, on any number of ranks."""

import math
from dataclasses import replace

import pytest
import torch

from burnish.config import FSDPActorConfig
from burnish.config.actor_rollout_ref import PolicyLossConfig
from burnish.conformance.batches import RaggedBatch, ragged_batch
from burnish.conformance.losses.term import reference_inputs
from burnish.conformance.references.losses import covariances
from burnish.conformance.shared_ranks import on_ranks
from burnish.core_algos.policy_losses import (
    compute_policy_loss_clip_cov,
    compute_policy_loss_kl_cov,
    prepare_clip_cov,
    prepare_kl_cov,
)
from burnish.utils.errors import TrainingError

BOTH = pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])


def settings(**keys) -> FSDPActorConfig:
    return FSDPActorConfig(policy_loss=PolicyLossConfig(**keys), clip_ratio=0.3)


def choose(name: str, b: RaggedBatch, ranks: list[list[int]] | None = None, noise=None, **keys) -> set[tuple[int, int]]:
    """The chosen tokens by (row, token), with the rows spread over ``ranks``."""
    ranks = ranks or [list(range(len(b.mask)))]
    keys = {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "clip_cov_ub": 2.0, "kl_cov_ratio": 0.2} | keys

    def on_rank(rank, collective):
        rows = ranks[rank]
        inputs = (x[rows] for x in (b.old_log_probs, b.log_probs, b.advantages, b.mask))
        rank_noise = None if noise is None else noise[rows]
        prepare = prepare_clip_cov if name == "clip_cov" else prepare_kl_cov
        (result,) = prepare(*inputs, settings(**keys), noise=rank_noise, collective=collective).values()
        return ~result if name == "clip_cov" else result

    parts = on_ranks(len(ranks), on_rank)
    return {(ranks[rank][i], t) for rank, part in enumerate(parts) for i, t in part.nonzero().tolist()}


def noise_for(b: RaggedBatch, seed: int = 0) -> torch.Tensor:
    return torch.rand(b.mask.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(4))
def test_kl_cov_chooses_the_tokens_of_the_highest_covariance(seed):
    b = ragged_batch(seed)
    highest_first = sorted(covariances(reference_inputs(b, weighted=False)), reverse=True)
    expected = {(row, token) for _, row, token in highest_first[: int(0.2 * len(highest_first))]}
    assert choose("kl_cov", b, noise=noise_for(b)) == expected


@pytest.mark.parametrize("seed", range(4))
def test_clip_cov_chooses_the_smallest_noise_of_the_unclipped_tokens_between_its_bounds(seed):
    b, (low, high) = ragged_batch(seed), (0.1, 1.5)
    noise = noise_for(b, seed)
    by_covariance = {(row, token): value for value, row, token in covariances(reference_inputs(b, weighted=False))}
    ratios = (b.log_probs - b.old_log_probs).exp()
    # PPO's clip with 0.3 is active where the ratio has left the range on the side of the advantage.
    clipped = ((ratios > 1.3) & (b.advantages > 0)) | ((ratios < 0.7) & (b.advantages < 0))
    eligible = [token for token, value in by_covariance.items() if low < value < high and not clipped[token]]
    wanted = int(0.1 * len(by_covariance))
    assert 0 < wanted < len(eligible)
    chosen = choose("clip_cov", b, noise=noise, clip_cov_ratio=0.1, clip_cov_lb=low, clip_cov_ub=high)
    assert chosen == set(sorted(eligible, key=lambda token: noise[token].item())[:wanted])
    everything = choose("clip_cov", b, noise=noise, clip_cov_ratio=1.0, clip_cov_lb=low, clip_cov_ub=high)
    assert everything == set(eligible)


@BOTH
@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_the_same_however_the_rows_are_spread(name, seed):
    b = ragged_batch(seed).to(torch.float32)
    b.mask[3] = False
    noise = noise_for(b)
    rows = list(range(len(b.mask)))
    alone = choose(name, b, noise=noise)
    assert len(alone) > 1
    shuffled = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    # One rank has nothing but a row without a token, one has no row.
    for ranks in ([rows[:6], rows[6:]], [shuffled[:2], shuffled[2:]], [[3], rows[:3] + rows[4:]], [rows, []]):
        assert choose(name, b, ranks, noise) == alone


@BOTH
@pytest.mark.parametrize("constant", [0.1, -0.7, 1 / 3])
def test_equal_covariances_never_choose_more_than_wanted_and_noise_decides(name, constant):
    b = ragged_batch(1).to(torch.float32)
    # All advantages are equal: every covariance is exactly 0, without float noise that would rank the tokens.
    b.advantages.fill_(constant)
    b = replace(b, log_probs=b.old_log_probs)
    noise = noise_for(b)
    tokens = [tuple(token) for token in b.mask.nonzero().tolist()]
    expected = set(sorted(tokens, key=lambda token: noise[token].item())[: int(0.2 * len(tokens))])
    for ranks in ([list(range(12))], [list(range(5)), list(range(5, 12))]):
        assert choose(name, b, ranks, noise, clip_cov_lb=-1.0) == expected
    assert choose(name, b, noise=noise_for(b, 1), clip_cov_lb=-1.0) != expected


@BOTH
def test_without_noise_it_is_drawn_from_a_fixed_seed(name):
    b = ragged_batch(2)
    assert choose(name, b) == choose(name, b)


@BOTH
def test_at_least_one_token_is_chosen_and_none_of_an_empty_mini_batch(name):
    b = ragged_batch(2)
    assert len(choose(name, b, clip_cov_ratio=0.0, kl_cov_ratio=0.0)) == 1
    b.mask[:] = False
    assert choose(name, b, ranks=[list(range(6)), list(range(6, 12))]) == set()


@BOTH
def test_a_loss_called_alone_is_the_loss_with_the_preparation_of_the_tokens_given(name):
    b = ragged_batch(3)
    keys = {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "kl_cov_ratio": 0.2}
    log_prob = b.log_probs.clone().requires_grad_()
    args = (b.old_log_probs, log_prob, b.advantages, b.mask)
    loss_fn, prepare = {
        "clip_cov": (compute_policy_loss_clip_cov, prepare_clip_cov),
        "kl_cov": (compute_policy_loss_kl_cov, prepare_kl_cov),
    }[name]
    prepared = prepare(*args, settings(**keys))
    assert not any(tensor.requires_grad for tensor in prepared.values())
    alone, _ = loss_fn(*args, "token-mean", settings(**keys))
    given, _ = loss_fn(*args, "token-mean", settings(**keys), **prepared)
    assert torch.equal(alone, given)
    (argument,) = prepared
    other, _ = loss_fn(*args, "token-mean", settings(**keys), **{argument: ~prepared[argument]})
    assert not torch.equal(alone, other)
    with pytest.raises(TrainingError, match=f"{argument} holds values other than 0 and 1"):
        loss_fn(*args, "token-mean", settings(**keys), **{argument: torch.full_like(log_prob, 0.5)})


@BOTH
def test_bad_input_is_refused_by_name_but_nan_of_the_model_is_left_to_the_update(name):
    b = ragged_batch(4)
    b.mask[0, 0] = True
    b.log_probs[0, 0] = math.nan
    choose(name, b)
    b.advantages[0, 0] = math.nan
    with pytest.raises(TrainingError, match="advantages holds NaN or inf"):
        choose(name, b)
    b = ragged_batch(4)
    with pytest.raises((TrainingError, TypeError), match="noise"):
        choose(name, b, noise=torch.rand(12, 2))
