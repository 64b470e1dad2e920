"""The room as a whole: it is light, documented, and its lists of names are those of the registries."""

import subprocess
import sys
from pathlib import Path

from burnish.config import docs, names
from burnish.config.schema import key_fields, leaves, walk
from burnish.config.trainer import PPOTrainerConfig

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "ray", "numpy", "tensordict")


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_importing_the_room_loads_neither_hydra_nor_anything_heavy():
    loaded = run_python("import sys, burnish.config; print(*{name.partition('.')[0] for name in sys.modules})").split()
    assert not set(loaded) & {*HEAVY, "hydra", "omegaconf", "yaml"}


def test_loading_and_a_misspelt_key_load_nothing_heavy():
    loaded = run_python(
        "import sys\nfrom burnish.config import load_config\nfrom burnish.utils.errors import ConfigError\n"
        "load_config(['recipe=demo'])\n"
        "try: load_config(['data.train_batchsize=1'])\n"
        "except ConfigError: print(*{name.partition('.')[0] for name in sys.modules})"
    ).split()
    assert "hydra" in loaded
    assert not set(loaded) & set(HEAVY)


def test_the_page_of_keys_is_up_to_date():
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == docs.generate(), "run: python -m burnish.config.docs > docs/config.md"


def test_every_field_and_section_has_its_text():
    for prefix, section in walk(PPOTrainerConfig()):
        documented = docs.field_docs(type(section))
        for field in key_fields(section):
            assert documented.get(field.name, "").endswith("."), f"{prefix}.{field.name}"


def test_every_key_follows_a_key_and_is_on_the_page():
    page = docs.generate()
    for leaf in leaves().values():
        assert leaf.follows is None or leaf.follows in leaves()
        assert f"| `{leaf.path.rpartition('.')[2]}` |" in page


def test_names_are_those_of_the_registries():
    from burnish.config.rejection import PRESETS
    from burnish.core_algos.estimators import ADV_ESTIMATORS
    from burnish.core_algos.policy_losses import POLICY_LOSSES
    from burnish.reward.manager import REWARD_MANAGERS
    from burnish.rollout import get_rollout_cls

    assert set(names.ADV_ESTIMATORS) == set(ADV_ESTIMATORS)
    assert set(names.POLICY_LOSSES) == set(POLICY_LOSSES)
    assert set(names.ROLLOUT_CORRECTION_PRESETS) == set(PRESETS)
    assert set(names.REWARD_MANAGERS) == set(REWARD_MANAGERS)
    assert all(get_rollout_cls(name) for name in names.ROLLOUTS)


def test_names_that_say_more_of_a_name_are_names():
    assert set(names.TOKEN_BASELINE_ADV_ESTIMATORS) < set(names.GROUP_ADV_ESTIMATORS) < set(names.ADV_ESTIMATORS)
    assert set(names.SEQUENCE_MEAN_POLICY_LOSSES) < set(names.POLICY_LOSSES)
