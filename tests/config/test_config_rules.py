"""Renamed keys are applied, keys without effect are told, keys of what does not exist are refused."""

import logging

import pytest

from burnish.config import load_config, load_with_notices, rules
from burnish.config.schema import leaves, sections
from burnish.config.settings import is_known, open_dict
from burnish.utils.errors import ConfigError

GSM8K_GRPO = """\
algorithm.adv_estimator=grpo
data.train_files=/home/me/data/gsm8k/train.parquet
data.val_files=/home/me/data/gsm8k/test.parquet
data.train_batch_size=1024
data.max_prompt_length=512
data.max_response_length=1024
data.filter_overlong_prompts=True
data.truncation='error'
actor_rollout_ref.model.path=Qwen/Qwen3-8B
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=native
actor_rollout_ref.rollout.gpu_memory_utilization=0.6
actor_rollout_ref.rollout.n=5
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32
actor_rollout_ref.ref.fsdp_config.param_offload=True
algorithm.use_kl_in_reward=False
trainer.critic_warmup=0
trainer.logger=["console","wandb"]
trainer.project_name=verl_grpo_example_gsm8k
trainer.experiment_name=qwen3_8b_function_rm
trainer.n_gpus_per_node=8
trainer.nnodes=1
trainer.save_freq=20
trainer.test_freq=5
trainer.total_epochs=15
"""


def test_a_grpo_script_of_the_field_loads_and_hears_what_has_no_effect(caplog):
    with caplog.at_level(logging.WARNING, logger="burnish.config"):
        config = load_config(GSM8K_GRPO.splitlines())
    actor = config.actor_rollout_ref.actor
    assert (actor.use_kl_loss, actor.optim.lr, actor.ppo_micro_batch_size_per_gpu) == (True, 1e-6, 32)
    assert (actor.fsdp_config.param_offload, config.actor_rollout_ref.ref.fsdp_config.param_offload) == (False, True)
    assert config.trainer.n_gpus_per_node == 8
    assert config.critic.enable is False
    assert config.actor_rollout_ref.rollout.gpu_memory_utilization == 0.6
    for key in ("use_remove_padding=True", "tensor_model_parallel"):
        assert sum(key in record.getMessage() for record in caplog.records) == 1


def test_an_engine_that_does_not_exist_yet_is_refused_with_that_word():
    with pytest.raises(
        ConfigError, match=r"rollout\.name=sglang: sglang does not exist in burnish yet\. There is: native"
    ):
        load_config(["actor_rollout_ref.rollout.name=sglang"])


@pytest.mark.parametrize(
    ("typed", "tree"),
    [
        ("custom_reward_function.path=r.py", ("reward.custom_reward_function.path", "r.py")),
        ("reward_model.reward_manager=my.module:Manager", ("reward.reward_manager.name", "my.module:Manager")),
        ("critic.model.fsdp_config.fsdp_size=1", ("critic.model.fsdp_config.fsdp_size", 1)),
        ("critic.fsdp.fsdp_size=1", ("critic.model.fsdp_config.fsdp_size", 1)),
        ("actor_rollout_ref.actor.grad_clip=0.5", ("actor_rollout_ref.actor.optim.clip_grad", 0.5)),
        ("actor_rollout_ref.actor.optim.grad_clip=0.5", ("actor_rollout_ref.actor.optim.clip_grad", 0.5)),
        ("max_grad_norm=0.5", ("actor_rollout_ref.actor.optim.clip_grad", 0.5)),
        ("actor_rollout_ref.actor.optim.warmup_steps=7", ("actor_rollout_ref.actor.optim.lr_warmup_steps", 7)),
        (
            "actor_rollout_ref.actor.optim.warmup_style=cosine",
            ("actor_rollout_ref.actor.optim.lr_scheduler_type", "cosine"),
        ),
        ("trainer.val_freq=3", ("trainer.test_freq", 3)),
        ("actor_rollout_ref.rollout.max_new_tokens=33", ("actor_rollout_ref.rollout.response_length", 33)),
        ("ray_init.num_cpus=3", ("ray_kwargs.ray_init", {"num_cpus": 3})),
        ("critic.rollout_n=4", ("actor_rollout_ref.rollout.n", 4)),
        (
            "actor_rollout_ref.actor.checkpoint.contents=['model','extra']",
            ("actor_rollout_ref.actor.checkpoint.save_contents", ["model", "extra"]),
        ),
        ("critic.checkpoint.contents=[model]", ("critic.checkpoint.save_contents", ["model"])),
        (
            "actor_rollout_ref.rollout.update_weights_bucket_megabytes=64",
            ("actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes", 64),
        ),
        (
            "actor_rollout_ref.actor.profiler.discrete=True",
            ("actor_rollout_ref.actor.profiler.tool_config.torch.discrete", True),
        ),
        ("reward_model.sandbox_fusion_url=http://x", ("reward.sandbox_fusion.url", "http://x")),
        ("trainer.val_generations_to_log_to_wandb=7", ("trainer.log_val_generations", 7)),
    ],
)
def test_other_names_are_applied(typed, tree):
    loaded = load_with_notices([typed])
    value = loaded.config
    for name in tree[0].split("."):
        value = getattr(value, name)
    assert value == tree[1]
    if typed.partition("=")[0] != tree[0]:
        assert any(typed.partition("=")[0] in notice for notice in loaded.notices)


def test_two_names_of_one_key_agree_or_are_an_error():
    both = ["actor_rollout_ref.actor.grad_clip=0.5", "actor_rollout_ref.actor.optim.clip_grad={}"]
    assert load_config([both[0], both[1].format(0.5)]).actor_rollout_ref.actor.optim.clip_grad == 0.5
    with pytest.raises(ConfigError, match=r"grad_clip=0\.5 and .*clip_grad=1\.0 are two names"):
        load_config([both[0], both[1].format("1.0")])


ACTOR_SP = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
REF_SP = "actor_rollout_ref.ref.ulysses_sequence_parallel_size"


def test_sequence_parallelism_has_a_key_beside_the_layout_and_the_reference_follows_the_actor():
    config = load_config(["trainer.n_gpus_per_node=4", f"{ACTOR_SP}=2", "critic.ulysses_sequence_parallel_size=4"])
    sections = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic.model
    assert [section.fsdp_config.ulysses_sequence_parallel_size for section in sections] == [2, 2, 4]
    config = load_config(["trainer.n_gpus_per_node=4", f"{ACTOR_SP}=2", f"{REF_SP}=1"])
    assert config.actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size == 1
    with pytest.raises(ConfigError, match="are two names of .* and differ"):
        load_config([f"{ACTOR_SP}=2", "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=1"])


def test_micro_batches_counted_over_all_workers_are_divided():
    workers = ["trainer.n_gpus_per_node=4", "trainer.nnodes=2"]
    config = load_config([*workers, "actor_rollout_ref.actor.ppo_micro_batch_size=64"])
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 8
    config = load_config([*workers, "critic.ppo_micro_batch_size=16"])
    assert config.critic.ppo_micro_batch_size_per_gpu == config.critic.forward_micro_batch_size_per_gpu == 2
    config = load_config([*workers, f"{ACTOR_SP}=2", "actor_rollout_ref.actor.ppo_micro_batch_size=64"])
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 16
    reward_model = ["reward_model.enable=true", "reward_model.model.path=./m", "reward_model.micro_batch_size=16"]
    config = load_config([*workers, *reward_model])
    assert config.reward.reward_model.micro_batch_size_per_gpu == 2
    own_pool = [f"reward_model.{key}" for key in ("enable_resource_pool=true", "n_gpus_per_node=2", "nnodes=1")]
    config = load_config([*workers, *reward_model, *own_pool])
    assert config.reward.reward_model.micro_batch_size_per_gpu == 8
    with pytest.raises(ConfigError, match="ppo_micro_batch_size_per_gpu=1, which counts for each worker"):
        load_config([*workers, "actor_rollout_ref.actor.ppo_micro_batch_size=9"])
    with pytest.raises(ConfigError, match="n_gpus_per_node=auto leaves open"):
        load_config(["actor_rollout_ref.actor.ppo_micro_batch_size=8"])


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        "actor_rollout_ref.actor.strategy=megatron",
        "data.datagen.path=x.py",
        "model_engine=megatron",
        "actor_rollout_ref.rollout.use_fire_sampling=True",
        "actor_rollout_ref.actor.state_masking=true",
        "max_turns=2",
        "do_search=true",
        "retriever.topk=3",
        "async_training.partial_rollout=True",
    ],
)
def test_what_does_not_exist_yet_is_refused_with_that_word(override):
    with pytest.raises(ConfigError, match="not exist in burnish yet") as caught:
        load_config([override])
    assert str(caught.value).startswith(override)


@pytest.mark.parametrize(
    ("override", "way"),
    [
        ("algorithm.kl_penalty=full", r"k3 \(low_var_kl\) estimates the same KL"),
        ("actor_rollout_ref.actor.tis_imp_ratio_cap=2", r"rollout_correction\.rollout_is=token"),
        ("algorithm.rollout_is_threshold=2", r"rollout_correction\.rollout_is_threshold=2\.0"),
        ("algorithm.rollout_correction.rollout_token_veto_threshold=1e-4", r"rollout_rs, as seq_max_k1"),
        ("algorithm.rollout_correction.rollout_rs_threshold_lower=0.5", r"rollout_rs_threshold=0\.5_2\.0"),
        ("algorithm.rollout_correction.use_pure_rollout_correction=true", r"loss_type=reinforce"),
        ("hydra.searchpath=[file://conf]", r"--config-path"),
    ],
)
def test_what_has_another_way_here_is_refused_with_that_way(override, way):
    with pytest.raises(ConfigError, match=f"is refused: .*{way}") as caught:
        load_config([override])
    assert str(caught.value).startswith(override)


def test_what_asks_for_no_correction_by_an_older_name_is_accepted():
    loaded = load_config(
        [
            "actor_rollout_ref.actor.tis_imp_ratio_cap=-1",
            "algorithm.rollout_is=false",
            "algorithm.rollout_is_threshold=null",
            "algorithm.rollout_correction.bypass_old_logprob_for_rollout=true",
        ]
    )
    assert loaded.algorithm.rollout_correction.rollout_is is None
    assert loaded.algorithm.rollout_correction.bypass_mode is True


def test_your_own_estimator_is_named_by_module_and_attribute():
    config = load_config(["algorithm.adv_estimator=my.package:estimator"])
    assert config.algorithm.adv_estimator == "my.package:estimator"
    assert config.critic.enable is False


@pytest.mark.parametrize("old", list(rules.RENAMED))
def test_every_other_name_leads_to_a_key_that_is_known(old):
    new = rules.rename(old.removesuffix(".*"))
    below = any(key.startswith(f"{new}.") for key in (*rules.NO_EFFECT, *rules.REFUSED))
    assert is_known(new) or new in sections() or open_dict(f"{new}.x") is not None or below


def test_no_key_is_both_refused_and_without_effect():
    assert not set(rules.NO_EFFECT) & set(rules.REFUSED)
    assert not (set(rules.RENAMED) | set(rules.GLOBAL_MICRO_BATCHES)) & set(leaves())


@pytest.mark.parametrize(
    ("typed", "actor", "critic"), [([], None, None), (["=false"], False, False), (["=true"], True, True)]
)
def test_the_critic_shares_prompts_as_the_actor_does(typed, actor, critic):
    config = load_config([f"actor_rollout_ref.actor.use_prefix_grouper{value}" for value in typed])
    assert config.actor_rollout_ref.actor.use_prefix_grouper is actor
    assert config.critic.use_prefix_grouper is critic
    assert load_config(["critic.use_prefix_grouper=false"]).actor_rollout_ref.actor.use_prefix_grouper is None


def test_what_belongs_to_the_launcher_of_a_script_is_accepted():
    loaded = load_with_notices(
        [
            "hydra.run.dir=/tmp/x",
            "model_engine=dp",
            "actor_rollout_ref.rollout.n_agent=1",
            "trainer.worker_nsight_options.capture-range-end=null",
            "trainer.npu_profile.options.level=level1",
            "actor_rollout_ref.profiler.all_ranks=false",
        ]
    )
    told = " ".join(loaded.notices)
    assert "hydra.run.dir=/tmp/x. The reason: Hydra writes nothing here" in told
    for key in ("worker_nsight_options", "npu_profile", "actor_rollout_ref.profiler.all_ranks"):
        assert key in told


def test_an_unknown_key_of_an_older_section_is_not_told_where_keys_begin():
    with pytest.raises(ConfigError, match=r"no key reward_model\.credit_assignment\. docs/config\.md lists all keys\."):
        load_config(["reward_model.credit_assignment=0.1"])


OLD_KL = "A script for verl before 0.4 means the KL in the reward by it"


@pytest.mark.parametrize(
    ("overrides", "is_told"),
    [
        (["algorithm.kl_ctrl.kl_coef=0.001"], True),
        (["algorithm.kl_ctrl.kl_coef=0.01"], True),
        (["algorithm.kl_ctrl.kl_coef=0"], False),
        (["algorithm.kl_ctrl.kl_coef=0.001", "algorithm.use_kl_in_reward=False"], False),
        (["algorithm.kl_ctrl.kl_coef=0.001", "algorithm.use_kl_in_reward=True"], False),
        (["algorithm.kl_ctrl.kl_coef=0.001", "actor_rollout_ref.actor.use_kl_loss=True"], False),
    ],
)
def test_a_coefficient_without_a_word_on_the_kl_is_of_an_older_script(overrides, is_told):
    told = [notice for notice in load_with_notices(overrides).notices if "algorithm.kl_ctrl.kl_coef" in notice]
    assert any(OLD_KL in notice for notice in told) == is_told
    assert len(told) <= 1


def test_a_folder_that_is_not_there_is_answered_with_what_needs_none():
    with pytest.raises(ConfigError, match=r"--config-path=config: there is no folder .*--config-name=ppo_trainer"):
        load_config([], "ppo_trainer", "config")


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_the_attention_of_a_script_is_told_to_have_no_effect_and_does_not_reach_the_model(name):
    loaded = load_with_notices([f"+actor_rollout_ref.model.override_config.{name}=eager"])
    assert loaded.config.actor_rollout_ref.model.override_config == {}
    assert any(f"{name}=eager. The reason: attention is computed by burnish" in notice for notice in loaded.notices)
    with pytest.raises(ConfigError, match=r"override_config\.torch_dtype=float16 is refused: .*fsdp_config\.dtype"):
        load_config(["+actor_rollout_ref.model.override_config.torch_dtype=float16"])
