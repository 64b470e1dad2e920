"""Overrides become typed values: grammar, types, references, followed keys."""

import dataclasses
import pickle
from pathlib import Path

import pytest

from burnish.config import PPOTrainerConfig, load_config, load_with_notices
from burnish.utils.errors import ConfigError


def error_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(list(overrides))
    return str(caught.value)


def test_no_overrides_give_the_defaults_with_followed_keys_filled_in():
    config = load_config([])
    assert config.trainer.logger == ["console", "file"]
    assert config.actor_rollout_ref.rollout.name == "native"
    assert config.data.seed == config.actor_rollout_ref.rollout.seed == config.trainer.seed == 42
    assert config.actor_rollout_ref.actor.clip_ratio_low == config.actor_rollout_ref.actor.clip_ratio_high == 0.2
    assert config.critic.ppo_mini_batch_size == 256
    assert config.critic.enable is True
    assert config.actor_rollout_ref.actor.use_dynamic_bsz is True
    assert config.trainer.default_local_dir == "checkpoints/burnish/gsm8k"


@pytest.mark.parametrize(
    ("key", "typed", "value"),
    [
        ("actor_rollout_ref.actor.optim.lr", "1e-6", 1e-6),
        ("actor_rollout_ref.actor.optim.lr", "'1e-6'", 1e-6),
        ("actor_rollout_ref.actor.optim.lr", "1", 1.0),
        ("trainer.total_training_steps", "1e3", 1000),
        ("trainer.total_training_steps", "'20'", 20),
        ("trainer.total_training_steps", "None", None),
        ("trainer.total_training_steps", "null", None),
        ("trainer.total_training_steps", "none", None),
        ("data.shuffle", "False", False),
        ("data.shuffle", "'False'", False),
        ("data.shuffle", "off", False),
        ("data.shuffle", "0", False),
        ("trainer.experiment_name", "1e3", "1e3"),
        ("trainer.experiment_name", "0123", "0123"),
        ("trainer.experiment_name", "true", "true"),
        ("trainer.experiment_name", "none", "none"),
        ("trainer.experiment_name", "'two words'", "two words"),
        ("data.train_files", "a.parquet", ["a.parquet"]),
        ("data.train_files", "[a.parquet,b.parquet]", ["a.parquet", "b.parquet"]),
        ("data.train_files", "\"['a.parquet', 'b.parquet']\"", ["a.parquet", "b.parquet"]),
        ("data.train_files", "'/x/a,b.parquet'", ["/x/a,b.parquet"]),
        ("data.train_files", "/x/a=b.parquet", ["/x/a=b.parquet"]),
        ("data.train_files", "[/x/a=b.parquet, c#.parquet]", ["/x/a=b.parquet", "c#.parquet"]),
        ("data.val_files", "null", []),
        ("actor_rollout_ref.model.path", "/models/a=b", "/models/a=b"),
        ("actor_rollout_ref.model.path", "/models/a,b#c", "/models/a,b#c"),
        ("trainer.logger", "console", ["console"]),
        ("trainer.logger", '["console","tensorboard"]', ["console", "tensorboard"]),
        ("actor_rollout_ref.actor.optim.betas", "[0.9,0.95]", [0.9, 0.95]),
        ("data.apply_chat_template_kwargs", "{enable_thinking:false}", {"enable_thinking": False}),
        ("trainer.n_gpus_per_node", "4", 4),
        ("trainer.n_gpus_per_node", "auto", "auto"),
        ("trainer.resume_from_path", "None", None),
    ],
)
def test_what_is_typed_becomes_a_value_of_the_keys_type(key, typed, value):
    config = load_config([f"{key}={typed}"])
    for name in key.split("."):
        config = getattr(config, name)
    assert config == value
    assert type(config) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.actor.optim.lr=abc", "text is given where a number belongs. The default is 1e-06"),
        ("actor_rollout_ref.actor.optim.lr=None", "cannot be null"),
        ("actor_rollout_ref.actor.optim.lr=true", "true or false is given where a number belongs"),
        ("actor_rollout_ref.actor.optim.lr=nan", "must be finite"),
        ("actor_rollout_ref.actor.optim.lr=-1e-6", "must be at least 0. The nearest value is 0"),
        ("actor_rollout_ref.rollout.n=2.5", "a whole number belongs"),
        ("actor_rollout_ref.rollout.n=0", "must be at least 1. The nearest value is 1"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=0", "The nearest value is 1"),
        ("data.shuffle=maybe", "true or false belongs"),
        ("data.truncation=erorr", "Did you mean error?"),
        ("trainer.logger=[console,consol]", "Did you mean console?"),
        ("trainer.logger=[console,clearml]", "clearml does not exist in burnish yet"),
        ("data.train_files=a,b", "[a,b]"),
        ("algorithm.gdpo_reward_weights=[1,x]", "item x: text is given where a number belongs"),
        ("algorithm.gdpo_reward_weights=[1,nan]", "item nan: the value must be finite"),
        ("algorithm.adv_estimator=gspo", "one of actor_rollout_ref.actor.policy_loss.loss_mode. recipe=gspo sets all"),
        ("algorithm.adv_estimator=dr_grpo", "'dr_grpo' is no value of this key. recipe=dr_grpo sets all"),
        ("reward.reward_manager=dapo", "Did you mean reward.reward_manager.name=dapo? Below it are: name"),
        ("critic=false", "Did you mean critic.enable=false?"),
        ("data.max_prompt_length=(5", "Quote the value"),
        ("data.shuffle", "data.shuffle=true"),
        ("--data.shuffle=true", "without dashes, as data.shuffle=true"),
        ("data=null.yaml", "data is a section, not a key. Below it are: train_files"),
        ("trainer.project_name=${trainer.nonsense}", "Interpolation key 'trainer.nonsense' not found"),
        ("trainer.project_name=${oc.env:BURNISH_NO_SUCH}", "Environment variable 'BURNISH_NO_SUCH' not found"),
        ("trainer.project_name='${'", r"text that holds ${ is written with a backslash before it: \${"),
        ("data.train_files=['${']", "begins a reference to another key, and this is none"),
        ("trainer.project_name=???", "??? stands for a value that is still to be given. Set trainer.project_name"),
        ("trainer.default_local_dir=", "the value is empty. Is a variable of the shell empty?"),
        ("reward.custom_reward_function.path=' '", "the value is empty"),
        ("actor_rollout_ref.actor.clip_ratio.low=1", "clip_ratio is a key with one value, and has none below it"),
        ("data.seed=1,2", "Give one of them"),
        ("actor_rollout_ref.actor.kl_loss_type=full", "is refused: it needs the logits of the whole vocabulary"),
    ],
)
def test_an_error_names_the_key_as_typed_and_the_way_out(override, message):
    text = error_of(override)
    assert text.startswith(override)
    assert message in text


@pytest.mark.parametrize("word", ["null", "None", "'null'"])
def test_a_word_for_null_follows_as_null_does(word):
    keys = ["actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.rollout.prompt_length", "data.seed"]
    config = load_config([f"{key}={word}" for key in keys])
    assert config.actor_rollout_ref.actor.clip_ratio_low == 0.2
    assert (config.actor_rollout_ref.rollout.prompt_length, config.data.seed) == (512, 42)


@pytest.mark.parametrize("size", [1_000_000_007, 10**12 + 39])
def test_a_size_of_millions_of_prompts_is_answered_with_the_nearest_that_divides(size):
    # In as many steps as its square root.
    assert "The nearest value is actor_rollout_ref.actor.ppo_mini_batch_size=1." in error_of(
        f"data.train_batch_size={size}"
    )


def test_a_forgotten_section_is_found():
    assert "Did you mean actor_rollout_ref.actor.optim.lr?" in error_of("actor_rollout_ref.actor.lr=1e-6")
    assert "Did you mean trainer.total_epochs?" in error_of("total_epochs=3")


def test_the_last_setting_wins_and_a_tilde_takes_back():
    config = load_config(["trainer.total_epochs=2", "++trainer.total_epochs=3"])
    assert config.trainer.total_epochs == 3
    config = load_config(["trainer.total_epochs=2", "~trainer.total_epochs"])
    assert config.trainer.total_epochs == 30
    assert "trainer.total_epochs" not in config.set_keys


def test_followed_keys_follow_through_chains_and_null_follows_too():
    config = load_config(["actor_rollout_ref.actor.use_dynamic_bsz=true", "critic.use_dynamic_bsz=null"])
    assert config.critic.use_dynamic_bsz is True
    assert config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz is True
    config = load_config(["critic.ppo_micro_batch_size_per_gpu=4", "actor_rollout_ref.actor.clip_ratio=0.3"])
    assert config.critic.forward_micro_batch_size_per_gpu == 4
    assert config.actor_rollout_ref.actor.clip_ratio_high == 0.3
    assert load_config(["actor_rollout_ref.model.path=/m"]).critic.model.tokenizer_path == "/m"


def test_a_micro_batch_size_in_samples_switches_that_model_alone_from_tokens_to_samples():
    config = load_config(["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"])
    assert config.actor_rollout_ref.actor.use_dynamic_bsz is False
    assert config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz is True
    assert config.critic.use_dynamic_bsz is True


def test_references_are_looked_up(monkeypatch):
    monkeypatch.setenv("BURNISH_TEST_HOME", "/data")
    config = load_config(
        [
            "data.train_batch_size=64",
            "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}",
            "data.train_files=${oc.env:BURNISH_TEST_HOME}/train.parquet",
            "trainer.experiment_name=b${data.train_batch_size}",
        ]
    )
    assert config.critic.ppo_mini_batch_size == 64
    assert config.data.train_files == ["/data/train.parquet"]
    assert config.trainer.default_local_dir == "checkpoints/burnish/b64"


def test_home_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(["actor_rollout_ref.model.path=~/model"])
    assert config.actor_rollout_ref.model.path == "/home/me/model"
    assert config.data.train_files == ["/home/me/data/rlhf/gsm8k/train.parquet"]


def test_open_dictionaries_take_entries_one_by_one_or_whole():
    config = load_config(
        [
            "+ray_kwargs.ray_init.runtime_env.working_dir=/w",
            "ray_init.num_cpus=3",
            "+actor_rollout_ref.model.override_config={hidden_size:64}",
            "+actor_rollout_ref.model.override_config.rope_theta=1e6",
            "algorithm.custom.alpha=0.3",
        ]
    )
    assert config.ray_kwargs.ray_init == {"num_cpus": 3, "runtime_env": {"working_dir": "/w"}}
    assert config.actor_rollout_ref.model.override_config == {"hidden_size": 64, "rope_theta": 1e6}
    assert config.algorithm.custom == {"alpha": 0.3}
    own = load_config(["actor_rollout_ref.actor.policy_loss.custom.tau=0.5"]).actor_rollout_ref.actor.policy_loss.custom
    assert own == {"tau": 0.5}


def test_functions_and_classes_are_named_by_where_they_are_found():
    class Local:
        pass

    config = load_config({"algorithm.adv_estimator": error_of, "reward": {"reward_manager": {"name": ConfigError}}})
    assert config.algorithm.adv_estimator == f"{__name__}:error_of"
    assert config.reward.reward_manager.name == "burnish.utils.errors:ConfigError"
    for unnamed in (lambda: None, Local):
        with pytest.raises(ConfigError, match="^algorithm.adv_estimator=.*define it at the top of a module"):
            load_config({"algorithm.adv_estimator": unnamed})


def test_a_mapping_is_the_same_as_overrides():
    typed = load_config(["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4"])
    mapped = load_config({"data": {"train_batch_size": 8}, "actor_rollout_ref.actor.ppo_mini_batch_size": 4})
    assert mapped == typed


def test_configs_do_not_share_lists_and_dictionaries():
    first, second = load_config([]), load_config([])
    first.trainer.logger.append("wandb")
    first.ray_kwargs.ray_init["num_gpus"] = 1
    assert second == load_config([]) == load_with_notices([]).config
    assert PPOTrainerConfig().trainer.logger == ["console", "file"]


def test_a_config_travels_between_processes_and_takes_no_unknown_attribute():
    config = load_config([])
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(AttributeError):
        config.trainer.total_epoch = 3
    actor = dataclasses.replace(config.actor_rollout_ref.actor, global_batch_info={"dp_size": 2})
    assert actor.global_batch_info == {"dp_size": 2}
    assert config.actor_rollout_ref.actor.global_batch_info == {}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("actor_rollout_ref.actor.optim.learning_rate", "actor_rollout_ref.actor.optim.lr"),
        ("actor_rollout_ref.rollout.val_kwargs.temp", "actor_rollout_ref.rollout.val_kwargs.temperature"),
        ("actor_rollout_ref.modle.path", "actor_rollout_ref.model.path"),
        ("trainer.n_gpus", "trainer.n_gpus_per_node"),
        ("trainer.total_steps", "trainer.total_training_steps"),
        ("critic.lr", "critic.optim.lr"),
    ],
)
def test_the_key_that_was_meant_comes_first_among_the_suggestions(typed, meant):
    with pytest.raises(ConfigError, match=rf"Did you mean {meant}\b"):
        load_with_notices([f"{typed}=1"])


@pytest.mark.parametrize("word", ["", "=", "~", "+", "=3"])
def test_a_word_without_a_key_is_answered_as_such(word):
    with pytest.raises(ConfigError, match="names no key"):
        load_with_notices([word])


def test_a_value_that_is_followed_is_judged_by_the_rules_of_the_key_that_was_set():
    with pytest.raises(ConfigError, match=r"trainer\.seed=abc: .* The default is 42"):
        load_with_notices(["trainer.seed=abc"])


def test_values_of_python_are_taken_as_yaml_would_write_them():
    given = {"actor_rollout_ref": {"model": {"path": Path("/a 'b'")}}, "trainer.logger": ("file",)}
    config = load_with_notices([given, "trainer.seed=3"]).config
    assert config.actor_rollout_ref.model.path == "/a 'b'"
    assert config.trainer.logger == ["file"]
    assert config.trainer.seed == 3
    with pytest.raises(ConfigError, match="set is no value"):
        load_with_notices({"trainer.logger": {"file"}})


def test_the_critics_divisor_follows_the_policys_unless_it_has_its_own():
    given = ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm", "algorithm.adv_estimator=gae"]
    given.append("actor_rollout_ref.actor.loss_scale_factor=64")
    assert load_with_notices(given).config.critic.loss_scale_factor == 64
    assert load_with_notices([*given, "critic.loss_scale_factor=32"]).config.critic.loss_scale_factor == 32
    assert load_with_notices(given[:-1]).config.critic.loss_scale_factor is None


def test_sets_with_names_take_the_place_of_a_list_that_was_set_before():
    config = load_config(
        [
            "actor_rollout_ref.model.path=m",
            "data.train_files=a",
            "data.val_files=[x]",
            "data.val_files={one:/a,two:[/b]}",
        ]
    )
    assert config.data.val_files == {"one": "/a", "two": ["/b"]}
