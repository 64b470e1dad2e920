"""What the pages of the documentation point to exists: files, links, keys."""

import re

import pytest

from burnish.config.trees import RL, SFT
from tests.conftest import REPO

PAGES = sorted([*(REPO / "docs").glob("*.md"), REPO / "README.md", REPO / "CONTRIBUTING.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    linked = [page.parent / target for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)]
    named = [REPO / path for path in re.findall(r"`((?:burnish|docs|tests|examples|benchmarks)/[\w./]*)`", text)]
    # Examples of files that a reader is to write.
    missing = [str(file) for file in [*linked, *named] if not file.exists() and file.stem != "name"]
    assert missing == []


@pytest.mark.parametrize("name", ["where_do_i_add.md", "README.md"])
def test_every_key_that_a_page_names_exists(name):
    text = next(page for page in PAGES if page.name == name).read_text(encoding="utf-8")
    known = {**RL.leaves, **RL.sections, **SFT.leaves, **SFT.sections}
    roots = {path.split(".")[0] for path in known}
    words = re.findall(r"(?<![\w/.-])([a-z_]+(?:\.[a-z_0-9]+)+)(?=[=`\s])", text)
    keys = {word for word in words if word.split(".")[0] in roots and not word.endswith((".jsonl", ".py"))}
    assert len(keys) > 3
    # The README shows how a misspelt key is answered.
    keys -= {"data.train_batchsize"}
    open_ended = (
        "algorithm.custom.",
        "actor_rollout_ref.actor.policy_loss.custom.",
        "reward.reward_kwargs.custom.",
        "ray_kwargs.ray_init.",
    )
    unknown = {key for key in keys if key not in known and not key.startswith(open_ended)}
    assert unknown == set()
