"""Keys that name files and folders: ``~`` is replaced once, when the configuration is made, or refused with the key."""

import pytest

from burnish.config import load_config, load_sft_config
from burnish.config.build import value_of
from burnish.config.trees import RL, SFT
from burnish.utils.errors import ConfigError

PATHS = [(tree, leaf.path) for tree in (RL, SFT) for leaf in tree.leaves.values() if leaf.is_path]


def load(tree, override):
    # Nothing is looked for on the disk here, and no other key has to fit.
    return (load_config if tree is RL else load_sft_config)([override], train_rows_given=True)


@pytest.mark.parametrize(("tree", "key"), PATHS, ids=[key for _, key in PATHS])
def test_the_home_of_nobody_is_refused_by_the_key_that_names_it(tree, key):
    with pytest.raises(ConfigError) as caught:
        load(tree, {key: "~no_such_user/x"})
    text = str(caught.value)
    assert text.startswith(f"{key}=~no_such_user/x: there is no user no_such_user on this machine")
    with pytest.raises(ConfigError, match=r"=a\\0b: there is a character in it that no name of a file can have"):
        load(tree, {key: "a\0b"})


def test_every_key_that_is_called_a_path_a_folder_or_files_is_one():
    called = {
        key
        for tree in (RL, SFT)
        for key in tree.leaves
        if key.endswith(("path", "_dir", "_files", "tokenizer_path")) and not key.startswith("ray_kwargs.")
    }
    assert called <= {key for _, key in PATHS}


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("trainer.default_local_dir=~/runs", "trainer.default_local_dir", "/home/me/runs"),
        ("trainer.default_local_dir=~", "trainer.default_local_dir", "/home/me"),
        ("trainer.default_local_dir=./~no_such_user", "trainer.default_local_dir", "./~no_such_user"),
        ("actor_rollout_ref.model.path=~/model", "critic.model.path", "/home/me/model"),
        ("data.train_files=[~/a.jsonl,b.jsonl]", "data.train_files", ["/home/me/a.jsonl", "b.jsonl"]),
        ({"data.val_files": {"easy": "~/a.jsonl", "hard": ["~/b.jsonl"]}}, "data.val_files",
         {"easy": "/home/me/a.jsonl", "hard": ["/home/me/b.jsonl"]}),
        ("actor_rollout_ref.model.path=org/model", "actor_rollout_ref.model.path", "org/model"),
        ("trainer.default_hdfs_dir=s3://bucket//runs", "trainer.default_hdfs_dir", "s3://bucket//runs"),
        # Text that is no path is left alone.
        ({"actor_rollout_ref.rollout.stop": ["~", "~~~", "~/"]}, "actor_rollout_ref.rollout.stop", ["~", "~~~", "~/"]),
        ({"data.system_prompt": "~ Be brief."}, "data.system_prompt", "~ Be brief."),
    ],
)  # fmt: skip
def test_the_home_stands_where_a_path_begins_with_it(override, key, value, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert value_of(load(RL, override), key) == value


def test_one_of_several_is_enough():
    for override in ({"data.train_files": ["a", "~no_such_user/x"]}, {"data.val_files": {"set": "~no_such_user/x"}}):
        with pytest.raises(ConfigError, match=r"data\.\w+_files.*=.*no_such_user/x.*: there is no user no_such_user"):
            load(RL, override)


def test_a_default_that_is_nowhere_on_this_machine_is_no_error(monkeypatch):
    import pwd

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert load_config([]).data.train_files == ["~/data/rlhf/gsm8k/train.parquet"]
    with pytest.raises(ConfigError, match="trainer.default_local_dir=~/runs: ~ is the home of the user, who has none"):
        load_config(["trainer.default_local_dir=~/runs"])
