"""What the user set, key by key: names brought to the tree's, and judged by the rules before anything else happens."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from burnish.config import rules
from burnish.config.schema import Leaf
from burnish.config.trees import RL, SFT, Tree
from burnish.config.values import allowed, likeness, show
from burnish.utils.errors import ConfigError
from burnish.utils.secrets import redact_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One key with its value.

    Attributes:
        typed: the key as the user wrote it.
        key: its name in the tree, or below one of the tree's open dictionaries.
        value: as the parser or YAML gave it.
        text: the value as typed.
        source: the file it comes from; empty for the command line.
        delete: it takes back what was set before (``~key``).
        from_python: it was given as a Python object and not as text.
    """

    typed: str
    key: str
    value: Any
    text: str
    source: str = ""
    delete: bool = False
    from_python: bool = False

    @property
    def shown(self) -> str:
        """Key and value as typed, for messages; a secret is hidden."""
        assignment = f"~{self.typed}" if self.delete else redact_text(f"{self.typed}={self.text}")
        return assignment + (f" (in {self.source})" if self.source else "")


def is_of_shipped_recipe(shown: str) -> bool:
    """Whether a setting, as `Setting.shown` puts it, comes from a file of `burnish/config/recipes`."""
    found = re.search(r" \(in ([\w-]+\.yaml)\)$", shown)
    return found is not None and any((tree.recipes / found.group(1)).is_file() for tree in (RL, SFT))


def settings_of(
    key: str, value: Any, text: str | None = None, source: str = "", *, tree: Tree = RL
) -> Iterator[Setting]:
    """One setting for each key below ``key``; open dictionaries of the tree are set entry by entry."""
    tree_key = tree.rules.rename(key) if key else ""
    if isinstance(value, Mapping) and (value or tree_key in tree.sections or not key):
        for name, entry in value.items():
            yield from settings_of(f"{key}.{name}" if key else str(name), entry, source=source, tree=tree)
    else:
        yield Setting(typed=key, key=tree_key, value=value, text=show(value) if text is None else text, source=source)


@dataclass
class Settings:
    """The settings that count, after the rules.

    Attributes:
        tree: the keys that there are.
        by_key: the last setting of each key of the tree (or entry of an open dictionary).
        global_micro_batches: settings of micro-batch sizes that count over all workers.
        inert: accepted settings of keys that the tree does not have.
        other_names: that were typed, with the keys that they are names of.
    """

    tree: Tree = RL
    by_key: dict[str, Setting] = field(default_factory=dict)
    global_micro_batches: dict[str, Setting] = field(default_factory=dict)
    inert: dict[str, Setting] = field(default_factory=dict)
    other_names: dict[str, str] = field(default_factory=dict)

    def apply(self, layer: list[Setting]) -> None:
        """Puts a layer (a file, or the command line) over what was set before.

        Raises:
            ConfigError: an unknown key, a refused one, or two names of one key with different values.
        """
        in_layer: dict[str, Setting] = {}
        for setting in layer:
            if setting.delete:
                self._delete(setting)
                continue
            if setting.key.endswith("._target_"):
                # Files for verl mark their sections with the class of each.
                continue
            judged = judge(setting, self.tree)
            if judged is None:
                self.inert[setting.key] = setting
                continue
            if judged.typed != judged.key:
                self.other_names[judged.typed] = judged.key
                if is_interpolation(judged.value) and judged.key in judged.value:
                    # It follows the key itself, as in files that have both names.
                    continue
            other = in_layer.get(judged.key)
            if other is not None and other.typed != judged.typed and other.value != judged.value:
                if is_interpolation(judged.value):
                    # What it comes to is not known yet; the name with a value of its own counts.
                    continue
                if not is_interpolation(other.value):
                    raise ConfigError(
                        f"{other.shown} and {judged.shown} are two names of {judged.key} and differ. Set one of them."
                    )
            in_layer[judged.key] = judged
            if judged.key in self.tree.rules.global_micro_batches:
                self.global_micro_batches[judged.key] = judged
            else:
                self.by_key[judged.key] = judged

    def _delete(self, setting: Setting) -> None:
        if setting.key not in self.tree.sections and not is_known(setting.key, self.tree):
            raise unknown_key(setting, self.tree)
        for table in (self.by_key, self.global_micro_batches, self.inert):
            for key in [key for key in table if key == setting.key or key.startswith(f"{setting.key}.")]:
                del table[key]

    def shown(self, key: str, value: Any) -> str:
        """``key=value`` as the user typed it, or as the default that it is."""
        setting = self.by_key.get(key)
        return setting.shown if setting is not None else f"{key}={show(value)} (the default)"


def judge(setting: Setting, tree: Tree = RL) -> Setting | None:
    """The setting as the tree takes it; None where the tree has no such key and needs none.

    Raises:
        ConfigError: the key is unknown, refused, or a section that is given a plain value.
    """
    key = setting.key
    leaves, refusal = tree.leaves, rules.lookup(key, tree.rules.refused)
    if isinstance(refusal, rules.Refusal) and not refusal.allows(setting.value) and not is_interpolation(setting.value):
        harmless = f", or set {show(refusal.nearest(setting.value))}" if refusal.harmless else ""
        raise ConfigError(f"{setting.shown} is refused: {refusal.reason}. Leave it out{harmless}.")
    if key in tree.sections:
        return None if refusal is not None else _judge_section(setting, tree)
    # An entry of an open dictionary may be one that nothing here reads.
    is_open = open_dict(key, tree) is not None and key not in tree.rules.no_effect
    if key in leaves or key in tree.rules.global_micro_batches or is_open:
        # Older names have null where the key of today has another way to say "not set", and so have some older files.
        may_be_null = setting.typed != key or key in tree.rules.once_null
        unset = setting.value is None and may_be_null and key in leaves and not leaves[key].nullable
        return None if unset else setting
    if refusal is None and rules.lookup(key, tree.rules.no_effect) is None:
        raise unknown_key(setting, tree)
    return None


def _judge_section(setting: Setting, tree: Tree) -> Setting | None:
    if setting.value is None:
        if setting.key == "critic":
            return replace(setting, key="critic.enable", value=False)
        return None
    depth = setting.key.count(".") + 1
    below = dict.fromkeys(key.split(".")[depth] for key in tree.leaves if key.startswith(f"{setting.key}."))
    hint = ""
    for name in ("name", "enable"):
        if name in below and not isinstance(setting.value, list):
            hint = f" Did you mean {setting.typed}.{name}={setting.text}?"
            break
    raise ConfigError(
        f"{setting.shown}: {setting.typed} is a section, not a key.{hint} Below it are: {', '.join(below)}."
    )


def is_known(key: str, tree: Tree = RL) -> bool:
    """Whether ``key``, by its name of today, is in the tree, below one of its open dictionaries, or in the rules."""
    its = tree.rules
    in_rules = any(rules.lookup(key, table) is not None for table in (its.no_effect, its.refused))
    return in_rules or key in tree.leaves or key in its.global_micro_batches or open_dict(key, tree) is not None


def is_interpolation(value: Any) -> bool:
    """Whether a value is still to be looked up (``${...}``)."""
    return isinstance(value, str) and "${" in value


def open_dict(key: str, tree: Tree = RL) -> Leaf | None:
    """The key of the tree whose dictionary ``key`` is an entry of, such as ``ray_kwargs.ray_init``."""
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        leaf = tree.leaves.get(".".join(parts[:length]))
        if leaf is not None:
            return leaf if leaf.accepts(dict) else None
    return None


def unknown_key(setting: Setting, tree: Tree = RL) -> ConfigError:
    """The error for a key that nobody knows, with the keys that were probably meant."""
    message = f"{setting.shown}: there is no key {setting.typed}."
    parent = setting.key.rpartition(".")[0]
    if parent in tree.leaves:
        return ConfigError(
            f"{setting.shown}: {parent} is a key with one value, and has none below it. {allowed(tree.leaves[parent])}"
        )
    owner = next((other for other in (RL, SFT) if setting.typed in other.leaves), None)
    if owner is not None:
        return ConfigError(f"{message} It is one of {owner.command}.")
    if setting.typed == "recipe" and setting.source:
        return ConfigError(
            f"{setting.shown}: a file starts from a recipe by its list of defaults, as defaults: [{setting.text}, _self_]."
        )
    suggestions = suggest(setting.typed, tree)
    if suggestions:
        message += f" Did you mean {' or '.join(suggestions)}?"
    elif setting.key.partition(".")[0] not in tree.sections:
        message += f" Keys begin with {', '.join(name for name in tree.sections if '.' not in name)}."
    else:
        message += f" {tree.page} lists all keys."
    for section, whose, home in tree.own_keys:
        # A neighbour that looks like it is what was meant.
        if setting.key.startswith(section) and parent not in [key.rpartition(".")[0] for key in suggestions]:
            message += f" Keys of your own {whose} go below {home}."
    return ConfigError(message)


_LEAST_LIKENESS = 0.65
"""Of a word to be what another was meant to be."""


def suggest(typed: str, tree: Tree = RL) -> list[str]:
    """Up to three known keys that look like ``typed``; the last word counts most, as sections are often left out."""
    meant = [key for key in rules.BARE_NAMES.get(typed, ()) if key in tree.leaves]
    if meant:
        return meant
    section, _, last = typed.rpartition(".")
    scores = {}
    for key in dict.fromkeys([*tree.leaves, *tree.rules.known_names()]):
        its_section, _, word = key.rpartition(".")
        by_word = _word_likeness(last, word)
        if by_word >= _LEAST_LIKENESS:
            scores[key] = 0.7 * by_word + 0.3 * likeness(typed, key)
            # A neighbour is likelier; a key that has no effect here, or is refused, is less so.
            scores[key] += 0.05 * (section == its_section) - 0.1 * (key not in tree.leaves or key in tree.rules.refused)
    best = sorted(scores, key=lambda key: scores[key], reverse=True)[:3]
    return [key for key in best if scores[key] > 0.6 and scores[key] > scores[best[0]] - 0.04]


@lru_cache(maxsize=4096)
def _word_likeness(typed: str, known: str) -> float:
    """As `likeness`; a word whose parts all begin parts of the other, or that the other abbreviates, is near too."""
    parts, known_parts = typed.lower().split("_"), known.split("_")
    is_within = all(
        any(other == part or (len(part) > 2 and other.startswith(part)) for other in known_parts) for part in parts
    )
    is_spelt_out = len(parts) > 1 and "".join(part[:1] for part in parts) == known
    return max(likeness(typed, known, _LEAST_LIKENESS), 0.85 if is_within or is_spelt_out else 0.0)


def notices(settings: Settings) -> list[str]:
    """What the user is told about keys that go by other names or have no effect, one sentence for each reason."""
    told = []
    kept = settings.by_key.values()
    renamed = [f"{s.typed} is {s.key}" for s in kept if s.typed not in (s.key, "critic") and s.value is not None]
    if renamed:
        told.append(f"Renamed keys, applied: {', '.join(renamed)}.")
    by_reason: dict[str, list[str]] = {}
    for setting in [*settings.inert.values(), *kept]:
        reason, leaf = rules.lookup(setting.key, settings.tree.rules.no_effect), settings.tree.leaves.get(setting.key)
        is_default = leaf is not None and setting.value == leaf.default
        if isinstance(reason, str) and not is_default:
            by_reason.setdefault(reason, []).append(f"{setting.typed}={setting.text}")
    told += [f"No effect here: {', '.join(keys)}. The reason: {reason}." for reason, keys in by_reason.items()]
    return told
