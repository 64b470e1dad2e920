"""Each policy loss against hand-computed answers and the naive loops, its gradient, and what each of its keys does."""

import math

import pytest
import torch

from burnish.config import FSDPActorConfig
from burnish.config.actor_rollout_ref import PolicyLossConfig
from burnish.conformance.batches import ragged_batch
from burnish.conformance.losses.term import evaluate, reference_inputs
from burnish.conformance.losses.terms import policy_loss
from burnish.conformance.references import LOSS_REFERENCES
from burnish.core_algos.aggregation import LOSS_AGG_MODES
from burnish.core_algos.policy_losses import compute_policy_loss_vanilla, get_policy_loss_fn


def settings(**keys) -> FSDPActorConfig:
    own = {key: keys.pop(key) for key in list(keys) if hasattr(PolicyLossConfig(), key)}
    return FSDPActorConfig(policy_loss=PolicyLossConfig(**own), **keys)


def row(name: str, old: list[float], new: list[float], advantages: list[float], weights=None, **keys):
    """Loss, gradient and metrics of one response."""
    log_prob = torch.tensor([new], dtype=torch.float64, requires_grad=True)
    old_log_prob, advantages, mask = (
        torch.tensor([x], dtype=torch.float64) for x in (old, advantages, [1.0] * len(new))
    )
    weights = None if weights is None else torch.tensor([weights], dtype=torch.float64)
    loss, metrics = get_policy_loss_fn(name)(
        old_log_prob, log_prob, advantages, mask, "token-mean", settings(**keys), weights
    )
    loss.backward()
    return loss.item(), log_prob.grad[0].tolist(), {key.split("/")[1]: value.item() for key, value in metrics.items()}


def token(name: str, old: float, new: float, advantage: float, **keys) -> tuple[float, float, dict[str, float]]:
    loss, gradient, metrics = row(name, [old], [new], [advantage], **keys)
    return loss, gradient[0], metrics


def near(value, **kwargs):
    return pytest.approx(value, rel=1e-6, abs=1e-7, **kwargs)


class TestVanilla:
    def test_clip_worked_example(self):
        assert math.exp(0.5) == pytest.approx(1.6487, abs=1e-4)
        loss, gradient, metrics = token("vanilla", -2.0, -1.5, 0.5, clip_ratio=0.2)
        assert (loss, gradient) == near((-0.6, 0.0))
        assert metrics == {"pg_clipfrac": 1, "ppo_kl": -0.5, "pg_clipfrac_lower": 0}

    def test_on_policy_the_ratio_is_one_and_the_gradient_is_that_of_reinforce(self):
        loss, gradient, metrics = token("vanilla", -1.3, -1.3, 0.7)
        assert (loss, gradient) == near((-0.7, -0.7))
        assert metrics == {"pg_clipfrac": 0, "ppo_kl": 0, "pg_clipfrac_lower": 0}

    def test_a_negative_advantage_is_bounded_by_the_second_clip(self):
        loss, gradient, metrics = token("vanilla", -4.0, -1.0, -0.5, clip_ratio_c=3.0)
        assert (loss, gradient) == near((1.5, 0.0))
        assert metrics["pg_clipfrac_lower"] == 1
        assert token("vanilla", -4.0, -1.0, -0.5, clip_ratio_c=30.0)[0] == near(0.5 * math.exp(3.0))

    def test_low_and_high_are_offsets_and_follow_clip_ratio_where_they_are_null(self):
        assert token("vanilla", -2.0, -1.5, 1.0, clip_ratio=0.1)[0] == near(-1.1)
        assert token("vanilla", -2.0, -1.5, 1.0, clip_ratio=0.1, clip_ratio_high=0.28)[0] == near(-1.28)
        assert token("vanilla", -1.5, -2.0, -1.0, clip_ratio=0.1)[0] == near(0.9)
        assert token("vanilla", -1.5, -2.0, -1.0, clip_ratio=0.1, clip_ratio_low=0.3)[0] == near(0.7)


class TestGspo:
    def test_one_ratio_for_the_whole_response(self):
        # s = (0.1 + 0.3) / 2, inside a clip of 0.3: each token's gradient is its share of A exp(s).
        loss, gradient, metrics = row("gspo", [-2.0, -1.0], [-1.9, -0.7], [0.5, 0.5], clip_ratio=0.3)
        assert loss == near(-0.5 * math.exp(0.2))
        assert gradient == near([-0.25 * math.exp(0.2)] * 2)
        assert metrics == near({"pg_clipfrac": 0.0, "ppo_kl": -0.2})

    def test_the_whole_response_is_clipped_or_none_of_it(self):
        loss, gradient, metrics = row("gspo", [-2.0, -1.0], [-1.9, -0.7], [0.5, 0.5], clip_ratio_high=4e-4)
        assert loss == near(-0.5 * 1.0004)
        assert gradient == [0.0, 0.0]
        assert metrics["pg_clipfrac"] == 1.0

    def test_there_is_no_second_clip_but_log_ratios_end_at_ten(self):
        assert token("gspo", -5.0, -1.0, -0.5, clip_ratio_c=3.0)[:2] == near((0.5 * math.exp(4), 0.5 * math.exp(4)))
        # Tokens far apart are averaged as they are: (-60 + 50) / 2.
        assert row("gspo", [-1.0, -51.0], [-61.0, -1.0], [0.5, 0.5], clip_ratio_low=1.0)[0] == near(-0.5 * math.exp(-5))
        assert token("gspo", -15.0, -1.0, -0.5)[:2] == near((0.5 * math.exp(10), 0.0))

    def test_with_one_advantage_per_response_the_gradient_is_that_of_the_sequence_loss(self):
        b = ragged_batch(3)
        advantages = b.advantages[:, :1].expand_as(b.mask).contiguous()
        log_prob, same = (b.log_probs.clone().requires_grad_() for _ in range(2))
        loss, _ = get_policy_loss_fn("gspo")(
            b.old_log_probs,
            log_prob,
            advantages,
            b.mask,
            "token-mean",
            settings(clip_ratio_low=1.0, clip_ratio_high=1e9),
        )
        loss.backward()
        lengths = b.mask.sum(-1)
        s = torch.where(b.mask, same - b.old_log_probs, 0.0).sum(-1) / lengths
        (-advantages[:, 0] * s.exp()).mean().backward()
        torch.testing.assert_close(log_prob.grad, same.grad, rtol=1e-6, atol=1e-12)


class TestSapo:
    def test_on_policy_the_gradient_is_that_of_ppo_whatever_tau(self):
        for advantage, tau in ((0.7, "tau_pos"), (-0.7, "tau_neg")):
            loss, gradient, metrics = token("sapo", -1.3, -1.3, advantage, **{tau: 1.7})
            assert loss == near(-advantage * 2 / 1.7)
            assert gradient == near(-advantage)
            assert metrics == {"ppo_kl": 0.0, "sapo_gate": 1.0}

    def test_off_policy_the_gate_fades(self):
        ratio, sigmoid = math.exp(0.5), 1 / (1 + math.exp(-(math.exp(0.5) - 1)))
        loss, gradient, metrics = token("sapo", -2.0, -1.5, 0.5, tau_pos=1.0)
        assert loss == near(-0.5 * 4 * sigmoid)
        assert gradient == near(-0.5 * 4 * sigmoid * (1 - sigmoid) * ratio)
        assert metrics["sapo_gate"] == near(4 * sigmoid * (1 - sigmoid))
        assert metrics["sapo_gate"] < 1

    def test_each_sign_has_its_own_tau_and_a_larger_one_fades_faster(self):
        for advantage, own, other in ((0.5, "tau_pos", "tau_neg"), (-0.5, "tau_neg", "tau_pos")):
            gradients = [abs(token("sapo", -2.0, -1.0, advantage, **{own: tau})[1]) for tau in (0.5, 1.0, 2.0)]
            assert gradients[0] > gradients[1] > gradients[2]
            tokens = [token("sapo", -2.0, -1.0, advantage, **{other: tau}) for tau in (0.5, 2.0)]
            assert tokens[0] == tokens[1]
        # Defaults 1 and 1.05; an advantage of zero learns nothing.
        assert token("sapo", -1.0, -1.0, -1.0)[0] == near(2 / 1.05)
        assert token("sapo", -1.0, -0.5, 0.0)[:2] == (0.0, 0.0)


class TestGeoMean:
    def test_the_log_ratios_of_the_tokens_are_clipped_on_the_side_of_the_advantage(self):
        # A > 0: min(D, 0.4); A < 0: max(D, -0.4). Only the tokens inside have a gradient.
        up = row("geo_mean", [-2.0, -2.0], [-1.0, -2.6], [0.5, 0.5], clip_ratio=0.4)
        assert up[0] == near(-0.5 * math.exp((0.4 - 0.6) / 2))
        assert up[1] == near([0.0, -0.25 * math.exp(-0.1)])
        assert up[2] == near({"pg_clipfrac": 0.5, "ppo_kl": -0.2})
        down = row("geo_mean", [-2.0, -2.0], [-1.0, -2.6], [-0.5, -0.5], clip_ratio=0.4)
        assert down[0] == near(0.5 * math.exp((1.0 - 0.4) / 2))
        assert down[1] == near([0.25 * math.exp(0.3), 0.0])

    def test_the_two_offsets_are_bounds_of_log_ratios(self):
        assert row("geo_mean", [-2.0], [-1.0], [1.0], clip_ratio_high=0.3)[0] == near(-math.exp(0.3))
        assert row("geo_mean", [-2.0], [-3.0], [-1.0], clip_ratio_low=0.7)[0] == near(math.exp(-0.7))

    def test_a_token_without_advantage_counts_as_unmoved(self):
        loss, gradient, _ = row("geo_mean", [-2.0, -2.0], [-1.8, -1.0], [1.0, 0.0], clip_ratio=0.4)
        assert loss == near(-0.5 * math.exp(0.2 / 2))
        assert gradient == near([-0.25 * math.exp(0.1), 0.0])

    def test_weights_enter_as_their_geometric_mean(self):
        loss = row("geo_mean", [-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0], weights=[0.5, 8.0])[0]
        assert loss == near(-2.0)
        assert row("geo_mean", [-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0], weights=[0.0, 8.0])[:2] == (0.0, [0.0, 0.0])


class TestReinforce:
    def test_gpg_knows_no_ratio(self):
        assert token("gpg", -5.0, -1.5, 0.5)[:2] == near((0.75, -0.5))
        assert token("gpg", -2.0, -1.5, 0.5)[2] == near({"ppo_kl": -0.5})

    def test_cispo_clips_the_weight_and_keeps_the_gradient(self):
        # rho = 1.6487 is clipped to 1.28 as a weight of the gradient of log_prob.
        loss, gradient, metrics = token("cispo", -2.0, -1.5, 0.5, clip_ratio_high=0.28)
        assert (loss, gradient) == near((1.28 * 0.5 * 1.5, -1.28 * 0.5))
        assert metrics == near({"pg_clipfrac": 1.0, "ppo_kl": -0.5})
        loss, gradient, _ = token("cispo", -1.5, -2.0, -1.0, clip_ratio_low=0.1)
        assert (loss, gradient) == near((-0.9 * 2.0, 0.9))
        assert token("cispo", -1.5, -1.4, 1.0)[1:] == (near(-math.exp(0.1)), near({"pg_clipfrac": 0.0, "ppo_kl": -0.1}))

    def test_dro_pulls_back_quadratically(self):
        loss, gradient, metrics = token("dro", -2.0, -1.5, 0.5, dro_beta=0.4)
        assert loss == near(0.75 + 0.5 * 0.4 * 0.25)
        assert gradient == near(-0.5 + 0.4 * 0.5)
        assert metrics == near({"ppo_kl": -0.5, "dro_penalty": 0.05})
        assert token("dro", -2.0, -1.5, 0.5, dro_beta=0.8)[1] > gradient


class TestDppo:
    def test_tv_bounds_how_far_the_probability_moves(self):
        # p rises by exp(-1) - exp(-2) = 0.2325.
        inside = token("dppo_tv", -2.0, -1.0, 0.5, clip_ratio_high=0.24, clip_ratio_c=20.0)
        assert inside[:2] == near((0.5 * math.e, -0.5 * math.e))
        assert inside[2] == near({"pg_clipfrac": 0.0, "dppo_truncated_frac": 0.0, "ppo_kl": -1.0})
        outside = token("dppo_tv", -2.0, -1.0, 0.5, clip_ratio_high=0.23, clip_ratio_c=20.0)
        assert outside[:2] == (0.0, 0.0)
        assert outside[2]["pg_clipfrac"] == 1.0
        assert token("dppo_tv", -1.0, -2.0, -0.5, clip_ratio_low=0.24)[1] == near(0.5 * math.exp(-1))
        assert token("dppo_tv", -1.0, -2.0, -0.5, clip_ratio_low=0.23)[1] == 0.0

    @pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
    def test_what_leads_back_to_the_old_policy_is_always_valid(self, name):
        assert token(name, -1.0, -4.0, 0.5, clip_ratio=0.01)[1] == near(-0.5 * math.exp(-3))
        assert token(name, -4.0, -1.0, -0.5, clip_ratio=0.01, clip_ratio_c=100.0)[1] == near(0.5 * math.exp(3))

    @pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
    def test_the_weight_is_truncated(self, name):
        # A rare token may grow by much more than PPO allows: p goes from 5e-5 to 6.7e-3.
        loss, gradient, metrics = token(name, -10.0, -5.0, 0.5, clip_ratio_c=20.0)
        assert (loss, gradient) == near((20 * 0.5 * 5, -20 * 0.5))
        assert (metrics["pg_clipfrac"], metrics["dppo_truncated_frac"]) == (0.0, 1.0)
        assert token(name, -10.0, -5.0, 0.5, clip_ratio_c=30.0)[1] == near(-30 * 0.5)

    def test_kl_bounds_the_binary_divergence(self):
        # p from 1/4 to 1/2: K = 1/4 ln(1/2) + 3/4 ln(3/2) = 0.1308; from 1/2 to 1/4: K = 1/2 ln 2 + 1/2 ln(2/3) = 0.1438.
        quarter, half = math.log(0.25), math.log(0.5)
        assert token("dppo_kl", quarter, half, 0.5, clip_ratio_high=0.131)[1] == near(-0.5 * 2)
        assert token("dppo_kl", quarter, half, 0.5, clip_ratio_high=0.130)[1] == 0.0
        assert token("dppo_kl", half, quarter, -0.5, clip_ratio_low=0.144)[1] == near(0.5 * 0.5)
        assert token("dppo_kl", half, quarter, -0.5, clip_ratio_low=0.143)[1] == 0.0

    def test_kl_of_a_probability_of_one_is_finite(self):
        assert token("dppo_kl", 0.0, 0.0, 0.5)[1] == near(-0.5)
        assert token("dppo_kl", -1e-3, 0.0, 0.5, clip_ratio_high=0.011)[1] == near(-0.5 * math.exp(1e-3))
        # K = 1/2 ln(1/2) + 1/2 ln(1/2 / 1e-8) = 8.5.
        assert token("dppo_kl", math.log(0.5), 0.0, 0.5, clip_ratio_high=8.0, clip_ratio_c=3.0)[2]["pg_clipfrac"] == 1.0
        assert token("dppo_kl", math.log(0.5), 0.0, 0.5, clip_ratio_high=9.0, clip_ratio_c=3.0)[2]["pg_clipfrac"] == 0.0

    def test_kl_knows_the_difference_of_two_probabilities_near_one(self):
        # Rests of 1e-5 and 1e-7 lie far apart, in fp32 too, where 1 - exp(-1e-7) would have one digit.
        old, new = torch.tensor([[-1e-5]]), torch.tensor([[-1e-7]], requires_grad=True)
        kl = 1e-5 * math.log(1e2) - (1e-5 - 1e-7)
        for high, valid in ((kl * 1.01, True), (kl * 0.99, False)):
            _, metrics = get_policy_loss_fn("dppo_kl")(
                old, new, torch.ones(1, 1), torch.ones(1, 1), "token-mean", settings(clip_ratio_high=high)
            )
            assert metrics["actor/pg_clipfrac"].item() == float(not valid)


class TestCovariance:
    def test_clip_cov_gives_a_token_of_high_covariance_no_weight(self):
        # A - mean A = +-1, log_prob - mean = +-1: both tokens have covariance 1; one of them is left out.
        args = ([-1.0, -3.0], [-1.0, -3.0], [1.0, -1.0])
        loss, gradient, metrics = row("clip_cov", *args, clip_cov_lb=0.9, clip_cov_ub=1.1)
        assert sorted(gradient) in ([-0.5, 0.0], [0.0, 0.5])
        assert loss == sum(gradient)
        assert metrics == {"pg_clipfrac": 0.0, "clip_cov_frac": 0.5, "ppo_kl": 0.0}
        for bounds in ({"clip_cov_lb": 1.0}, {"clip_cov_lb": 0.0, "clip_cov_ub": 1.0}):
            assert row("clip_cov", *args, **bounds)[1] == [-0.5, 0.5]

    def test_clip_cov_ratio_is_the_share_of_the_tokens_left_out(self):
        old = [-1.0, -3.0] * 5
        advantages = [1.0, -1.0] * 5
        for ratio, number in ((0.0, 1), (0.1, 1), (0.35, 3), (1.0, 10)):
            gradient = row("clip_cov", old, old, advantages, clip_cov_ratio=ratio, clip_cov_lb=0.5)[1]
            assert gradient.count(0.0) == number

    def test_clip_cov_clips_as_ppo_without_a_second_clip(self):
        # No token is eligible: a single one has no covariance.
        assert token("clip_cov", -2.0, -1.5, 0.5)[:2] == near((-0.6, 0.0))
        assert token("clip_cov", -4.0, -1.0, -0.5)[0] == near(0.5 * math.exp(3))

    def test_clip_cov_leaves_out_none_that_ppo_clips(self):
        # The first token has the only high covariance, but is clipped.
        loss, _, metrics = row("clip_cov", [-2.0, -2.0, -2.0], [0.0, -2.0, -2.0], [2.0, 0.5, 0.5], clip_cov_lb=0.5)
        assert loss == near(-(2 * 1.2 + 0.5 + 0.5) / 3)
        assert metrics == near({"pg_clipfrac": 1 / 3, "clip_cov_frac": 0.0, "ppo_kl": -2 / 3})

    def test_kl_cov_adds_the_kl_to_the_token_of_the_highest_covariance(self):
        # Covariances: 1.0 * 1.0, 1.1 * -0.5, -2.1 * -0.5. The last is the highest, but has not moved: there is no KL yet.
        args = ([-1.5, -2.5, -2.5], [-1.0, -2.5, -2.5], [1.0, 1.1, -2.1])
        loss, gradient, metrics = row("kl_cov", *args, ppo_kl_coef=0.3)
        assert loss == near((-math.exp(0.5) - 1.1 + 2.1) / 3)
        assert gradient == near([-math.exp(0.5) / 3, -1.1 / 3, 2.1 / 3])
        assert metrics == near({"kl_cov_frac": 1 / 3, "ppo_kl": -0.5 / 3})
        # Now the first is the highest.
        args = ([-1.5, -2.5, -2.5], [-1.0, -2.5, -2.5], [2.1, -1.1, -1.0])
        for coef in (0.3, 0.6):
            loss, gradient, _ = row("kl_cov", *args, ppo_kl_coef=coef)
            assert loss == near((-2.1 * math.exp(0.5) + 1.1 + 1.0 + coef * 0.5) / 3)
            assert gradient == near([(-2.1 * math.exp(0.5) + coef) / 3, 1.1 / 3, 1.0 / 3])

    def test_kl_cov_ratio_is_the_share_of_the_tokens_with_the_kl(self):
        old = [-1.0 - 0.1 * t for t in range(10)]
        for ratio, number in ((0.0, 1), (0.1, 1), (0.35, 3), (1.0, 10)):
            metrics = row("kl_cov", old, old, old, kl_cov_ratio=ratio)[2]
            assert metrics["kl_cov_frac"] == near(number / 10)


# Other values than the defaults, so that a wrong one shows; clip_cov and kl_cov choose several tokens of a small batch.
KEYS = {
    "clip_ratio_low": 0.15, "clip_ratio_high": 0.28, "clip_ratio_c": 1.3, "tau_pos": 0.9, "tau_neg": 1.4, "dro_beta": 0.3,
    "clip_cov_ratio": 0.1, "clip_cov_lb": 0.05, "clip_cov_ub": 3.0, "kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5,
}  # fmt: skip
CONFIG = settings(**KEYS)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
# The loss of the bypass mode has a file of its own.
@pytest.mark.parametrize("name", sorted(set(LOSS_REFERENCES) - {"bypass_mode"}))
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_naive_loop(seed, name, mode):
    b = ragged_batch(seed)
    b.advantages[:, ::4] = 0.0
    term = policy_loss(name)
    known = term.with_settings(**KEYS, loss_agg_mode=mode, weighted=True)
    got = evaluate(term, b, **known)
    assert got.loss.item() == pytest.approx(LOSS_REFERENCES[name](reference_inputs(b, weighted=True), known), rel=1e-10)
    moved = (b.old_log_probs - b.log_probs)[b.mask].mean().item()
    assert got.metrics["actor/ppo_kl"].item() == pytest.approx(moved)


@pytest.mark.parametrize("name", ["vanilla", "sapo", "geo_mean", "gpg", "dro", "clip_cov", "kl_cov"])
def test_the_gradient_is_that_of_finite_differences(name):
    b = ragged_batch(11)
    noise = torch.rand(b.mask.shape, generator=torch.Generator().manual_seed(0))
    chosen = {"clip_cov": {"keep": noise > 0.3}, "kl_cov": {"penalized": noise > 0.3}}.get(name, {})

    def loss(log_prob: torch.Tensor) -> torch.Tensor:
        args = (b.old_log_probs, log_prob, b.advantages, b.mask, "token-mean", CONFIG)
        return get_policy_loss_fn(name)(*args, **chosen)[0]

    assert torch.autograd.gradcheck(loss, b.log_probs.clone().requires_grad_())


@pytest.mark.parametrize("name", ["cispo", "dppo_tv", "dppo_kl"])
def test_the_gradient_of_a_weighted_log_prob_is_its_weight(name):
    """These are w log_prob with a w that is taken as constant: a log_prob larger by 1 has a loss larger by w."""
    b = ragged_batch(12)
    known = policy_loss(name).with_settings(**KEYS, loss_agg_mode="token-sum")
    inputs = reference_inputs(b, weighted=False)
    expected = torch.zeros_like(b.log_probs)
    for row, token in b.mask.nonzero().tolist():
        moved = [list(values) for values in inputs["log_prob"]]
        moved[row][token] += 1.0
        reference = LOSS_REFERENCES[name]
        expected[row, token] = reference({**inputs, "log_prob": moved}, known) - reference(inputs, known)
    log_prob = b.log_probs.clone().requires_grad_()
    get_policy_loss_fn(name)(b.old_log_probs, log_prob, b.advantages, b.mask, "token-sum", CONFIG)[0].backward()
    torch.testing.assert_close(log_prob.grad, expected, rtol=1e-6, atol=1e-9)


def test_the_keys_of_the_section_are_enough_for_a_loss():
    class Clip:
        clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c = 0.2, None, None, 3.0
        global_batch_info: dict = {}  # noqa: RUF012

    args = (torch.full((1, 1), -2.0), torch.full((1, 1), -1.5), torch.full((1, 1), 0.5), torch.ones(1, 1))
    assert compute_policy_loss_vanilla(*args, config=Clip())[0].item() == pytest.approx(-0.6)
