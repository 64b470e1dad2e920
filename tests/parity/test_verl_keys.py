"""Every configuration key of verl is known here: it counts, has another name, has no effect, or asks for what does not exist."""

from collections import Counter

import pytest
import yaml

from burnish.config import load_with_notices, rules
from burnish.config.schema import leaves
from burnish.config.settings import is_known, open_dict
from tests.conftest import REPO


@pytest.fixture(scope="module")
def tree(verl_folder):
    """The keys of verl's trainer with their defaults, without what only builds its dataclasses."""
    text = (verl_folder / "trainer" / "config" / "_generated_ppo_trainer.yaml").read_text(encoding="utf-8")
    return {key: value for key, value in _flat(yaml.safe_load(text)) if not key.endswith("_target_")}


def _flat(values, prefix=""):
    for name, value in values.items():
        key = f"{prefix}.{name}".lstrip(".")
        if isinstance(value, dict) and value:
            yield from _flat(value, key)
        else:
            yield key, value


def test_every_key_is_known(tree):
    assert [key for key in tree if not is_known(rules.rename(key))] == []


def test_the_page_says_what_becomes_of_them(tree):
    kinds = Counter(_kind(key) for key in tree)
    page = (REPO / "docs" / "from_verl.md").read_text(encoding="utf-8")
    sentence = (
        f"Of the {len(tree)} keys of verl 0.9.1, {kinds['kept']} are keys here by the same name and {kinds['renamed']} by "
        f"another, {kinds['no effect']} are accepted without effect"
    )
    assert sentence in " ".join(page.split())
    assert f"the last {kinds['refused']} ask for" in " ".join(page.split())


def _kind(key):
    name = rules.rename(key)
    if name in leaves() or open_dict(name) is not None or name in rules.GLOBAL_MICRO_BATCHES:
        return "kept" if name == key else "renamed"
    return "refused" if rules.lookup(name, rules.REFUSED) is not None else "no effect"


def test_what_is_refused_is_accepted_at_verls_default(tree):
    """A script that spells out a default asks for nothing. Interpolations of verl's own are not looked up here."""
    refused = []
    for key, value in tree.items():
        refusal = rules.lookup(rules.rename(key), rules.REFUSED)
        plain = not (isinstance(value, str) and ("${" in value or value == "???"))
        if isinstance(refusal, rules.Refusal) and plain and not refusal.allows(value):
            refused.append(key)
    assert refused == []


def test_defaults_that_differ_are_the_ones_that_the_page_lists(tree):
    """Every other default of a key that both have is the same, or follows another key in one of the two."""
    page = (REPO / "docs" / "from_verl.md").read_text(encoding="utf-8")
    page = page.partition("## Defaults that differ")[2].partition("\n## ")[0]
    unlisted = []
    for key, value in tree.items():
        leaf = leaves().get(key)
        follows = isinstance(value, str) and "${" in value
        if leaf is None or follows or leaf.follows is not None or value in ("???", None) or leaf.default is None:
            continue
        if leaf.default != value and f"`{key}`" not in page:
            unlisted.append(f"{key}: {value!r}, here {leaf.default!r}")
    assert unlisted == []


def test_all_keys_without_effect_load_together_at_verls_defaults(tree):
    plain = {
        key: value
        for key, value in tree.items()
        if _kind(key) in ("no effect", "refused") and value not in (None, "???") and "${" not in str(value)
    }
    assert len(plain) > 300
    load_with_notices(["data.train_files=train.parquet", plain])
