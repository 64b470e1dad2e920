"""References between keys, ``${...}``: the shortcut for the plain ones says what OmegaConf says, and leaves the others to it."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from burnish.config import load, load_config
from burnish.config.references import followed
from burnish.utils.errors import ConfigError

NEEDED = ("actor_rollout_ref.model.path=model", "data.train_files=rows.jsonl")
TREE: dict[str, Any] = {
    "number": 3,
    "nothing": None,
    "list": [1, {"a": 2}],
    "section": {"name": "x", "flag": True, "same": "${section.name}"},
    "chain": "${section.same}",
    "text": "runs/${section.name}/${chain}",
    "text_of_number": "runs/${number}",
    "escaped": r"\${number}",
    "whole_section": "${section}",
    "to_list": "${list}",
    "to_nothing": "${nothing}",
    "environment": "${oc.env:HOME}",
    "relative": "${.number}",
    "item": "${list[0]}",
    "of_text": "${chain.length}",
    "missing": "${no.such.key}",
    "circle": "${circled}",
    "circled": "a${circle}",
}
BY_SHORTCUT = {"number", "nothing", "list", "chain", "text", "to_list", "to_nothing"}


@pytest.mark.parametrize("path", TREE)
def test_the_shortcut_says_what_omegaconf_says_or_nothing(path):
    found = followed(TREE, path)
    assert (found is not None) == (path in BY_SHORTCUT)
    if found is not None:
        value = OmegaConf.select(OmegaConf.create(TREE), path, throw_on_resolution_failure=True)
        assert found[0] == (OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value)
        assert type(found[0]) in (int, str, list, type(None))


def test_what_follows_a_list_is_a_list_of_its_own():
    found = followed(TREE, "to_list")
    assert found is not None
    found[0][1]["a"] = 5
    assert TREE["list"] == [1, {"a": 2}]


def test_plain_references_need_no_grammar(monkeypatch):
    def create(_: object) -> None:
        raise AssertionError("OmegaConf was asked")

    monkeypatch.setattr(load.OmegaConf, "create", create)
    config = load_config([*NEEDED, "trainer.project_name=a", "trainer.experiment_name=${trainer.project_name}"])
    assert config.trainer.default_local_dir == "checkpoints/a/a"


@pytest.mark.parametrize("value", ["${", "${trainer.seed", "a ${no.such.key}"])
@pytest.mark.parametrize("key", ["trainer.experiment_name", "trainer.project_name"])
def test_a_reference_that_is_none_is_refused_with_its_key(key, value):
    with pytest.raises(ConfigError, match=key):
        load_config([*NEEDED, {key: value}])
