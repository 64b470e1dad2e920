"""The tables of who reads a key agree with the losses and estimators themselves."""

import inspect

import pytest
import torch

from burnish.config import load_config, names
from burnish.config.idle import READING_ENGINES, READING_ESTIMATORS, READING_LOSSES, SWITCHES
from burnish.config.schema import leaves
from burnish.core_algos.estimators import get_adv_estimator_fn
from burnish.core_algos.policy_losses import get_policy_loss_fn

ACTOR = "actor_rollout_ref.actor"
BASE = {f"{ACTOR}.policy_loss.clip_cov_ratio": 0.3, f"{ACTOR}.policy_loss.clip_cov_lb": 0.1}
# Another value of each key, which changes what a loss that reads the key makes of the tensors below.
OTHER = {
    f"{ACTOR}.clip_ratio": 0.01,
    f"{ACTOR}.clip_ratio_low": 0.01,
    f"{ACTOR}.clip_ratio_high": 0.01,
    f"{ACTOR}.clip_ratio_c": 1.1,
    f"{ACTOR}.tau_pos": 3.0,
    f"{ACTOR}.tau_neg": 3.0,
    f"{ACTOR}.policy_loss.clip_cov_ratio": 0.01,
    f"{ACTOR}.policy_loss.clip_cov_lb": 4.9,
    f"{ACTOR}.policy_loss.clip_cov_ub": 0.2,
    f"{ACTOR}.policy_loss.kl_cov_ratio": 0.9,
    f"{ACTOR}.policy_loss.ppo_kl_coef": 3.0,
    f"{ACTOR}.policy_loss.dro_beta": 3.0,
}


def test_they_name_keys_losses_and_estimators_that_exist():
    assert {*READING_LOSSES, *READING_ESTIMATORS, *READING_ENGINES, *SWITCHES, *SWITCHES.values()} <= set(leaves())
    assert {loss for readers in READING_LOSSES.values() for loss in readers} <= set(names.POLICY_LOSSES)
    assert {name for readers in READING_ENGINES.values() for name in readers} <= set(names.ROLLOUTS)
    assert {name for readers in READING_ESTIMATORS.values() for name in readers} <= set(names.ADV_ESTIMATORS)


def loss_of(keys: dict) -> list[float]:
    """The loss and its metrics on tensors with ratios and covariances of all kinds."""
    actor = load_config(keys).actor_rollout_ref.actor
    generator = torch.Generator().manual_seed(0)
    old_log_prob = -3 * torch.rand(8, 32, generator=generator)
    log_prob = old_log_prob + torch.randn(8, 32, generator=generator)
    advantages = torch.randn(8, 32, generator=generator)
    mask = torch.ones(8, 32, dtype=torch.bool)
    loss = get_policy_loss_fn(actor.policy_loss.loss_mode)
    value, metrics = loss(old_log_prob, log_prob, advantages, mask, "token-mean", actor)
    return [float(value), *map(float, metrics.values())]


@pytest.mark.parametrize("loss", [name for name in names.POLICY_LOSSES if name != "bypass_mode"])
def test_a_key_changes_the_losses_that_are_said_to_read_it_and_no_others(loss):
    keys = {f"{ACTOR}.policy_loss.loss_mode": loss, **BASE}
    usual = loss_of(keys)
    assert {key for key in OTHER if loss_of({**keys, key: OTHER[key]}) != usual} == {
        key for key, readers in READING_LOSSES.items() if loss in readers
    }


@pytest.mark.parametrize("key", ["algorithm.gamma", "algorithm.lam", "algorithm.norm_adv_by_std_in_grpo"])
def test_the_estimators_that_are_said_to_read_a_key_are_those_that_take_it(key):
    parameter = key.rpartition(".")[2]
    takers = {
        name for name in names.ADV_ESTIMATORS if parameter in inspect.signature(get_adv_estimator_fn(name)).parameters
    }
    assert takers == set(READING_ESTIMATORS[key])
