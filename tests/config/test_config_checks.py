"""Keys that contradict each other are an error that names the nearest legal value; unusual combinations are told."""

from pathlib import Path

import pytest

from burnish.config import check_hub_models, check_paths, load_config, load_sft_config, load_with_notices
from burnish.utils import hub
from burnish.utils.errors import ConfigError, ModelError

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
SP = "ulysses_sequence_parallel_size"
RM = "reward.reward_model"
BOUND = f"{RM}.forward_max_token_len_per_gpu"
REWARD_MODEL = [f"{RM}.enable=true", f"{RM}.model_path=scorer"]


def sizes(prompts: int, mini: int, n: int = 1, *more: str) -> list[str]:
    return [f"data.train_batch_size={prompts}", f"{ACTOR}.ppo_mini_batch_size={mini}", f"{ROLLOUT}.n={n}", *more]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.adv_estimator=grpo"], r"rollout\.n=1 \(the default\).*Set actor_rollout_ref\.rollout\.n=2"),
        (["algorithm.adv_estimator=rloo", f"{ROLLOUT}.n=1"], r"^actor_rollout_ref\.rollout\.n=1: "),
        (["critic=null"], "needs a critic"),
        (["critic.enable=false", "algorithm.adv_estimator=gae"], r"^critic\.enable=false"),
        (sizes(8, 3), r"ppo_mini_batch_size=3 does not divide data\.train_batch_size=8.*ppo_mini_batch_size=4"),
        (["data.train_batch_size=8"], r"ppo_mini_batch_size=256 \(the default\) is more than.*ppo_mini_batch_size=8"),
        (sizes(2, 2, 1, f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"), r"ppo_micro_batch_size_per_gpu=2\.$"),
        (sizes(6, 3, 1, "trainer.n_gpus_per_node=2"), r"3 samples, which do not divide among 2 workers.*=2\.$"),
        (sizes(3, 3, 1, "trainer.n_gpus_per_node=2"), r"Make data\.train_batch_size=3 a multiple of 2"),
        (sizes(8, 8, 1, "critic.ppo_mini_batch_size=5"), r"^critic\.ppo_mini_batch_size=5 does not divide"),
        ([f"{ACTOR}.clip_ratio_low=0.8", f"{ACTOR}.clip_ratio_high=1.2"], "clip_ratio_low=0.2 clip_ratio_high=0.2"),
        ([f"{ACTOR}.clip_ratio_c=1.0"], "must be above 1"),
        ([f"{ROLLOUT}.max_model_len=600"], r"512 \+ 512 = 1024 tokens.*max_model_len=1024"),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=1000"], "ppo_max_token_len_per_gpu=1024"),
        ([*REWARD_MODEL, f"{BOUND}=1000"], rf"^{BOUND}=1000 is a bound.*512 \+ 512 = 1024.*{BOUND}=1024\.$"),
        (
            [*REWARD_MODEL, f"{BOUND}=200", f"{RM}.max_length=300"],
            rf"of which {RM}\.max_length=300 are seen.*{BOUND}=300\.$",
        ),
        ([*REWARD_MODEL, f"{BOUND}=300", f"{RM}.model.fsdp_config.{SP}=2"], rf"{BOUND}=512\.$"),
        ([f"{ROLLOUT}.prompt_length=100"], r"less than data\.max_prompt_length=512"),
        (["trainer.controller=local", "trainer.n_gpus_per_node=2"], r"Set trainer\.controller=ray"),
        (["trainer.n_gpus_per_node=6", f"{ACTOR}.{SP}=4", *sizes(6, 6)], rf"^{ACTOR}\.{SP}=4: .*{SP}=3\.$"),
        (["trainer.n_gpus_per_node=1", f"critic.{SP}=2"], rf"the one worker does not divide.*fsdp_config\.{SP}=1\.$"),
        (
            ["trainer.n_gpus_per_node=4", f"{ACTOR}.{SP}=2", *sizes(3, 3)],
            r"3 samples, which do not divide among 2 groups of 2 workers\. Make data\.train_batch_size=3 a multiple of 2",
        ),
        (
            ["trainer.n_gpus_per_node=4", f"{ACTOR}.{SP}=2", f"{ACTOR}.ppo_max_token_len_per_gpu=511"],
            r"holds for each of the 2 workers that share a sample's tokens, .*ppo_max_token_len_per_gpu=512\.$",
        ),
        (["critic.nnodes=1"], "needs both above 0"),
        (["trainer.n_gpus_per_node=8", f"{ACTOR}.fsdp_config.fsdp_size=3"], r"fsdp_size=2\."),
        (["trainer.resume_mode=resume_path"], r"needs trainer\.resume_from_path"),
        (["trainer.resume_from_path=/x"], r"only with trainer\.resume_mode=resume_path"),
        (["data.custom_cls.path=x.py"], r"needs data\.custom_cls\.name"),
        (["data.train_files=null"], "name at least one"),
        ([f"{ROLLOUT}.min_new_tokens=600"], r"min_new_tokens=600: a response has up to 512.*min_new_tokens=512\.$"),
        ([f"{ROLLOUT}.val_kwargs.min_new_tokens=600"], r"val_kwargs\.min_new_tokens=512\.$"),
        ([f"{ROLLOUT}.gpu_memory_utilization=1.5"], "at most 1"),
        ([f"{ROLLOUT}.cudagraph_capture_sizes=[8,0]"], "at least 1"),
        ([f"{ROLLOUT}.stop=[a,'']"], "an empty text"),
    ],
)
def test_a_contradiction_is_an_error(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.adv_estimator=grpo", "algorithm.allow_single_sample_groups=true"],
        ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2", "critic=null"],
        ["algorithm.adv_estimator=reinforce_plus_plus"],
        sizes(8, 4, 5),
        sizes(48, 48, 1, "trainer.n_gpus_per_node=16", "trainer.nnodes=3"),
        sizes(3, 3, 3, f"{ROLLOUT}.val_kwargs.n=2", "data.val_batch_size=5"),
        [f"{ACTOR}.clip_ratio_low=0.8", f"{ACTOR}.clip_ratio_high=1.2", f"{ACTOR}.allow_wide_clip=true"],
        [f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.28"],
        [f"{ACTOR}.ppo_max_token_len_per_gpu=1000", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
         f"{ROLLOUT}.log_prob_max_token_len_per_gpu=2000"],
        ["trainer.n_gpus_per_node=8", f"{ACTOR}.fsdp_config.fsdp_size=8"],
    ],
)  # fmt: skip
def test_a_combination_that_works_is_accepted_and_kept(overrides):
    set_keys = load_config(overrides).set_keys
    for override in overrides:
        # critic=null is kept as critic.enable.
        assert any(key.startswith(override.split("=")[0]) for key in set_keys), override


def test_rows_given_as_objects_need_no_training_file():
    assert load_config(["data.train_files=null"], train_rows_given=True).data.train_files == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{ROLLOUT}.top_p=0.9"], "truncated distribution"),
        ([f"{ROLLOUT}.top_k=20"], "truncated distribution"),
        ([f"{ROLLOUT}.min_p=0.1", f"{ROLLOUT}.top_p=0.9"], r"top_p=0\.9 and .*min_p=0\.1: .*truncated distribution"),
        ([f"{ROLLOUT}.repetition_penalty=1.1"], "changed distribution"),
        ([f"{ROLLOUT}.min_new_tokens=4"], "changed distribution"),
        ([rf"{ROLLOUT}.stop=['\n\n']"], "taken as these two characters.*YAML"),
        (
            [f"{ROLLOUT}.name=hf", f"{ROLLOUT}.gpu_memory_utilization=0.6", f"{ROLLOUT}.enforce_eager=true"],
            r"No effect here: .*utilization=0\.6, .*eager=true\. The reason: the rollout engine in use is hf",
        ),
        (
            [f"{ROLLOUT}.enforce_eager=true", f"{ROLLOUT}.cudagraph_capture_sizes=[1,8]"],
            r"No effect here: .*sizes=\[1,8\]\. The reason: .*enforce_eager=true",
        ),
        ([f"{ROLLOUT}.do_sample=false", f"{ROLLOUT}.n=4"], "greedy, so the 4 of one prompt are equal"),
        ([f"{ROLLOUT}.val_kwargs.n=4"], "the 4 responses are equal"),
        ([f"{ROLLOUT}.val_kwargs.temperature=0.6"], "do_sample=false is greedy"),
        ([f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=true"], "counts twice"),
        ([f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=k1"], "k1\\+"),
        ([f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"], "cut by tokens"),
        (["algorithm.adv_estimator=reinforce_plus_plus", "critic.optim.lr=1e-4"], "trains no critic"),
        (["algorithm.adv_estimator=reinforce_plus_plus", "trainer.critic_warmup=2"], "there is no critic"),
    ],
)
def test_an_unusual_combination_is_told(overrides, message):
    notices = load_with_notices(overrides).notices
    assert len(notices) == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(notices[0])


def test_validation_ends_responses_as_training_does_unless_it_says_otherwise():
    keys = [f"{ROLLOUT}.stop=['</answer>']", f"{ROLLOUT}.stop_token_ids=[5]", f"{ROLLOUT}.min_new_tokens=2"]
    val = load_config(keys).actor_rollout_ref.rollout.val_kwargs
    assert (val.stop, val.stop_token_ids, val.min_new_tokens) == (["</answer>"], [5], 2)
    val = load_config([*keys, f"{ROLLOUT}.val_kwargs.stop=[]"]).actor_rollout_ref.rollout.val_kwargs
    assert (val.stop, val.stop_token_ids) == ([], [5])
    # What biases ratios is of training alone.
    val = load_config([f"{ROLLOUT}.min_p=0.1", f"{ROLLOUT}.repetition_penalty=2"]).actor_rollout_ref.rollout.val_kwargs
    assert (val.min_p, val.repetition_penalty) == (0, 1)


def test_white_space_is_a_stop_string_and_no_file():
    rollout = load_config([f"{ROLLOUT}.stop=['\n\n',' ']"]).actor_rollout_ref.rollout
    assert rollout.stop == ["\n\n", " "]
    with pytest.raises(ConfigError, match="an empty text"):
        load_config(["data.val_files=[a.jsonl,' ']"])


def test_the_defaults_give_no_notice():
    assert load_with_notices([]).notices == ()


@pytest.fixture
def files(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "train.jsonl").write_text("")
    (tmp_path / "reward.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return ["actor_rollout_ref.model.path=./model", "data.train_files=train.jsonl", "data.val_files=null"]


def test_files_that_exist_pass(files):
    for more in (
        [],
        ["actor_rollout_ref.model.path=org/model", "data.train_files=[train.jsonl]"],
        ["custom_reward_function.path=reward.py"],
    ):
        check_paths(load_config([*files, *more]))
    # The same files are missed where they are not, so the calls above did look.
    Path("train.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"train\.jsonl"):
        check_paths(load_config(files))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.model.path=null", r"model\.path is not set"),
        (
            "actor_rollout_ref.model.path=./nowhere",
            r"^actor_rollout_ref\.model\.path=\./nowhere: there is no such folder",
        ),
        ("actor_rollout_ref.model.path=empty", r"no config\.json"),
        ("critic.model.path=/no/where", r"^critic\.model\.path=/no/where"),
        ("data.train_files=[train.jsonl,gone.jsonl]", r"there is no file gone\.jsonl \(looked in "),
        ("data.val_files=gone.jsonl", r"data\.val_files=null trains without validation"),
        ("custom_reward_function.path=gone.py", r"^custom_reward_function\.path=gone\.py: there is no such file"),
    ],
)
def test_a_file_that_is_missing_is_named(files, override, message):
    with pytest.raises(ConfigError, match=message):
        check_paths(load_config([*files, override]))


ENDLESS = "x" * 5000


@pytest.mark.parametrize("value", [ENDLESS, f"/{ENDLESS}", f"org/{ENDLESS}", f"{ENDLESS}/*.jsonl", "~no_such_user/x"])
@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.model.path",
        "data.train_files",
        "data.val_files",
        "data.tool_config_path",
        "reward.custom_reward_function.path",
        "trainer.default_local_dir",
        "trainer.experiment_name",
        "algorithm.adv_estimator",
        "no.such.key",
        "recipe",
        "algorithm",
    ],
)
def test_no_value_is_too_long_or_too_strange_to_be_looked_for(files, key, value):
    try:
        config = load_config([*files, f"{key}={value}"])
        check_paths(config)
    except ConfigError as error:
        assert str(error).startswith(f"{key}={value}") or key == "trainer.experiment_name"
    else:
        # A name of the hub, or a folder that is still to be made.
        assert value.count("/") == 1


@pytest.mark.parametrize("name", [ENDLESS, f"./{ENDLESS}", f"{ENDLESS}/mine"])
def test_no_name_of_a_file_or_folder_is_too_long_to_be_missed(name):
    with pytest.raises(ConfigError, match="there is no (such file|folder)"):
        load_config([], config_name=name)
    with pytest.raises(ConfigError, match="there is no folder"):
        load_config([], config_name="mine", config_path=name)


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("train.jsonl", "there is a file in its place"),
        ("train.jsonl/below", "there is a file in its place"),
        (ENDLESS, "File name too long"),
    ],
)
@pytest.mark.parametrize("key", ["default_local_dir", "rollout_data_dir", "validation_data_dir"])
def test_a_folder_that_cannot_be_made_is_told_and_none_is_made(files, key, folder, reason):
    before = sorted(Path().iterdir())
    with pytest.raises(ConfigError, match=f"^trainer.{key}={folder}: this folder cannot be written to: {reason}"):
        check_paths(load_config([*files, f"trainer.{key}={folder}"]))
    check_paths(load_config([*files, f"trainer.{key}=new/folder"]))
    assert sorted(Path().iterdir()) == before


@pytest.fixture
def looked_for(monkeypatch) -> dict[str, bool]:
    """Which models were looked for on the hub, each with whether its weights count; those of "gone" cannot be had."""
    found: dict[str, bool] = {}

    def check_model(path: str, *, weights: bool = True) -> None:
        # A tokenizer is the model's, where nothing else is said: then the name is looked for twice.
        found[path] = weights or found.get(path, False)
        if path.startswith("gone/"):
            raise ModelError(f"{path}: the hub cannot be reached.")

    monkeypatch.setattr(hub, "check_model", check_model)
    return found


MODEL = "actor_rollout_ref.model"
GRPO = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_every_model_is_looked_for_on_the_hub_and_its_weights_where_one_node_has_the_run(looked_for, nodes):
    models = [f"{MODEL}.path=org/policy", f"{MODEL}.tokenizer_path=org/words", "critic.model.path=org/critic"]
    own = [*models, "algorithm.adv_estimator=gae", f"{RM}.enable=true", f"{RM}.model_path=org/scorer"]
    check_hub_models(load_config([*own, f"trainer.nnodes={nodes}"]))
    alone = nodes == 1
    assert looked_for == {"org/policy": alone, "org/words": False, "org/critic": alone, "org/scorer": alone}


def test_models_of_parts_that_do_not_run_are_not_looked_for(looked_for):
    check_hub_models(
        load_config(
            [f"{MODEL}.path=org/policy", "critic.model.path=gone/critic", f"{RM}.model_path=gone/scorer", *GRPO]
        )
    )
    check_hub_models(load_sft_config(["model.path=org/student", "data.train_files=a.jsonl"]))
    assert looked_for == {"org/policy": True, "org/student": True}


@pytest.mark.parametrize(
    ("override", "load"),
    [
        (f"{MODEL}.path=gone/model", load_config),
        (f"{MODEL}.tokenizer_path=gone/words", load_config),
        ("critic.model.path=gone/critic", load_config),
        ("model.path=gone/student", load_sft_config),
    ],
)
def test_a_model_of_the_hub_that_cannot_be_had_is_told_with_its_key(looked_for, override, load):
    with pytest.raises(ConfigError) as caught:
        check_hub_models(load([override, "data.train_files=a.jsonl"]))
    assert str(caught.value) == f"{override}: the hub cannot be reached."
