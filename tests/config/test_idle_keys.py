"""The tables of who reads a key agree with the losses and estimators themselves."""

import inspect

import pytest
import torch

from burnish.config import load_config, names
from burnish.config.idle import READING_ENGINES, READING_ESTIMATORS, READING_LOSSES, SWITCHES
from burnish.config.load import load_with_notices
from burnish.config.schema import leaves
from burnish.core_algos.estimators import get_adv_estimator_fn
from burnish.core_algos.policy_losses import get_policy_loss_fn

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
REWARD_MODEL = ["reward.reward_model.enable=true", "reward.reward_model.model_path=org/rm"]
GRPO = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2"]
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


@pytest.mark.parametrize(
    ("idle", "beside", "reason"),
    [
        ("algorithm.kl_ctrl.horizon=5", ["algorithm.use_kl_in_reward=true"], "kl_ctrl.type=fixed"),
        (
            "algorithm.pf_ppo.weight_pow=3",
            ["algorithm.pf_ppo.reweight_method=max_min", "algorithm.use_pf_ppo=true"],
            "max_min",
        ),
        (f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1", [f"{ACTOR}.optim.lr_warmup_steps=3"], "lr_warmup_steps=3"),
        (
            f"{ACTOR}.optim.lr_decay_steps_ratio=0.4",
            [f"{ACTOR}.optim.lr_scheduler_type=wsd", f"{ACTOR}.optim.lr_decay_steps=3"],
            "lr_decay_steps=3",
        ),
        (f"{ACTOR}.optim.total_training_steps=7", [], "the schedule in use is constant"),
        (f"{ACTOR}.optim.optimizer_impl=torchao.optim", [f"{ACTOR}.optim.optimizer=mine:Mine"], "names its module"),
        (f"{ACTOR}.data_loader_seed=4", [], "actor.shuffle=false"),
        ("critic.data_loader_seed=4", ["critic.enable=true"], "critic.shuffle=false"),
        (
            f"{ACTOR}.ppo_max_token_len_per_gpu=9999",
            [f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", "data.train_batch_size=256"],
            "cut by samples",
        ),
        (
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu=9999",
            [f"{ACTOR}.ppo_epochs=2", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4"],
            "cut by samples",
        ),
        (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4", ["data.train_batch_size=256"], "a step is one update"),
        (
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
            ["algorithm.rollout_correction.bypass_mode=true"],
            "bypass_mode=true",
        ),
        (f"{REF}.log_prob_micro_batch_size_per_gpu=4", [], "there is no reference"),
        (f"{REF}.fsdp_config.param_offload=true", [], "there is no reference"),
        (f"{ROLLOUT}.top_p=0.7", [f"{ROLLOUT}.do_sample=false"], "responses are greedy"),
        (f"{ROLLOUT}.val_kwargs.top_p=0.7", [], "responses are greedy"),
        (f"{ROLLOUT}.val_kwargs.do_sample=true", [], "val_kwargs.temperature=0.0"),
        ("data.seed=3", ["data.shuffle=false"], "data.shuffle=false"),
        ("reward.timeout=5", ["reward.reward_manager.name=rate_limited"], "name=rate_limited"),
        ("reward.num_workers=5", ["reward.reward_manager.name=remote", "reward.remote.url=http://a"], "name=remote"),
        ("reward.custom_reward_function.name=mine", [], "there is no reward.custom_reward_function.path"),
        ("reward.reward_kwargs.custom.a=1", [], "not of your own"),
        ("algorithm.custom.a=1", [], "not of your own"),
        (f"{ACTOR}.policy_loss.custom.a=1", [], "not of your own"),
        ("reward.sandbox.timeout=5", REWARD_MODEL, "the reward model's score is the score"),
        (
            "reward.reward_model.model.fsdp_config.reshard_after_forward=false",
            [*REWARD_MODEL, "trainer.n_gpus_per_node=1"],
            "one worker",
        ),
        ("trainer.total_epochs=5", ["trainer.total_training_steps=7"], "total_training_steps=7"),
        ("ray_kwargs.ray_init.num_cpus=8", ["trainer.controller=local"], "controller=local"),
        ("trainer.balance_batch=false", ["trainer.controller=local"], "controller=local"),
        ("reward.launch_reward_fn_async=false", ["reward.num_workers=0"], "num_workers=0"),
        (f"{ROLLOUT}.repetition_penalty=2", ["trainer.replay_rollouts=/runs/a"], "replay_rollouts=/runs/a"),
        (f"{ACTOR}.checkpoint.load_contents=[model]", ["trainer.resume_mode=disable"], "resume_mode=disable"),
        (
            f"{ACTOR}.checkpoint.save_contents=[model]",
            ["trainer.resume_mode=disable"],
            "save_freq=-1",
        ),
    ],
)
def test_a_key_that_is_set_in_vain_is_told_with_the_reason(idle, beside, reason):
    (notice,) = [text for text in load_with_notices([*GRPO, *beside, idle]).notices if idle in text]
    assert notice.startswith("No effect here: ")
    assert reason in notice.partition("The reason: ")[2]


@pytest.mark.parametrize(
    ("key", "beside"),
    [
        ("algorithm.kl_ctrl.horizon=5", ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"]),
        (f"{ACTOR}.optim.total_training_steps=7", [f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"]),
        (f"{ACTOR}.optim.total_training_steps=7", [f"{ACTOR}.optim.lr_scheduler_type=linear"]),
        (f"{ACTOR}.data_loader_seed=4", [f"{ACTOR}.shuffle=true"]),
        # The pass for the old log-probs follows it.
        (
            f"{ACTOR}.ppo_max_token_len_per_gpu=9999",
            [f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", f"{ACTOR}.ppo_epochs=2"],
        ),
        (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4", [f"{ACTOR}.ppo_epochs=2"]),
        (f"{REF}.log_prob_micro_batch_size_per_gpu=4", [f"{ACTOR}.use_kl_loss=true"]),
        (
            f"{ROLLOUT}.val_kwargs.top_p=0.7",
            [f"{ROLLOUT}.val_kwargs.do_sample=true", f"{ROLLOUT}.val_kwargs.temperature=1"],
        ),
        ("data.seed=3", ["data.shuffle=false", "data.validation_shuffle=true"]),
        ("trainer.total_epochs=5", []),
        (f"{ACTOR}.checkpoint.save_contents=[model]", ["trainer.resume_mode=disable", "trainer.save_freq=1"]),
    ],
)
def test_a_key_that_counts_is_not_told(key, beside):
    assert not [text for text in load_with_notices([*GRPO, *beside, key]).notices if key in text]


@pytest.mark.parametrize(
    ("switch", "size", "beside"),
    [
        (f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_micro_batch_size_per_gpu", []),
        (f"{REF}.log_prob_use_dynamic_bsz", f"{REF}.log_prob_micro_batch_size_per_gpu", [f"{ACTOR}.use_kl_loss=true"]),
        ("reward.reward_model.use_dynamic_bsz", "reward.reward_model.micro_batch_size_per_gpu", REWARD_MODEL),
    ],
)
def test_a_switch_that_is_set_off_without_a_size_is_told_to_be_on_all_the_same(switch, size, beside):
    keys = [*GRPO, *beside, f"{switch}=false"]
    (notice,) = [text for text in load_with_notices(keys).notices if f"{switch}=false" in text]
    assert f"Set {size} " in notice
    assert not [text for text in load_with_notices([*keys, f"{size}=2"]).notices if f"{switch}=false" in text]
