"""Every key that scripts in the field set is accepted at its usual default, and nothing unknown is."""

from pathlib import Path

import pytest

from burnish.config import load_with_notices
from burnish.config.load import parse, to_settings
from burnish.config.rules import BARE_NAMES, rename
from burnish.config.schema import leaves
from burnish.config.settings import Settings, is_known, suggest
from burnish.config.trees import RL, SFT
from burnish.config.values import show
from burnish.utils.errors import ConfigError

KNOWN = [
    line
    for line in Path(__file__).with_name("known_keys.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def test_all_known_keys_load_together():
    loaded = load_with_notices(KNOWN)
    assert loaded.config.actor_rollout_ref.model.path.endswith("deepseek-llm-7b-chat")


def test_each_known_key_passes_the_rules_alone():
    for assignment in KNOWN:
        settings = Settings()
        settings.apply(to_settings(assignment, parse(assignment)))
        assert settings.by_key or settings.inert or settings.global_micro_batches, assignment


def test_each_key_of_the_tree_accepts_its_own_default():
    for path, leaf in leaves().items():
        settings = Settings()
        settings.apply(to_settings(path, parse(f"{path}={show(leaf.default)}")))
        assert leaf.default in (None, {}) or any(key.startswith(path) for key in settings.by_key)


def test_a_misspelt_last_word_is_unknown_and_the_right_one_is_named():
    for assignment in KNOWN[::3]:
        key = assignment.partition("=")[0]
        head, _, last = key.rpartition(".")
        typo = f"{head}.{last}x".lstrip(".")
        if is_known(rename(typo)):  # below an open dictionary or a pattern any name is legal
            continue
        with pytest.raises(ConfigError, match="there is no key"):
            Settings().apply(to_settings(f"{typo}=1", parse(f"{typo}=1")))
        assert any(suggestion.rpartition(".")[2] == last for suggestion in suggest(typo)), (typo, suggest(typo))


def test_names_of_other_trainers_lead_to_keys_that_exist():
    for name, keys in BARE_NAMES.items():
        assert all(any(key in tree.leaves for tree in (RL, SFT)) for key in keys), name
        assert not any(is_known(rename(name), tree) for tree in (RL, SFT)), name
    assert suggest("max_steps") == suggest("max_steps", SFT) == ["trainer.total_training_steps"]
    assert suggest("model") == ["actor_rollout_ref.model.path"]
    assert suggest("model", SFT) == ["model.path"]


@pytest.mark.parametrize("prefix", ["", "+", "++", "~"])
def test_unknown_keys_are_refused_whatever_the_prefix(prefix):
    with pytest.raises(ConfigError, match=r"Did you mean data\.train_batch_size\?"):
        load_with_notices([f"{prefix}data.train_batchsize=8"])
