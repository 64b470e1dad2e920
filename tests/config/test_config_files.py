"""YAML: recipes, files of the user's own, config groups, and what is saved loads again."""

import pytest

from burnish.config import load_config, load_with_notices, to_dict, to_yaml
from burnish.config.load import RECIPES
from burnish.utils.errors import ConfigError


@pytest.fixture
def conf(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - ppo_trainer\n  - algorithm: ppo\n  - _self_\n"
        "data:\n  train_batch_size: 16\n  max_response_length: ${data.max_prompt_length}\n"
        "actor_rollout_ref:\n  actor:\n    ppo_mini_batch_size: 8\n    optim: {lr: 1e-5}\n"
        "reward_model:\n  reward_manager: naive\n"
    )
    (tmp_path / "plain.yaml").write_text("trainer: {total_epochs: 2}\n")
    (tmp_path / "bad.yaml").write_text("data:\n  train_batchsize: 16\n")
    (tmp_path / "size").mkdir()
    (tmp_path / "size" / "small.yaml").write_text("# @package _global_\ndata: {train_batch_size: 4}\n")
    return str(tmp_path)


@pytest.mark.parametrize("recipe", sorted(file.stem for file in RECIPES.glob("*.yaml")))
def test_every_recipe_loads_by_both_ways_without_a_notice(recipe):
    by_group = load_with_notices([f"recipe={recipe}"])
    assert by_group.config == load_config([], config_name=recipe)
    assert by_group.notices == ()


def test_a_file_of_ones_own_is_under_the_command_line(conf):
    config = load_config(["data.train_batch_size=32"], config_name="mine", config_path=conf)
    assert config.data.train_batch_size == 32
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 8
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5
    assert config.data.max_response_length == 512


def test_a_key_of_a_file_may_go_by_another_name_on_the_command_line(conf):
    config = load_config(["reward.reward_manager.name=my:Manager"], config_name="mine", config_path=conf)
    assert config.reward.reward_manager.name == "my:Manager"


def test_a_misspelt_key_in_a_file_names_the_file(conf):
    with pytest.raises(ConfigError, match=r"train_batchsize=16 \(in bad\.yaml\).*Did you mean data\.train_batch_size"):
        load_config([], config_name="bad", config_path=conf)


@pytest.mark.parametrize("prefix", ["", "+"])
def test_groups_choose_a_file(conf, prefix):
    config = load_config([f"{prefix}algorithm=grpo"])
    assert (config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n) == ("grpo", 8)
    config = load_config([f"{prefix}algorithm=grpo"], config_name="mine", config_path=conf)
    assert (config.algorithm.adv_estimator, config.data.train_batch_size) == ("grpo", 16)
    config = load_config(
        [f"{prefix}size=small", "actor_rollout_ref.actor.ppo_mini_batch_size=2"], config_name="plain", config_path=conf
    )
    assert (config.data.train_batch_size, config.trainer.total_epochs) == (4, 2)


def test_recipe_then_file_then_group_then_key(conf):
    overrides = ["recipe=demo", "algorithm=ppo", "trainer.total_epochs=7"]
    config = load_config(overrides, config_name="plain", config_path=conf)
    assert config.trainer.experiment_name == "demo"
    assert config.algorithm.adv_estimator == "gae"
    assert config.trainer.total_epochs == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"overrides": ["recipe=dmeo"]}, "recipe=dmeo: there is no such file. Did you mean demo?"),
        ({"overrides": ["algorithm=grop"]}, "algorithm=grop: there is no such file. Did you mean grpo?"),
        ({"config_name": "mone"}, "--config-name=mone: there is no such file"),
        ({"config_path": "/no/where"}, "there is no folder /no/where"),
    ],
)
def test_a_file_that_does_not_exist_is_an_error_with_the_choices(arguments, message):
    with pytest.raises(ConfigError) as caught:
        load_config(**arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"overrides": ["recipe=grpo", "trainer.seed=1", "+recipe=dapo"]}, "recipe=grpo and recipe=dapo: a run starts"),
        ({"overrides": [{"recipe": "grpo"}, "recipe=dapo"]}, "recipe=grpo and recipe=dapo: a run starts"),
        ({"overrides": ["recipe=[grpo,dapo]"]}, "recipe=grpo and recipe=dapo: a run starts"),
        ({"overrides": ["recipe=grpo,dapo"]}, "recipe=grpo,dapo: a run starts"),
        ({"overrides": ["recipe=grpo"], "config_name": "dapo"}, "recipe=grpo and --config-name=dapo: a run starts"),
        ({"overrides": ["algorithm=grpo", "algorithm=ppo"]}, "algorithm=grpo and algorithm=ppo choose two files"),
        ({"overrides": [{"algorithm": "grpo"}, "+algorithm=ppo"]}, "algorithm=grpo and algorithm=ppo choose two files"),
    ],
)
def test_two_recipes_and_two_files_of_a_group_are_refused_by_name(arguments, named):
    with pytest.raises(ConfigError) as caught:
        load_config(**arguments)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "overrides", [["recipe=grpo", "recipe=grpo"], ["recipe=dapo", "recipe=null", "recipe=grpo"], ["recipe=[grpo]"]]
)
def test_one_recipe_may_be_named_again_and_null_takes_it_back(overrides):
    assert load_config(overrides) == load_config(["recipe=grpo"])


def test_a_recipe_in_a_file_is_told_how_it_is_written_there(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: dapo\ntrainer: {seed: 5}\n")
    with pytest.raises(ConfigError, match=r"recipe=dapo \(in mine.yaml\): .*as defaults: \[dapo, _self_\]"):
        load_config(config_name=str(file))
    file.write_text("defaults: [dapo, _self_]\ntrainer: {seed: 5}\n")
    assert to_dict(load_config(config_name=str(file))) == to_dict(load_config(["recipe=dapo", "trainer.seed=5"]))


def test_of_a_key_that_is_there_twice_the_last_counts():
    assert load_config(["trainer.seed=1", {"trainer.seed": 2}, "trainer.seed=3"]).trainer.seed == 3


def test_a_folder_needs_a_name(conf):
    with pytest.raises(ConfigError, match="needs --config-name. There is: bad, mine, plain"):
        load_config([], config_path=conf)


def test_what_is_saved_loads_again(tmp_path):
    config = load_config(
        ["recipe=demo", "actor_rollout_ref.model.path=/m", "ray_init.num_cpus=2", "trainer.experiment_name=ünï"]
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    again = load_with_notices([], config_name="config", config_path=str(tmp_path))
    assert again.config == config
    assert again.notices == ()


def test_text_with_a_dollar_brace_is_saved_literally(tmp_path):
    config = load_config([])
    config.actor_rollout_ref.model.custom_chat_template = "{{ '${x}' }}"
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config([], config_name="config", config_path=str(tmp_path)) == config


def test_fields_that_are_no_keys_are_not_saved():
    values = to_dict(load_config(["trainer.seed=1"]))
    assert "set_keys" not in values
    assert "global_batch_info" not in values["actor_rollout_ref"]["actor"]


@pytest.mark.parametrize("text", ["trainer: [1", "trainer:\n\tseed: 1", "trainer:\n  seed: 1\n  seed: 2"])
def test_a_file_that_is_no_yaml_is_named_with_the_line(tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"mine: the file is not valid YAML: .* line \d"):
        load_config(config_name="mine", config_path=str(tmp_path))


def test_a_file_is_named_by_its_path_whatever_characters_that_has(tmp_path):
    folder = tmp_path / "a b,[c]'"
    folder.mkdir()
    (folder / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {seed: 5}\n")
    assert load_config(config_name=str(folder / "mine.yaml")).trainer.seed == 5


def test_an_empty_section_of_a_file_sets_nothing(tmp_path):
    (tmp_path / "mine.yaml").write_text("trainer:\n")
    assert load_config(config_name="mine", config_path=str(tmp_path)).trainer.seed == 42


@pytest.mark.parametrize("text", ["2024_01", "007", "on", "1e3", "12:30:00", "1.10", "0x1F"])
def test_a_key_that_takes_text_has_what_the_file_says_and_not_the_number_that_yaml_makes_of_it(text, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        f"trainer: {{experiment_name: {text}}}\ndata:\n  val_files: {text}\n", encoding="utf-8"
    )
    config = load_config([], config_name="mine", config_path=str(tmp_path))
    assert config.trainer.experiment_name == text
    assert config.data.val_files == [text]


def test_two_bounds_without_quotes_are_two_in_a_file_and_in_a_group_of_it(tmp_path):
    (tmp_path / "algorithm").mkdir()
    file = "rollout_correction: {rollout_rs: token_k1, rollout_rs_threshold: 0.5_2}\n"
    (tmp_path / "algorithm" / "mine.yaml").write_text(file, encoding="utf-8")
    (tmp_path / "whole.yaml").write_text(f"algorithm:\n  {file}", encoding="utf-8")
    for overrides, name in ((["algorithm=mine"], None), ([], "whole")):
        config = load_config(overrides, config_name=name or "ppo_trainer", config_path=str(tmp_path))
        assert config.algorithm.rollout_correction.rollout_rs_threshold == "0.5_2"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"trainer:\n  experiment_name: \xe9\n", "can't decode byte 0xe9"),
        (b"trainer:\n  seed: ${\n", "no viable alternative"),
        (b"defaults: nope\n", "defaults must be a list"),
        (b"null: 2\n", "Incompatible key type"),
        (
            b"trainer:\n  seed: ${nope}\n",
            r"trainer\.seed=\$\{nope\} \(in mine\.yaml\): the reference cannot be looked up",
        ),
        (b"trainer:\n  experiment_name: ???\n", r"still to be given\. Set trainer\.experiment_name"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_in_one_sentence(content, says, tmp_path):
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=f"^.*{says}.*$"):
        load_config([], config_name="mine", config_path=str(tmp_path))


def test_a_whole_file_for_verl_loads_with_its_marks_its_other_names_and_what_they_refer_to(tmp_path, monkeypatch):
    (tmp_path / "whole.yaml").write_text(
        "actor_rollout_ref:\n"
        "  actor:\n"
        "    _target_: verl.workers.config.FSDPActorConfig\n"
        "    rollout_n: ${oc.select:actor_rollout_ref.rollout.n,1}\n"
        "    ulysses_sequence_parallel_size: 2\n"
        "    use_torch_compile: true\n"
        "    ppo_micro_batch_size: ${oc.env:MICRO}\n"
        "    optim: {lr: 1e-6, min_lr_ratio: null}\n"
        "    policy_loss: {_target_: verl.workers.config.PolicyLossConfig, dro_beta: null}\n"
        "  ref:\n"
        "    ulysses_sequence_parallel_size: ${actor_rollout_ref.actor.ulysses_sequence_parallel_size}\n"
        "    use_torch_compile: ${oc.select:actor_rollout_ref.actor.use_torch_compile,true}\n"
        "    fsdp_config: {use_torch_compile: true}\n"
        "  rollout: {n: 4}\n"
        "critic:\n"
        "  rollout_n: ${actor_rollout_ref.rollout.n}\n"
        "  ppo_micro_batch_size: 16\n"
        "  forward_micro_batch_size: ${critic.ppo_micro_batch_size}\n"
        "reward_model:\n"
        "  rollout:\n    name: ???\n"
        "trainer: {n_gpus_per_node: 4}\n"
    )
    monkeypatch.setenv("MICRO", "8")
    loaded = load_with_notices([], "whole", str(tmp_path))
    actor, ref, critic = (
        loaded.config.actor_rollout_ref.actor,
        loaded.config.actor_rollout_ref.ref,
        loaded.config.critic,
    )
    assert loaded.config.actor_rollout_ref.rollout.n == 4
    # Counted over four workers, of which two share a sample.
    assert actor.ppo_micro_batch_size_per_gpu == 4
    assert critic.ppo_micro_batch_size_per_gpu == critic.forward_micro_batch_size_per_gpu == 4
    assert ref.fsdp_config.ulysses_sequence_parallel_size == 2
    assert ref.fsdp_config.use_torch_compile
    assert (actor.optim.min_lr_ratio, actor.policy_loss.dro_beta) == (0.0, 0.1)
    assert not any("_target_" in notice for notice in loaded.notices)
    # The name of today on the command line counts for what refers to the other one.
    by_new_name = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=1"
    ref = load_config([by_new_name], "whole", str(tmp_path)).actor_rollout_ref.ref
    assert ref.fsdp_config.ulysses_sequence_parallel_size == 1
