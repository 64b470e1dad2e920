"""From resolved values to the dataclasses, and back to plain dictionaries and YAML."""

import os.path
from typing import Any

from burnish.config.schema import Leaf, get_field, key_fields, leaves, root_of, walk
from burnish.config.section import Section
from burnish.config.settings import Settings
from burnish.config.sft import SFTTrainerConfig
from burnish.config.trainer import PPOTrainerConfig
from burnish.config.values import coerce, show
from burnish.utils import local_paths
from burnish.utils.errors import ConfigError
from burnish.utils.secrets import redact, redact_text

_CORRECTION = "algorithm.rollout_correction"
_REWARD_MODEL = "reward.reward_model"
# The key that says how many workers share the tokens of a sample, by the section whose samples are meant.
_SEQUENCE_PARALLEL = {"data": "engine.ulysses_sequence_parallel_size"} | {
    section: f"{engine}.fsdp_config.ulysses_sequence_parallel_size"
    for section, engine in (
        ("actor_rollout_ref.actor", "actor_rollout_ref.actor"),
        ("actor_rollout_ref.rollout", "actor_rollout_ref.actor"),
        ("actor_rollout_ref.ref", "actor_rollout_ref.ref"),
        ("critic", "critic.model"),
        (_REWARD_MODEL, f"{_REWARD_MODEL}.model"),
    )
}


def build(values: dict[str, Any], settings: Settings) -> Any:
    """The configuration with one value for each key of the tree, checked key by key.

    Raises:
        ConfigError: a value of the wrong type, outside its bounds or none of the choices.
    """
    final = {path: _final_value(leaf, values[path], settings) for path, leaf in settings.tree.leaves.items()}
    _per_worker_micro_batches(final, values, settings)
    config: Any = settings.tree.root(set_keys=_set_keys(final, settings))  # type: ignore[call-arg]
    for prefix, section in walk(config):
        for field in key_fields(section):
            path = f"{prefix}.{field.name}" if prefix else field.name
            if path in final:
                setattr(section, field.name, final[path])
    return config


def _final_value(leaf: Leaf, value: Any, settings: Settings) -> Any:
    # A value that is followed is judged under the name of the key that was really set.
    source = leaf
    while source.path not in settings.by_key and source.follows is not None:
        source = settings.tree.leaves[source.follows]
    setting = settings.by_key.get(source.path)
    text = setting.text if setting is not None and "${" not in setting.text else None
    for judged_as in dict.fromkeys((source.path, leaf.path)):
        value = coerce(value, settings.tree.leaves[judged_as], settings.shown(source.path, value), text)
    return _as_paths(value, source.path, settings) if leaf.is_path else value


def _as_paths(value: Any, key: str, settings: Settings, shown: str | None = None) -> Any:
    """Paths with ``~`` replaced.

    Args:
        value: one, a list of them, or a dict of either; whatever else stays as it is.
        key: that has it.
        shown: what was set that holds it; None: nothing. A default that cannot be on this machine is nobody's fault, and nobody
            may need it.

    Raises:
        ConfigError: one that was set and that nothing on this machine can have.
    """
    if (setting := settings.by_key.get(key)) is not None:
        shown = local_paths.shown(setting.shown)
    if isinstance(value, list):
        return [_as_paths(item, key, settings, shown) for item in value]
    if isinstance(value, dict):
        return {name: _as_paths(entry, f"{key}.{name}", settings, shown) for name, entry in value.items()}
    if not isinstance(value, str):
        return value
    if shown is not None and (problem := local_paths.problem(value)) is not None:
        raise ConfigError(f"{shown}: {problem}")
    # By the text alone: as a path "./~name" would be "~name", and "s3://bucket" lose a stroke.
    return os.path.expanduser(value)


def _per_worker_micro_batches(final: dict[str, Any], values: dict[str, Any], settings: Settings) -> None:
    """Micro-batch sizes that older scripts count over all workers, divided by the workers."""
    for key, setting in settings.global_micro_batches.items():
        new = settings.tree.rules.global_micro_batches[key]
        total = coerce(values[key], settings.tree.leaves[new], setting.shown)
        if total is None:
            continue
        if new in settings.by_key and settings.by_key[new].value is not None:
            raise ConfigError(
                f"{setting.shown} and {settings.by_key[new].shown} say the same twice. Set the second only."
            )
        workers, nodes = final["trainer.n_gpus_per_node"], final["trainer.nnodes"]
        if new.startswith(f"{_REWARD_MODEL}.") and final[f"{_REWARD_MODEL}.enable_resource_pool"]:
            workers, nodes = final[f"{_REWARD_MODEL}.n_gpus_per_node"], final[f"{_REWARD_MODEL}.nnodes"]
        if workers == "auto":
            raise ConfigError(
                f"{setting.shown} counts over all workers, whose number trainer.n_gpus_per_node=auto leaves open. "
                f"Set {new}, which counts for each worker."
            )
        # Workers that share the tokens of the same samples count once.
        number = max(1, workers * nodes // final[_SEQUENCE_PARALLEL[new.rpartition(".")[0]]])
        if total % number:
            raise ConfigError(
                f"{setting.shown} counts over all workers and does not divide by their number, {number}. "
                f"Set {new}={max(1, total // number)}, which counts for each worker."
            )
        final[new] = total // number
        for leaf in settings.tree.leaves.values():
            if leaf.follows == new and leaf.path not in settings.by_key:
                final[leaf.path] = final[new]


def _set_keys(final: dict[str, Any], settings: Settings) -> dict[str, str]:
    """Keys that were set, with what was typed; what a file sets to the default is not counted."""
    keys = {}
    for key, setting in settings.by_key.items():
        leaf = settings.tree.leaves.get(key)
        while leaf is None:
            key = key.rpartition(".")[0]
            leaf = settings.tree.leaves.get(key)
        repeats_default = setting.source and final[leaf.path] == leaf.default
        if not repeats_default:
            keys[leaf.path] = setting.shown
    for_each_worker = settings.tree.rules.global_micro_batches
    keys.update({for_each_worker[key]: setting.shown for key, setting in settings.global_micro_batches.items()})
    return keys


def to_dict(config: Section) -> dict[str, Any]:
    """The keys and values of a configuration or a section, as nested dictionaries."""
    values = {field.name: get_field(config, field.name) for field in key_fields(config)}
    return {name: to_dict(value) if isinstance(value, Section) else value for name, value in values.items()}


def to_yaml(config: Section) -> str:
    """The same as YAML, which `load_config` reads again."""
    import yaml

    return yaml.safe_dump(_escaped(to_dict(config)), sort_keys=False, allow_unicode=True, width=1000)


def to_shown_yaml(config: Section) -> str:
    """`to_yaml` for files and screens: values under names of secrets are hidden."""
    import yaml

    return yaml.safe_dump(_escaped(redact(to_dict(config))), sort_keys=False, allow_unicode=True, width=1000)


def _escaped(value: Any) -> Any:
    """Text that holds ``${`` is meant literally: references were resolved long before."""
    if isinstance(value, dict):
        return {name: _escaped(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_escaped(entry) for entry in value]
    return value.replace("${", r"\${") if isinstance(value, str) else value


def value_of(config: Section, key: str) -> Any:
    """The value of the key with that dotted name."""
    value: Any = config
    for name in key.split("."):
        value = get_field(value, name)
    return value


def shown(config: PPOTrainerConfig | SFTTrainerConfig, key: str) -> str:
    """The key and its value as the user typed them, or what it follows or has by default."""
    if key in config.set_keys:
        return config.set_keys[key]
    tree = leaves(root_of(config))
    default = redact_text(f"{key}={show(value_of(config, key))}")
    source = tree[key].follows
    while source is not None:
        if source in config.set_keys:
            return f"{default} (from {config.set_keys[source]})"
        source = tree[source].follows
    of_preset = key.startswith(f"{_CORRECTION}.") and value_of(config, key) != tree[key].default
    if of_preset and f"{_CORRECTION}.preset" in config.set_keys:
        return f"{default} (from {config.set_keys[f'{_CORRECTION}.preset']})"
    return f"{default} (the default)"
