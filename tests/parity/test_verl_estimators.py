"""Advantage estimators against verl's: the same numbers, and the places where they differ on purpose, with how much."""

import pytest
import torch

from burnish.config.names import ADV_ESTIMATORS
from burnish.conformance.batches import literal_batch, ragged_batch
from tests.parity.estimates import NAMES, ours, theirs

# verl adds 1e-8 to the counts it divides by. GDPO's parts are float32 there, whatever the batch is.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-4}
SIZES = {
    "groups of four": (4, 4, 4),
    "groups of different size": (2, 5, 3, 4),
    "pairs": (2, 2, 2, 2, 2),
}


def assert_same(got, expected, mask, tolerance):
    for name, mine, other in zip(("advantages", "returns"), got, expected, strict=True):
        torch.testing.assert_close(
            mine[mask].double(), other[mask].double(), atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_every_estimator_of_verl_is_compared(verl):
    assert set(NAMES) == set(verl.ADV_ESTIMATOR_REGISTRY) == set(ADV_ESTIMATORS)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_advantages_and_returns_are_verls_to_rounding(verl, name, sizes, dtype):
    """Groups that vary, interleaved, of rows with gaps, some with rewards on several tokens."""
    for seed in range(5):
        batch = ragged_batch(seed, sizes, process_rewards=True).to(dtype)
        if name == "optimal_token_baseline":
            batch = without_gaps(batch)


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized", "grpo_passk", "gdpo"])
def test_without_the_deviation_too(verl, name):
    batch = ragged_batch(7, (4, 3, 5))
    settings = {"norm_adv_by_std_in_grpo": False}
    assert_same(ours(name, batch, **settings), theirs(verl, name, batch, **settings), batch.mask, 1e-6)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"])
def test_single_rows_are_verls_where_one_asks_for_them(verl, name):
    """`rollout.n=1` with `algorithm.allow_single_sample_groups`: the row's baseline is 0 and its deviation 1."""
    batch = ragged_batch(3, (1,) * 6)
    got = ours(name, batch, allow_single_sample_groups=True, num_repeat=1)
    assert_same(got, theirs(verl, name, batch), batch.mask, 1e-6)


# ---- where they differ on purpose --------------------------------------------------------------------------------


def test_equal_scores_are_exactly_zero_and_float_noise_over_an_epsilon_there(verl):
    """The mean of equal float32 numbers is off by a rounding, which verl divides by 1e-6."""
    batch = literal_batch([[1]] * 8, rewards=[[0.35]] * 8).to(torch.float32)
    (advantages, _), (noise, _) = ours("grpo", batch), theirs(verl, "grpo", batch)
    assert (advantages == 0).all()
    assert noise.abs().max().item() == pytest.approx(0.029, abs=5e-4)


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized", "rloo", "opo", "gpg"])
def test_a_row_left_alone_gets_zero_and_its_whole_score_there(verl, name):
    batch = literal_batch([[1]] * 3, rewards=[[1.0], [0.0], [0.75]], uids=["a", "a", "alone"])
    (advantages, _), (other, _) = ours(name, batch), theirs(verl, name, batch)
    torch.testing.assert_close(advantages[:2], other[:2], atol=1e-6, rtol=0)
    assert advantages[2].item() == 0
    alpha = 3 / 2 if name == "gpg" else 1.0
    assert other[2].item() == pytest.approx(alpha * 0.75, rel=1e-5)


def test_a_row_left_alone_is_zero_in_verls_vectorised_rloo_too(verl):
    batch = literal_batch([[1]] * 3, rewards=[[1.0], [0.0], [0.75]], uids=["a", "a", "alone"])
    assert_same(ours("rloo_vectorized", batch), theirs(verl, "rloo_vectorized", batch), batch.mask, 1e-7)


def test_a_row_alone_is_an_error_in_verls_pass_at_k(verl):
    batch = literal_batch([[1]] * 3, rewards=[[1.0], [0.0], [0.75]], uids=["a", "a", "alone"])
    with pytest.raises(ValueError, match="at least 2 samples"):
        theirs(verl, "grpo_passk", batch)
    assert ours("grpo_passk", batch)[0][2].item() == 0


@pytest.mark.parametrize("name", ["reinforce_plus_plus_baseline", "gdpo"])
def test_constant_groups_are_not_whitened_and_shrink_the_deviation_there(verl, name):
    """Half of the groups constant: verl's advantages of the others come out larger by sqrt(2), near enough."""
    rewards = [1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    batch = literal_batch(
        [[1]] * 8,
        rewards=[[r] for r in rewards],
        reward_components=[[r] for r in rewards],
        uids=["a"] * 4 + ["b"] * 4,
    )
    (advantages, _), (other, _) = ours(name, batch), theirs(verl, name, batch)
    assert (advantages[4:] == 0).all()
    ratio = other[:4] / advantages[:4]
    # Unbiased variances: 4 values of +-1/2 over 3, and with four zeros beside them over 7.
    torch.testing.assert_close(ratio, torch.full_like(ratio, (7 / 3) ** 0.5), atol=1e-4, rtol=0)
    torch.testing.assert_close(advantages[:4] / advantages[0], other[:4] / other[0], atol=1e-5, rtol=0)


def test_one_token_cannot_be_whitened_there(verl):
    batch = literal_batch([[1]], rewards=[[1.0]])
    with pytest.raises(ValueError, match="division by zero"):
        theirs(verl, "reinforce_plus_plus", batch)
    assert ours("reinforce_plus_plus", batch)[0].item() == 0


def test_the_tail_of_a_row_with_a_gap_begins_at_its_place_and_at_its_number_there(verl):
    """The long row's last token is alone at its place: no baseline. verl looks for it at the number of its token."""
    batch = literal_batch(
        [[1, 0, 1, 1], [1, 1, 0, 0]],
        rewards=[[0, 0, 0, 1.0], [0, 0.5, 0, 0]],
        old_log_probs=[[-1.0] * 4] * 2,
        sum_pi_squared=[[0.5] * 4] * 2,
        weights=[[1.0] * 4] * 2,
    )
    (advantages, _), (other, _) = ours("optimal_token_baseline", batch), theirs(verl, "optimal_token_baseline", batch)
    # Two tokens in the short row: from the third place on the long one is alone, in both.
    torch.testing.assert_close(advantages, other, atol=1e-7, rtol=0)
    gap = literal_batch(
        [[1, 1, 1, 0], [0, 0, 1, 1]],
        rewards=[[0, 0, 1.0, 0], [0, 0, 0, 0.5]],
        old_log_probs=[[-1.0] * 4] * 2,
        sum_pi_squared=[[0.5] * 4] * 2,
        weights=[[1.0] * 4] * 2,
    )
    (advantages, _), (other, _) = ours("optimal_token_baseline", gap), theirs(verl, "optimal_token_baseline", gap)
    # The second row ends last: its last token has no baseline here. verl takes the first row for the longer one.
    assert advantages[1, 3].item() == 0.5
    assert other[1, 3].item() == pytest.approx(0.0, abs=1e-6)


def test_returns_are_zero_outside_the_mask_and_what_came_out_there(verl):
    batch = ragged_batch(1, (3, 3))
    (_, returns), (_, other) = ours("gae", batch), theirs(verl, "gae", batch)
    assert (returns[~batch.mask] == 0).all()
    assert (other[~batch.mask] != 0).any()


def without_gaps(batch):
    """The tail of a row with gaps is another place in the two (see above)."""
    lengths = batch.mask.sum(dim=1, keepdim=True)
    mask = torch.arange(batch.mask.shape[1]) < lengths
    rewards = torch.zeros_like(batch.rewards).masked_scatter(mask, batch.rewards[batch.mask])
    return type(batch)(
        **{f: getattr(batch, f) for f in batch.__dataclass_fields__} | {"mask": mask, "rewards": rewards}
    )
