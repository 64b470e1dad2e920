"""The configuration of supervised fine-tuning: its keys, verl's names for them, and what contradicts what."""

import subprocess
import sys

import pytest

from burnish.config import (
    TrainerConfig,
    check_paths,
    load_config,
    load_sft_config,
    load_sft_with_notices,
    origin_table,
    to_dict,
    to_yaml,
)
from burnish.config.docs import field_docs
from burnish.config.load import RECIPES
from burnish.config.rules import SFT as RULES
from burnish.config.rules import lookup
from burnish.config.schema import walk
from burnish.config.settings import is_known, open_dict
from burnish.config.sft import SFTRunConfig, SFTTrainerConfig
from burnish.config.trees import RL, SFT
from burnish.utils.errors import ConfigError

DATA = "data.train_files=a.jsonl"


def load(*overrides):
    return load_sft_config([DATA, *overrides])


def test_the_sections_of_the_run_are_those_of_reinforcement_learning_with_defaults_of_their_own():
    config = load()
    assert (config.optim.lr, config.trainer.total_epochs, config.trainer.keep_best_mode) == (1e-5, 4, "min")
    assert config.trainer.default_local_dir == "checkpoints/burnish/sft"
    assert config.data.seed == config.model.lora_seed == config.trainer.seed
    assert isinstance(config.trainer, TrainerConfig)


def test_what_only_reinforcement_learning_has_is_no_key_here():
    for name in ("rollout_data_dir", "critic_warmup", "max_critic_ckpt_to_keep", "replay_rollouts"):
        with pytest.raises(ConfigError, match=f"trainer.{name}=1: there is no key"):
            load(f"trainer.{name}=1")
    missing = {path for path in RL.leaves if path.startswith("trainer.")} - set(SFT.leaves)
    others = {f"trainer.{field}" for field in SFTRunConfig.__dataclass_fields__}
    assert missing < others


@pytest.mark.parametrize(
    "key",
    [
        "algorithm.adv_estimator=grpo",
        "critic.enable=true",
        "reward.num_workers=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.hybrid_engine=true",
        "reward_model.enable=true",
        "custom_reward_function.path=mine.py",
    ],
)
def test_sections_of_reinforcement_learning_are_refused_by_that_word(key):
    with pytest.raises(ConfigError, match="is refused: it belongs to reinforcement learning"):
        load(key)


def test_a_key_of_the_other_trainer_names_its_command():
    with pytest.raises(
        ConfigError, match=r"there is no key model.path. It is one of burnish sft \(and of burnish check"
    ):
        load_config([DATA, "model.path=m"])
    with pytest.raises(ConfigError, match=r"no key data.max_prompt_length. It is one of burnish train\."):
        load("data.max_prompt_length=64")


def test_every_key_has_a_sentence():
    for prefix, section in walk(SFTTrainerConfig()):
        docs = field_docs(type(section))
        for path in SFT.leaves:
            if path.rpartition(".")[0] == prefix:
                assert docs.get(path.rpartition(".")[2]), path


@pytest.mark.parametrize("old", list(RULES.renamed))
def test_every_other_name_leads_to_a_key(old):
    new = RULES.rename(old.removesuffix(".*"))
    assert is_known(new, SFT) or new in SFT.sections or open_dict(f"{new}.x", SFT) is not None
    assert old not in SFT.leaves


def test_no_name_is_in_two_tables():
    assert not set(RULES.no_effect) & set(RULES.refused)
    assert all(lookup(key, RULES.refused) is None or key not in SFT.leaves for key in SFT.leaves)


def test_names_of_verls_older_trainer_are_understood():
    config, told = load_sft_with_notices(
        [
            DATA,
            "model.partial_pretrain=./m",
            "data.micro_batch_size=8",
            "trainer.n_gpus_per_node=4",
            "optim.warmup_steps_ratio=0.1",
            "optim.lr_scheduler=cosine",
            "ulysses_sequence_parallel_size=2",
            "model.fsdp_config.cpu_offload=true",
            "trainer.max_ckpt_to_keep=2",
            "data.balance_dp_token=false",
            "use_remove_padding=true",
            "model.use_liger=false",
            "data.tokenizer=./t",
        ]
    )
    assert (config.model.path, config.model.tokenizer_path) == ("./m", "./t")
    # Counted over all workers, of which two share a conversation.
    assert config.data.micro_batch_size_per_gpu == 4
    assert (config.optim.lr_warmup_steps_ratio, config.optim.lr_scheduler_type) == (0.1, "cosine")
    assert config.engine.ulysses_sequence_parallel_size == 2
    assert config.engine.offload_policy
    assert config.trainer.max_actor_ckpt_to_keep == 2
    assert not config.trainer.balance_batch
    assert any(notice.startswith("Renamed keys") for notice in told)
    assert any("use_remove_padding=true" in notice and "always packed" in notice for notice in told)


def test_the_profilers_of_reinforcement_learning_are_those_of_this():
    config, told = load_sft_with_notices([DATA, "global_profiler.tool=torch", "trainer.profile_steps=[2]"])
    assert (config.profiler.enable, config.profiler.tool, config.global_profiler.steps) == (True, "torch", [2])
    assert told == ("Renamed keys, applied: trainer.profile_steps is global_profiler.steps.",)
    assert load_sft_with_notices([DATA, "trainer.profile_interval=[-1,-1]"])[1] == ()
    with pytest.raises(ConfigError, match=r"profile_interval=\[2,3\] is refused: .* as global_profiler.steps=\[2,3\]"):
        load("trainer.profile_interval=[2,3]")
    with pytest.raises(ConfigError, match="profiler.enable=true names no tool"):
        load("profiler.enable=true")


def test_columns_inside_columns_are_refused_with_the_way_out():
    with pytest.raises(
        ConfigError,
        match=r"is refused: what lies inside a column is named with a dot, as data.prompt_key=extra_info.question",
    ):
        load("data.prompt_dict_keys=['question']")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.prompt_key=question"], "data.prompt_key=question needs data.response_key"),
        (["data.response_key=answer"], "data.response_key=answer needs data.prompt_key"),
        (
            ["data.micro_batch_size_per_gpu=8", "data.train_batch_size=4"],
            "nearest value is data.micro_batch_size_per_gpu=4",
        ),
        (
            ["data.max_token_len_per_gpu=512", "data.max_length=1000"],
            "nearest value is data.max_token_len_per_gpu=1000",
        ),
        (
            [
                "data.max_token_len_per_gpu=400",
                "data.max_length=1000",
                "engine.ulysses_sequence_parallel_size=2",
                "trainer.n_gpus_per_node=2",
            ],
            "nearest value is data.max_token_len_per_gpu=500",
        ),
        (["engine.fsdp_size=3", "trainer.n_gpus_per_node=4"], "Possible: -1"),
        (["trainer.controller=local", "trainer.nnodes=2", "trainer.n_gpus_per_node=1"], "Set trainer.controller=ray"),
        (["trainer.keep_best=val-core/x", "trainer.save_freq=1", "trainer.test_freq=1"], "as val/loss"),
        (["trainer.keep_best=val/loss"], "Set trainer.save_freq"),
        (["trainer.resume_mode=resume_path"], "needs trainer.resume_from_path"),
        (["optim.betas=[0.9]"], "there must be two numbers"),
        (["optim.optimizer=AdamV"], "Did you mean"),
        (["data.train_files=[]"], "name at least one file"),
        (["data.trian_files=x"], "Did you mean data.train_files"),
        (["data.custom_cls.path=x.py"], "needs data.custom_cls.name"),
    ],
)
def test_what_contradicts_itself_is_refused_with_the_nearest_value(overrides, words):
    with pytest.raises(ConfigError) as error:
        load(*overrides)
    assert words in str(error.value)


def test_keys_without_effect_beside_others_are_told():
    _, told = load_sft_with_notices(
        [DATA, "optim.num_cycles=1", "model.lora_alpha=8", "data.max_token_len_per_gpu=9999"]
    )
    assert any("optim.num_cycles=1" in text for text in told)
    assert any("model.lora_alpha=8" in text for text in told)
    assert not any("max_token_len" in text for text in told)
    assert load_sft_with_notices([DATA])[1] == ()


@pytest.mark.parametrize(
    ("idle", "beside"),
    [
        ("model.lora_alpha=8", "model.lora_adapter_path=./a"),
        ("optim.betas=[0.8,0.9]", "optim.optimizer=SGD"),
        ("optim.lr_warmup_steps_ratio=0.1", "optim.lr_warmup_steps=3"),
        ("engine.offload_policy=true", "trainer.n_gpus_per_node=1"),
        ("ray_kwargs.ray_init.num_cpus=8", "trainer.controller=local"),
        ("trainer.total_epochs=2", "trainer.total_training_steps=7"),
        ("engine.param_offload=true", "engine.offload_policy=true"),
        ("checkpoint.async_save=true", "trainer.save_freq=-1"),
        ("trainer.keep_best_mode=max", "trainer.keep_best=null"),
        ("data.seed=3", "data.shuffle=false"),
        ("profiler.ranks=[1]", "profiler.enable=null"),
        ("global_profiler.steps=[1]", "global_profiler.tool=null"),
    ],
)
def test_a_key_that_another_one_leaves_without_effect_is_told_with_it(idle, beside):
    _, told = load_sft_with_notices([DATA, idle, beside])
    assert any(text.startswith(f"No effect here: {idle.partition('=')[0]}=") for text in told), told


def test_what_is_set_to_its_default_or_by_a_recipe_of_ours_is_not_told():
    assert load_sft_with_notices([DATA, "optim.num_cycles=0.5", "recipe=lora", "model.lora_rank=0"])[1] == ()


def test_a_switch_that_is_set_off_without_a_size_is_told_to_be_on_all_the_same():
    off = "data.use_dynamic_bsz=false"
    _, (told,) = load_sft_with_notices([DATA, off])
    assert told.startswith(f"{off} has no effect: without data.micro_batch_size_per_gpu")
    assert load_sft_with_notices([DATA, off, "data.micro_batch_size_per_gpu=2"])[1] == ()


def test_micro_batches_are_cut_by_tokens_where_no_size_is_given():
    assert load().data.use_dynamic_bsz
    assert not load("data.micro_batch_size_per_gpu=2").data.use_dynamic_bsz


@pytest.mark.parametrize("recipe", sorted(file.stem for file in (RECIPES / "sft").glob("*.yaml")))
def test_every_recipe_loads(recipe):
    config, told = load_sft_with_notices([DATA, f"recipe={recipe}"])
    assert told == ()
    assert config.model.lora_rank == (32 if recipe == "lora" else 0)


def test_a_recipe_of_the_other_trainer_is_none_here():
    with pytest.raises(ConfigError, match="recipe=dapo: there is no such file"):
        load("recipe=dapo")
    with pytest.raises(ConfigError, match="recipe=lora: there is no such file"):
        load_config(["recipe=lora"])


def test_what_is_written_is_read_again(tmp_path):
    config = load("recipe=lora", "model.path=./m", "trainer.seed=7")
    (tmp_path / "mine.yaml").write_text(to_yaml(config))
    again = load_sft_config([], config_name="mine", config_path=str(tmp_path))
    assert to_dict(again) == to_dict(config)
    assert origin_table(config)["model.lora_rank"]["origin"] == "recipe lora"
    assert origin_table(config)["data.seed"]["origin"] == "follows trainer.seed"


def test_a_conversation_is_no_longer_than_the_model_takes(tiny_model_path, tiny_data_path):
    file = tiny_data_path / "train.jsonl"
    with pytest.raises(ConfigError, match="nearest value is data.max_length="):
        check_paths(
            load_sft_config([f"data.train_files={file}", f"model.path={tiny_model_path}", "data.max_length=8000"])
        )
    with pytest.raises(ConfigError, match=r"model\.path is not set"):
        check_paths(load_sft_config([f"data.train_files={file}"]))
    with pytest.raises(ConfigError, match="there is no file nowhere.jsonl"):
        check_paths(
            load_sft_config(["data.train_files=nowhere.jsonl", f"model.path={tiny_model_path}", "data.max_length=64"])
        )


def test_loading_it_needs_no_torch():
    load = "from burnish.config import load_sft_config; load_sft_config(['data.train_files=a'])"
    subprocess.run([sys.executable, "-c", f"import sys; {load}; assert 'torch' not in sys.modules"], check=True)


def test_the_engine_that_a_script_names_is_fsdp_or_refused():
    config = load("engine=fsdp", "optim=fsdp", "engine.fsdp_size=1", "optim.lr=1e-4")
    assert (config.engine.fsdp_size, config.optim.lr) == (1, 1e-4)
    for override in ("engine=megatron", "optim=veomni"):
        with pytest.raises(ConfigError, match=f"{override} is refused: .* do not exist in burnish yet"):
            load(override)


@pytest.mark.parametrize("key", ["test_freq", "save_freq"])
def test_an_epoch_is_given_as_a_number_of_steps(key):
    with pytest.raises(ConfigError, match=f"trainer.{key}=after_each_epoch is refused: it is a number of steps"):
        load(f"trainer.{key}=after_each_epoch")


def test_a_script_for_the_older_trainer_is_told_the_schedule_that_it_counts_on():
    def told(*overrides):
        return [notice for notice in load_sft_with_notices([DATA, *overrides])[1] if "counts on defaults" in notice]

    (notice,) = told("model.partial_pretrain=./m", "optim.warmup_steps_ratio=0.05")
    assert notice.endswith("set optim.lr_scheduler_type=cosine optim.betas=[0.9,0.95].")
    assert told("model.path=./m") == []


def test_keys_of_ones_own_go_to_the_dataset_class():
    with pytest.raises(ConfigError, match="Keys of your own dataset go below data.custom"):
        load("data.bracket_substitution.enable=true")
    assert load("data.custom.bank=x", "data.custom_cls.path=a.py", "data.custom_cls.name=A").data.custom == {
        "bank": "x"
    }
    assert any("data.custom" in notice for notice in load_sft_with_notices([DATA, "data.custom.bank=x"])[1])
