"""How losses and rewards go wrong in the field, as small inputs: signs, rubbish outside a mask, lost rows, missing parts."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from burnish.config import FSDPActorConfig, PolicyLossConfig, RolloutCorrectionConfig, load_config, names
from burnish.config.build import value_of
from burnish.conformance.batches import ragged_batch
from burnish.core_algos.advantages import compute_advantage
from burnish.core_algos.policy_losses import POLICY_LOSSES, get_policy_loss_fn
from burnish.protocol import DataProto
from burnish.reward import RewardResult
from burnish.trainer.ppo.mini_batches import plan_mini_batches
from burnish.trainer.ppo.scoring import score_for_training
from burnish.utils.errors import ConfigError, RewardError
from burnish.workers.losses import make_policy_loss


def loss_of_rows(config: FSDPActorConfig, log_prob: torch.Tensor, entropy: torch.Tensor, **tensors: torch.Tensor):
    """The actor's whole loss, with its entropy and KL terms, of rows that are one update."""
    mask = tensors["loss_mask"]
    info = {
        "dp_size": 1,
        "batch_num_tokens": int(mask.sum()),
        "global_batch_size": int(mask.any(-1).sum()),
        "loss_scale_factor": mask.shape[1],
    }
    rows = DataProto.from_dict(tensors={"response_mask": mask, **tensors})
    return make_policy_loss(config)({"log_probs": log_prob, "entropy": entropy}, rows, info)[0]


def test_entropy_and_kl_terms_ignore_what_stands_outside_the_mask():
    b = ragged_batch(2)
    config = FSDPActorConfig(use_kl_loss=True, kl_loss_coef=0.3, entropy_coeff=0.2)

    def loss_and_gradient(reference: torch.Tensor, entropy: torch.Tensor) -> tuple[float, torch.Tensor]:
        log_prob = b.log_probs.clone().requires_grad_()
        tensors = {"old_log_probs": b.old_log_probs, "advantages": b.advantages, "loss_mask": b.mask}
        loss = loss_of_rows(config, log_prob, entropy, ref_log_prob=reference, **tensors)
        loss.backward()
        return loss.item(), log_prob.grad

    loss, gradient = loss_and_gradient(b.ref_log_probs, b.values.exp())
    assert math.isfinite(loss)
    for rubbish in (math.nan, math.inf, -math.inf):
        dirty = [torch.where(b.mask, x, rubbish) for x in (b.ref_log_probs, b.values.exp())]
        other_loss, other_gradient = loss_and_gradient(*dirty)
        assert other_loss == loss
        assert torch.equal(other_gradient, gradient)


@pytest.mark.parametrize("estimator", ["k2", "low_var_kl", "k3", "k1+", "k3+"])
def test_the_kl_in_the_loss_pulls_the_policy_to_the_reference(estimator):
    """Advantages of 0, so that the KL alone moves a table of logits, from samples of its own."""
    logits = torch.tensor([1.5, 0.0, -1.0, 0.5, 0.2], dtype=torch.float64)
    reference = torch.tensor([-0.5, 0.7, 0.0, 0.1, 1.0], dtype=torch.float64).log_softmax(-1)
    config = FSDPActorConfig(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type=estimator)
    generator = torch.Generator().manual_seed(0)
    history = []
    for _ in range(20):
        parameter = logits.clone().requires_grad_()
        log_probs = parameter.log_softmax(-1)
        history.append((log_probs.exp() * (log_probs - reference)).sum().item())
        tokens = torch.multinomial(log_probs.detach().exp(), 512, replacement=True, generator=generator)[:, None]
        log_prob = log_probs[tokens]
        loss = loss_of_rows(
            config,
            log_prob,
            torch.zeros_like(log_prob),
            old_log_probs=log_prob.detach(),
            advantages=torch.zeros_like(log_prob),
            loss_mask=torch.ones(512, 1, dtype=torch.bool),
            ref_log_prob=reference[tokens],
        )
        loss.backward()
        logits = logits - parameter.grad
    assert sum(later < earlier for earlier, later in pairwise(history)) >= 17
    assert history[-1] < 0.2 * history[0]


@pytest.mark.parametrize("sign", [-1.0, 0.0])
@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_negative_and_zero_advantages_under_a_partial_mask_are_finite(name, sign):
    b = ragged_batch(3)
    keys = PolicyLossConfig(loss_mode=name, rollout_correction=RolloutCorrectionConfig())
    log_prob = b.log_probs.clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(
        b.old_log_probs, log_prob, sign * b.advantages.abs(), b.mask, "token-mean", FSDPActorConfig(policy_loss=keys)
    )
    loss.backward()
    assert loss.isfinite()
    assert log_prob.grad.isfinite().all()
    assert not log_prob.grad[~b.mask].any()
    assert all(value.isfinite() for value in metrics.values())
    if sign == 0.0 and name not in ("kl_cov", "dro"):
        # Nothing to learn; those two have a term beside the advantage.
        assert not log_prob.grad.any()


@pytest.mark.parametrize("key", ["algorithm.kl_penalty", "actor_rollout_ref.actor.kl_loss_type"])
def test_every_kl_estimator_of_the_documentation_is_a_value_and_another_is_refused_with_the_list(key):
    for name in names.KL_PENALTIES:
        assert value_of(load_config([f"{key}={name}"]), key) == name
    with pytest.raises(ConfigError) as error:
        load_config([f"{key}=k4+"])
    assert all(name in str(error.value) for name in names.KL_PENALTIES)


def test_rows_keep_their_rewards_through_advantages_and_a_plan_for_two_ranks():
    lengths, scores = torch.tensor([9, 1, 8, 2, 7, 3]), torch.arange(6.0)
    mask = torch.arange(9)[None, :] < lengths[:, None]
    rewards = torch.zeros(6, 9)
    rewards[torch.arange(6), lengths - 1] = scores
    batch = DataProto.from_dict(
        tensors={
            "token_level_rewards": rewards,
            "response_mask": mask,
            "attention_mask": mask,
            "old_log_probs": torch.where(mask, -scores[:, None], 0.0),
        },
        non_tensors={"uid": np.array(["a", "b", "a", "b", "a", "b"], dtype=object), "row": list(range(6))},
    )
    # Means 2 and 3 of rows 0, 2, 4 and 1, 3, 5.
    batch = compute_advantage(batch, "grpo", num_repeat=3, norm_adv_by_std_in_grpo=False)
    seen = []
    for part in plan_mini_batches(batch, num_prompts=2, dp_size=2).chunk(2):
        for row, reward, log_probs, advantages, tokens in zip(
            part.non_tensor_batch["row"],
            part.tensors["token_level_rewards"].sum(-1).tolist(),
            part.tensors["old_log_probs"],
            part.tensors["advantages"],
            part.tensors["loss_mask"],
            strict=True,
        ):
            seen.append(row)
            assert reward == row
            assert tokens.sum() == lengths[row]
            assert set(log_probs[tokens].tolist()) == {-float(row)}
            assert set(advantages[tokens].tolist()) == {row - (3.0 if row % 2 else 2.0)}
    assert sorted(seen) == list(range(6))


def scored_by(correct: list[float], form: list[float]):
    """A reward manager's result for four responses of one token: a score, and two numbers beside it."""
    result = RewardResult(
        token_level_scores=torch.tensor(correct)[:, None],
        valid=torch.ones(4, dtype=torch.bool),
        extras={"correct": np.array(correct, dtype=object), "form": np.array(form, dtype=object)},
    )
    return lambda batch: result


def gdpo_batch() -> DataProto:
    return DataProto.from_dict(
        tensors={"response_mask": torch.ones(4, 1, dtype=torch.bool)}, non_tensors={"uid": ["a"] * 4}
    )


def test_nan_in_one_of_two_rewards_costs_its_row_and_no_other():
    overrides = [
        "algorithm.adv_estimator=gdpo",
        "algorithm.gdpo_reward_keys=[correct,form]",
        "actor_rollout_ref.rollout.n=4",
    ]
    config = load_config(overrides)
    correct, form = [0.5, 0.25, 1.0, 0.0], [1.0, math.nan, 0.0, 1.0]
    batch, metrics = score_for_training(scored_by(correct, form), gdpo_batch(), config)
    assert metrics["reward/gdpo_incomplete_count"] == 1
    batch.tensors["token_level_rewards"] = batch.tensors["token_level_scores"]
    advantages = compute_advantage(batch, "gdpo", num_repeat=4, config=config.algorithm).tensors["advantages"]
    kept = [0, 2, 3]
    alone = compute_advantage(batch.select_idxs(kept), "gdpo", num_repeat=4, config=config.algorithm)
    assert advantages.isfinite().all()
    assert advantages[1].item() == 0.0
    torch.testing.assert_close(advantages[kept], alone.tensors["advantages"])
    assert advantages[kept].abs().min() > 0
    strict = load_config([*overrides, "reward.on_error=raise"])
    with pytest.raises(RewardError, match="responses lack one of these numbers"):
        score_for_training(scored_by(correct, form), gdpo_batch(), strict)
