"""Where each value of a configuration comes from: the default, a recipe, a file, the command line, Python, another key."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config.schema import Leaf, leaves, root_of
from burnish.config.section import Section
from burnish.config.settings import Setting, Settings, is_of_shipped_recipe
from burnish.config.sft import SFTTrainerConfig
from burnish.config.trainer import PPOTrainerConfig
from burnish.utils.secrets import redact

ORIGIN_FILE = "config_origin.json"
"""In the run's folder: ``{key: {"value": ..., "origin": ...}}``."""
RESOLVED = "resolved"
_PRESET = "algorithm.rollout_correction.preset"


@dataclass(frozen=True, slots=True)
class Origin:
    """Of one key: the value that was loaded, and who gave it."""

    value: Any
    giver: str


def origins(config: Section, settings: Settings, before: dict[str, Any]) -> dict[str, Origin]:
    """The origin of every key of a configuration that was just loaded.

    Args:
        before: value by key before `burnish.config.settle` and its like filled in what was left open.
    """
    found = {}
    for key, leaf in leaves(root_of(config)).items():
        giver = _giver(leaf, before[key], settings)
        found[key] = Origin(before[key], giver)
        value = _value_of(config, key)
        if value != before[key]:
            by_preset = key.startswith(_PRESET.removesuffix("preset")) and _value_of(config, _PRESET) is not None
            found[key] = Origin(value, f"follows {_PRESET}" if by_preset else RESOLVED)
    return found


def values_of(config: Section) -> dict[str, Any]:
    """Every key with its value, copied as far as lists and dictionaries can be changed in place."""
    values = {key: _value_of(config, key) for key in leaves(root_of(config))}
    return {key: value.copy() if isinstance(value, list | dict) else value for key, value in values.items()}


def origin_table(config: PPOTrainerConfig | SFTTrainerConfig) -> dict[str, dict[str, Any]]:
    """``{key: {"value": ..., "origin": ...}}`` of a configuration as it is now, secrets hidden.

    Origins are "default", "recipe <name>", "config file", "command line", "python", "follows <key>", or "resolved": worked out
    from other keys or from the machine, or changed after loading.
    """
    table = {}
    for key, leaf in leaves(root_of(config)).items():
        value, origin = _value_of(config, key), config.origins.get(key)
        if origin is not None:
            giver = origin.giver if value == origin.value else RESOLVED
        else:
            # Made by its class instead of being loaded.
            giver = "default" if value == leaf.default else "python"
        table[key] = {"value": redact(value, key), "origin": giver}
    return table


def write_origins(config: PPOTrainerConfig | SFTTrainerConfig, run_dir: Path) -> None:
    """Writes `origin_table` into the run's folder."""
    text = json.dumps(origin_table(config), ensure_ascii=False, indent=1, default=str)
    (run_dir / ORIGIN_FILE).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


def _giver(leaf: Leaf, value: Any, settings: Settings) -> str:
    setting = _setting_of(leaf.path, settings)
    if setting is not None and not (setting.value is None and (leaf.follows is not None or leaf.default is None)):
        return _place(setting)
    if leaf.follows is not None and value is not None:
        return f"follows {leaf.follows}"
    return "default"


def _setting_of(key: str, settings: Settings) -> Setting | None:
    """What set the key, an entry of its dictionary, or its size over all workers; of several, the last."""
    for old, new in settings.tree.rules.global_micro_batches.items():
        if new == key and old in settings.global_micro_batches and key not in settings.by_key:
            return settings.global_micro_batches[old]
    if key in settings.by_key:
        return settings.by_key[key]
    entries = [setting for name, setting in settings.by_key.items() if name.startswith(f"{key}.")]
    return entries[-1] if entries else None


def _place(setting: Setting) -> str:
    if setting.from_python:
        return "python"
    if not setting.source:
        return "command line"
    if is_of_shipped_recipe(setting.shown):
        return f"recipe {Path(setting.source).stem}"
    return "config file"


def _value_of(config: Section, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        # Not counted as read by `burnish.config.usage`.
        value = object.__getattribute__(value, name)
    return value
