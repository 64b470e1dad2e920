"""`load_config`: overrides and YAML files -> validated dataclasses. Hydra has its home here and in `burnish.config.overrides`."""

import copy
import inspect
import logging
import numbers
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from burnish.config.advice import advice
from burnish.config.build import build
from burnish.config.checks import check
from burnish.config.origin import origins, values_of
from burnish.config.overrides import parse, to_settings
from burnish.config.references import followed, look_up
from burnish.config.settings import Setting, Settings, notices, open_dict, settings_of
from burnish.config.settle import apply_preset
from burnish.config.sft import SFTTrainerConfig
from burnish.config.sft_checks import check_sft, sft_notices
from burnish.config.trainer import PPOTrainerConfig
from burnish.config.trees import RL, SFT, Tree
from burnish.config.values import is_null, near
from burnish.utils import local_paths
from burnish.utils.errors import ConfigError

logger = logging.getLogger("burnish.config")

RECIPES = RL.recipes
GROUPS = Path(__file__).parent / "groups"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedConfig:
    """A configuration with what there is to say about it.

    Attributes:
        config: every key has its value; what follows another key is filled in.
        notices: sentences for the user: renamed keys, keys without effect, combinations that deserve a thought.
    """

    config: PPOTrainerConfig
    notices: tuple[str, ...]


def load_config(
    overrides: Sequence[str | Mapping[str, Any]] | Mapping[str, Any] = (),
    config_name: str | None = None,
    config_path: str | None = None,
    *,
    train_rows_given: bool = False,
) -> PPOTrainerConfig:
    """The configuration of a run, checked; notices go to the logger ``burnish.config``.

    Args:
        overrides: ``key=value`` in Hydra's grammar, (nested) mappings from keys to values, or a list of both; the later
            counts.
        config_name: a YAML file of ``config_path`` or of burnish's recipes, without ``.yaml``.
        config_path: a folder of YAML files of your own.
        train_rows_given: the training rows come as Python objects, so `data.train_files` may be empty.

    Raises:
        ConfigError: a key, a value or a combination is wrong; the message says what would be right.
    """
    loaded = load_with_notices(overrides, config_name, config_path, train_rows_given=train_rows_given)
    for notice in loaded.notices:
        logger.warning("%s", notice)
    return loaded.config


def load_with_notices(
    overrides: Sequence[str | Mapping[str, Any]] | Mapping[str, Any] = (),
    config_name: str | None = None,
    config_path: str | None = None,
    *,
    train_rows_given: bool = False,
) -> LoadedConfig:
    """As `load_config`, with the notices returned instead of logged."""
    settings = _settings(RL, overrides, config_name, config_path)
    config = build(_resolve(settings), settings)
    as_set = values_of(config)
    apply_preset(config, settings)
    check(config, train_rows_given=train_rows_given)
    config.origins = origins(config, settings, as_set)
    return LoadedConfig(config=config, notices=(*notices(settings), *advice(config, settings)))


def load_sft_config(
    overrides: Sequence[str | Mapping[str, Any]] | Mapping[str, Any] = (),
    config_name: str | None = None,
    config_path: str | None = None,
    *,
    train_rows_given: bool = False,
) -> SFTTrainerConfig:
    """As `load_config`, of a run of supervised fine-tuning."""
    config, told = load_sft_with_notices(overrides, config_name, config_path, train_rows_given=train_rows_given)
    for notice in told:
        logger.warning("%s", notice)
    return config


def load_sft_with_notices(
    overrides: Sequence[str | Mapping[str, Any]] | Mapping[str, Any] = (),
    config_name: str | None = None,
    config_path: str | None = None,
    *,
    train_rows_given: bool = False,
) -> tuple[SFTTrainerConfig, tuple[str, ...]]:
    """As `load_sft_config`, with the notices returned instead of logged."""
    settings = _settings(SFT, overrides, config_name, config_path)
    config = cast(SFTTrainerConfig, build(_resolve(settings), settings))
    as_set = values_of(config)
    check_sft(config, train_rows_given=train_rows_given)
    config.origins = origins(config, settings, as_set)
    return config, (*notices(settings), *sft_notices(config))


def _settings(
    tree: Tree,
    overrides: Sequence[str | Mapping[str, Any]] | Mapping[str, Any],
    config_name: str | None,
    config_path: str | None,
) -> Settings:
    """What is set, from the recipe to the last word of the command line."""
    if config_name is not None and config_path is None and os.path.dirname(config_name):
        config_path, config_name = os.path.split(config_name)
    folders = [folder for folder in (_folder(config_path), tree.recipes, GROUPS) if folder is not None]
    recipes: list[str] = []
    groups: list[str] = []
    command_line: list[Setting] = []
    for item in [overrides] if isinstance(overrides, Mapping) else overrides:
        if isinstance(item, Mapping):
            values = {str(name): _plain(str(name), value) for name, value in item.items()}
            if "recipe" in values:
                _add_recipe(values.pop("recipe"), recipes)
            chosen = {name: value for name, value in values.items() if _is_group_file(name, value, folders)}
            groups += [f"{name}={value}" for name, value in chosen.items()]
            plain = {name: value for name, value in values.items() if name not in chosen}
            command_line += [replace(setting, from_python=True) for setting in settings_of("", plain, tree=tree)]
            continue
        override = parse(item, tree)
        if isinstance(override, Override) and override.key_or_group == "recipe":
            _add_recipe(override.value(), recipes)
        elif isinstance(override, Override) and _is_group(override, folders):
            groups.append(item.lstrip("+"))
        else:
            command_line += to_settings(item, override, tree)
    # Without a folder of the user's own, what is named is a recipe too.
    if recipes and config_path is None and config_name not in (None, tree.base_name, *recipes):
        raise _two_recipes(f"recipe={recipes[0]}", f"--config-name={config_name}")
    groups = _one_file_each(groups)
    settings = Settings(tree)
    for recipe in recipes:
        settings.apply(_compose(recipe, [], folders, kind="recipe", tree=tree))
    if config_name is not None or groups:
        settings.apply(_compose(config_name or tree.base_name, groups, folders, kind="--config-name", tree=tree))
    elif config_path is not None:
        raise _no_name(config_path)
    settings.apply(command_line)
    return settings


def _add_recipe(value: Any, recipes: list[str]) -> None:
    """Takes one more recipe into ``recipes``, which holds one at most; null takes back what was chosen.

    Raises:
        ConfigError: it is another one: a run starts from one.
    """
    if value is None:
        recipes.clear()
        return
    names = value if isinstance(value, list) else [value]
    recipes[:] = dict.fromkeys([*recipes, *map(str, names)])
    if len(recipes) > 1:
        raise _two_recipes(*(f"recipe={name}" for name in recipes))


def _two_recipes(*named: str) -> ConfigError:
    return ConfigError(
        f"{' and '.join(named)}: a run starts from one recipe, and recipes do not add up. Name one, and set what you want of "
        f"the other key by key; --cfg job prints what a recipe amounts to."
    )


def _one_file_each(groups: Iterable[str]) -> list[str]:
    """The choices of group files without repetition.

    Raises:
        ConfigError: two files of one group are chosen.
    """
    chosen: dict[str, str] = {}
    for choice in groups:
        group = choice.partition("=")[0]
        if chosen.setdefault(group, choice) != choice:
            raise ConfigError(f"{chosen[group]} and {choice} choose two files of one group. Name one.")
    return list(chosen.values())


def _plain(key: str, value: Any) -> Any:
    """A value given in Python as YAML would have it: paths are text, numbers of NumPy are numbers, tuples are lists, and
    functions and classes are named as ``package.module:attribute``.

    Raises:
        ConfigError: YAML has no such thing.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(f"{key}.{name}", entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(key, entry) for entry in value]
    if inspect.isfunction(value) or inspect.isclass(value):
        if "." in value.__qualname__ or "<" in value.__qualname__:
            raise ConfigError(
                f"{key}={value.__qualname__}: what a configuration names must be found by package.module:attribute, so "
                f"define it at the top of a module."
            )
        return f"{value.__module__}:{value.__name__}"
    raise ConfigError(f"{key}={value!r}: {type(value).__name__} is no value of a configuration.")


def _folder(config_path: str | None) -> Path | None:
    if config_path is None:
        return None
    folder = local_paths.expanded(config_path).absolute()
    if not local_paths.is_dir(folder):
        raise ConfigError(
            f"--config-path={config_path}: there is no folder {folder}. It names a folder of your own; what burnish has itself "
            f"needs none, as --config-name=ppo_trainer."
        )
    return folder.resolve()


def _is_group(override: Override, folders: Sequence[Path]) -> bool:
    """Whether the override chooses a YAML file of a config group instead of setting a key."""
    group = override.get_key_element().split("@")[0].lstrip("+~")
    return not override.is_delete() and _is_group_file(group, override.value(), folders)


def _is_group_file(group: str, value: Any, folders: Sequence[Path]) -> bool:
    homes = [folder / group for folder in folders if local_paths.is_dir(folder / group)]
    if not homes or not isinstance(value, str):
        return False
    _existing_name(value, homes, group)
    return True


def _existing_name(name: str, homes: Sequence[Path], kind: str) -> None:
    names = sorted({file.stem for home in homes for file in home.glob("*.yaml")})
    if not any(local_paths.is_file(home / f"{name}.yaml") for home in homes):
        close = near(name, names)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{kind}={name}: there is no such file.{hint} There is: {', '.join(names)}.")


def _no_name(config_path: str) -> ConfigError:
    names = sorted(file.stem for file in local_paths.expanded(config_path).glob("*.yaml"))
    return ConfigError(
        f"--config-path={config_path} needs --config-name. There is: {', '.join(names) or 'no YAML file'}."
    )


def _compose(name: str, groups: list[str], folders: Sequence[Path], kind: str, tree: Tree) -> list[Setting]:
    """The settings of a YAML file with its defaults list and the chosen group files."""
    name = name.removesuffix(".yaml")
    _existing_name(name, folders, kind)
    home = next(folder for folder in folders if (folder / f"{name}.yaml").is_file())
    others = ",".join(_quoted(f"file://{folder}") for folder in folders if folder != home)
    search = f"hydra.searchpath=[{others}]"
    with initialize_config_dir(str(home), version_base="1.3"):
        try:
            try:
                composed = compose(name, [search, *groups])
            except HydraException as error:
                if "Could not override" not in str(error):
                    raise
                # A group that the file's defaults list does not name is put on top of the file.
                composed = compose(name, [search, *(f"+{group}" for group in groups)])
        # Hydra lets some errors of the file through as they are: bytes that are no UTF-8, a list of defaults that is none.
        except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:
            raise ConfigError(f"{kind}={name}: the file cannot be composed: {_reason(error)}.") from error
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{kind}={name}: the file is not valid YAML: {reason}.") from error
    values = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(values, dict)
    settings = settings_of("", values, source=" + ".join([f"{name}.yaml", *groups]), tree=tree)
    chosen = [group.partition("=") for group in groups]
    places = [(group, folder / group / f"{choice}.yaml") for group, _, choice in chosen for folder in reversed(folders)]
    return _as_written(settings, [("", home / f"{name}.yaml"), *places])


def _reason(error: BaseException) -> str:
    """The first line that an error or its cause says, without a full stop."""
    said = (str(error) or str(error.__cause__ or "") or type(error).__name__).strip().splitlines()
    return said[0].rstrip(".")


def _as_written(settings: Iterable[Setting], files: Iterable[tuple[str, Path]]) -> list[Setting]:
    """Settings with the text that the files have: a key that takes text means 2024_01, 007 or on, of which YAML makes a number
    or a truth value.

    Args:
        files: the section that their keys are below, and where each may be; the last one counts.
    """
    written: dict[str, str] = {}
    for section, file in files:
        if file.is_file():
            written |= _plain_scalars(yaml.compose(file.read_text("utf-8-sig"), Loader=yaml.SafeLoader), section)

    def read_as(text: str) -> Any:
        return OmegaConf.to_container(OmegaConf.create(f"- {text}"))[0]  # type: ignore[index]

    found = []
    for setting in settings:
        text = written.get(setting.typed)
        is_it = text is not None and isinstance(setting.value, bool | int | float) and read_as(text) == setting.value
        found.append(replace(setting, text=text) if is_it and text is not None else setting)
    return found


def _plain_scalars(node: yaml.Node | None, prefix: str) -> dict[str, str]:
    """What stands without quotes below a node, by its dotted name."""
    found: dict[str, str] = {}
    if isinstance(node, yaml.ScalarNode) and node.style is None:
        found[prefix] = node.value
    elif isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            found |= _plain_scalars(value, f"{prefix}.{name.value}" if prefix else str(name.value))
    return found


def _quoted(text: str) -> str:
    """Text in quotes of Hydra's grammar, where a backslash is itself except before a quote."""
    return '"' + re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), text) + '"'


def _resolve(settings: Settings) -> dict[str, Any]:
    """One value for each key of the tree: set, followed, or the default; ``${...}`` is looked up. And those of the micro-batch
    sizes that count over all workers.

    Raises:
        ConfigError: a reference to a key or environment variable that does not exist.
    """
    tree: dict[str, Any] = {}
    leaves, sections = settings.tree.leaves, settings.tree.sections
    for setting in settings.by_key.values():
        if setting.value == "???":
            raise ConfigError(
                f"{setting.shown}: ??? stands for a value that is still to be given. Set {setting.typed}."
            )
    for path, leaf in leaves.items():
        _insert(tree, path, copy.deepcopy(leaf.default))
    for key, setting in {**settings.inert, **settings.by_key}.items():
        # What has no effect may be referred to, and is no entry of an open dictionary.
        of_none = key not in leaves and key not in sections and open_dict(key, settings.tree) is None
        if key in settings.by_key or of_none:
            _insert(tree, key, copy.deepcopy(setting.value))
    for path, leaf in leaves.items():
        if leaf.follows is not None and is_null(look_up(tree, path), leaf):
            _insert(tree, path, f"${{{leaf.follows}}}")
    for key, setting in settings.global_micro_batches.items():
        _insert(tree, key, setting.value)
    for name, key in settings.other_names.items():
        if key in leaves and name not in sections:
            # References may be to the name that was typed.
            _insert(tree, name, f"${{{key}}}")
    values: dict[str, Any] = {}
    # Nobody looks at keys without effect below: what they say amiss is said by making all of it.
    unread = any("${" in str(setting.value) for setting in settings.inert.values())
    root = _omegaconf(tree, settings) if unread else None
    for path in (*leaves, *settings.global_micro_batches):
        values[path] = look_up(tree, path)
        if "${" not in str(values[path]):
            continue
        if (plain := followed(tree, path)) is not None:
            values[path] = plain[0]
            continue
        root = _omegaconf(tree, settings) if root is None else root
        try:
            value = OmegaConf.select(root, path, throw_on_resolution_failure=True)
            values[path] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except (OmegaConfBaseException, ValueError) as error:
            source, set_here = path, {**settings.global_micro_batches, **settings.by_key}
            while source not in set_here and leaves[source].follows is not None:
                source = str(leaves[source].follows)
            shown = set_here[source].shown if source in set_here else path
            raise ConfigError(f"{shown}: the reference cannot be looked up. {str(error).splitlines()[0]}.") from error
    return values


def _unreadable(error: OmegaConfBaseException, settings: Settings) -> ConfigError:
    """For a value that begins a reference, as ``${``, and does not end it."""
    # Of an item of a list, the list.
    key = str(error.full_key).partition("[")[0]
    set_here = {**settings.inert, **settings.by_key}
    shown = set_here[key].shown if key in set_here else key
    return ConfigError(
        f"{shown}: ${{ begins a reference to another key, and this is none. A reference is written ${{trainer.seed}}; text "
        f"that holds ${{ is written with a backslash before it: \\${{."
    )


def _omegaconf(tree: dict[str, Any], settings: Settings) -> DictConfig:
    try:
        return OmegaConf.create(tree)
    except OmegaConfBaseException as error:
        raise _unreadable(error, settings) from error


def _insert(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        child = tree.get(name)
        if not isinstance(child, dict):
            child = tree[name] = {}
        tree = child
    tree[last] = value
