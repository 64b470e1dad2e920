"""The page for who comes from verl: its keys exist, its paths give its names, and scripts' argument lists load."""

import importlib
import re
import shlex

import pytest

from burnish.config import load_with_notices
from burnish.config.rules import rename
from burnish.config.schema import leaves
from burnish.config.settings import is_known
from burnish.utils.errors import ConfigError
from tests.conftest import REPO
from tests.docs.verl_scripts import REFUSED, SCRIPTS

PAGE = (REPO / "docs" / "from_verl.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_scripts_arguments_load(name):
    loaded = load_with_notices(shlex.split(SCRIPTS[name].replace("'[", "[").replace("]'", "]"), posix=False))
    assert loaded.config.trainer.n_gpus_per_node == 8


def test_what_older_names_say_arrives():
    config = load_with_notices(shlex.split(SCRIPTS["dapo"], posix=False)).config
    overlong = config.reward.reward_kwargs.overlong_buffer_cfg
    assert (overlong.enable, overlong.len, overlong.penalty_factor) == (True, 512, 1.0)
    assert config.actor_rollout_ref.actor.optim.clip_grad == 1.0
    assert config.reward.reward_manager.name == "dapo"
    assert config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size == 8


@pytest.mark.parametrize("assignment", REFUSED)
def test_what_does_not_exist_is_answered_by_a_sentence(assignment):
    with pytest.raises(ConfigError, match=re.escape(REFUSED[assignment])):
        load_with_notices([*shlex.split(SCRIPTS["grpo"].replace("'", ""), posix=False)[:1], assignment])


def test_every_key_in_the_table_of_defaults_is_a_key():
    keys = re.findall(r"`((?:[a-z_]+\.)+[a-z_]+)`", section("Defaults that differ"))
    assert len(keys) > 25
    assert [key for key in keys if key not in leaves()] == []


def test_every_key_that_the_page_names_is_known():
    words = re.findall(r"`\+?((?:actor_rollout_ref|algorithm|data|critic|reward|trainer)\.[a-z_0-9.]+)[=`]", PAGE)
    assert len(words) > 40
    unknown = {w for w in words if not is_known(rename(w)) and not any(key.startswith(f"{w}.") for key in leaves())}
    # The example of a key that is nobody's.
    assert unknown - {"algorithm.tau"} == set()


def paths() -> list[tuple[str, str]]:
    rows = re.findall(
        r"^\| `(verl[\w.]*)` \| (.+) \|$", section("Module paths").partition("Elsewhere:")[0], re.MULTILINE
    )
    return [(path, name) for path, names in rows for name in re.findall(r"`(\w+)`", names)]


def test_the_table_of_paths_is_read():
    assert len(paths()) > 60


@pytest.mark.parametrize("path", sorted({path for path, _ in paths()}))
def test_a_path_with_burnish_for_verl_gives_the_names(path):
    here = path.replace("verl", "burnish", 1)
    module = importlib.import_module(here)
    for name in [name for where, name in paths() if where == path]:
        if path == "verl.utils.reward_score" and not hasattr(module, name):
            assert callable(importlib.import_module(f"{here}.{name}").compute_score)
        else:
            assert hasattr(module, name), f"{here}.{name}"


def test_what_lies_elsewhere_is_there():
    table = section("Module paths").partition("Elsewhere:")[2]
    for path in re.findall(r"`(burnish\.[\w.]+)`", table):
        module, _, attribute = path.rpartition(".")
        try:
            importlib.import_module(path)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), attribute), path


def test_a_score_function_is_called_as_there():
    from burnish.utils.reward_score import default_compute_score, gsm8k

    assert gsm8k.compute_score("so it is\n#### 42", "42") == 1.0
    assert default_compute_score("openai/gsm8k", "#### 41", "42") == 0.0
