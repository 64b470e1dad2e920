"""The keys of adapters: what they accept, which of them do nothing beside which, and what must be there before a run starts."""

import importlib.util
import json

import pytest

from burnish.config import check_paths, load_config, load_with_notices
from burnish.utils.errors import ConfigError

MODEL = "actor_rollout_ref.model"


def test_targets_are_one_name_or_a_list_of_names_and_patterns():
    assert load_config([]).actor_rollout_ref.model.target_modules == ["all-linear"]
    for given, expected in (
        ("all-linear", ["all-linear"]),
        ("q_proj", ["q_proj"]),
        ("[q_proj,v_proj]", ["q_proj", "v_proj"]),
        (r"'.*\.0\..*_proj'", [r".*\.0\..*_proj"]),
    ):
        model = load_config([f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules={given}"]).actor_rollout_ref.model
        assert (model.lora_rank, model.target_modules) == (8, expected)
    assert load_config([f"{MODEL}.exclude_modules=null"]).actor_rollout_ref.model.exclude_modules == []
    config = load_config(["trainer.seed=5", f"{MODEL}.lora_seed=6", f"{MODEL}.lora_rank=2"])
    assert (config.actor_rollout_ref.model.lora_seed, config.critic.model.lora_seed) == (6, 5)


@pytest.mark.parametrize(("key", "value"), [("lora_rank", -1), ("lora_alpha", 0), ("lora_rank", "many")])
def test_a_value_that_means_nothing_is_refused(key, value):
    with pytest.raises(ConfigError, match=f"{MODEL}.{key}={value}"):
        load_config([f"{MODEL}.{key}={value}"])


@pytest.mark.parametrize(
    ("overrides", "idle", "reason"),
    [
        ([f"{MODEL}.lora_alpha=32"], f"{MODEL}.lora_alpha=32", "lora_rank=0"),
        (
            [f"{MODEL}.lora_adapter_path=/adapter", f"{MODEL}.target_modules=q_proj"],
            f"{MODEL}.target_modules=q_proj",
            "lora_adapter_path=/adapter",
        ),
        (
            [
                f"{MODEL}.lora_rank=8",
                "actor_rollout_ref.actor.use_kl_loss=true",
                "actor_rollout_ref.ref.fsdp_config.param_offload=true",
            ],
            "actor_rollout_ref.ref.fsdp_config.param_offload=true",
            "the reference is the actor without its adapters",
        ),
    ],
)
def test_a_key_that_another_leaves_without_effect_is_named(overrides, idle, reason):
    notices = [notice for notice in load_with_notices(overrides).notices if idle in notice]
    assert len(notices) == 1
    assert reason in notices[0]


def test_with_a_rank_none_of_them_is_idle():
    notices = load_with_notices(
        [f"{MODEL}.lora_rank=8", f"{MODEL}.lora_alpha=32", f"{MODEL}.exclude_modules=k_proj"]
    ).notices
    assert not any("lora_alpha" in notice or "exclude_modules" in notice for notice in notices)


@pytest.fixture
def run(tmp_path, monkeypatch):
    for folder, file, content in (("model", "config.json", {}), ("adapter", "adapter_config.json", {"r": 8})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(json.dumps(content))
    (tmp_path / "train.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    return [f"{MODEL}.path=./model", "data.train_files=train.jsonl", "data.val_files=null"]


def test_an_adapter_to_start_from_is_there_before_anything_starts(run):
    check_paths(load_config([*run, f"{MODEL}.lora_adapter_path=adapter"]))
    check_paths(load_config([*run, f"{MODEL}.lora_adapter_path=adapter", f"{MODEL}.lora_rank=8"]))
    with pytest.raises(ConfigError, match=r"lora_rank=4, but the adapter at .*lora_adapter_path=adapter has rank 8"):
        check_paths(load_config([*run, f"{MODEL}.lora_adapter_path=adapter", f"{MODEL}.lora_rank=4"]))
    with pytest.raises(ConfigError, match=r"lora_adapter_path=model: the folder has no adapter_config\.json"):
        check_paths(load_config([*run, f"{MODEL}.lora_adapter_path=model"]))
    with pytest.raises(ConfigError, match=r"^critic\.model\.lora_adapter_path=model"):
        check_paths(load_config([*run, "algorithm.adv_estimator=gae", "critic.model.lora_adapter_path=model"]))


def test_without_peft_a_run_does_not_start(run, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "peft" else find(name))
    with pytest.raises(ConfigError, match=r"lora_rank=8 needs the package peft.*pip install 'burnish\[lora\]'"):
        check_paths(load_config([*run, f"{MODEL}.lora_rank=8"]))
    check_paths(load_config(run))
