"""Which keys a run reads, so that a key that was set and read by nothing is told at its end.

`track` gives each section of a configuration a class that notes its reads; code that uses the configuration sees no
difference. Reads by this package and by `dataclasses` (copies, comparisons) do not count.
"""

import dataclasses
import sys
from collections.abc import Iterable
from typing import Any, TypeVar

from burnish.config import rules
from burnish.config.idle import idle_keys
from burnish.config.schema import get_field, key_fields, walk
from burnish.config.section import Section
from burnish.config.settings import is_of_shipped_recipe
from burnish.config.sft import SFTTrainerConfig
from burnish.config.sft_checks import sft_idle_keys
from burnish.config.trainer import PPOTrainerConfig
from burnish.config.trees import tree_of

_not_counted = ("burnish.config", "dataclasses", "copy", "copyreg")
# Keys that this package acts on itself; what else reads them reads what they lead to.
_OBEYED_HERE = {
    "actor_rollout_ref.actor.allow_wide_clip",
    "algorithm.rollout_correction.bypass_mode",
    "algorithm.rollout_correction.preset",
}
_reads: set[str] = set()

C = TypeVar("C", bound=Section)


def track(config: C) -> C:
    """Starts to note which keys of ``config`` this process reads, afresh; returns the same object."""
    _reads.clear()
    track_section(config, "")
    return config


def track_section(root: Section, path: str) -> None:
    """Notes the reads of one section of the tree, as a worker process gets it; ``path`` is where it belongs."""
    for prefix, section in list(walk(root)):
        if not hasattr(type(section), "untracked_class"):
            full = ".".join(part for part in (path, prefix) if part)
            section.__class__ = _tracked(type(section), full)  # type: ignore[assignment]
        for field in dataclasses.fields(section):  # type: ignore[arg-type]
            elsewhere = field.metadata.get("same_as")
            if elsewhere and isinstance(get_field(section, field.name), Section):
                track_section(get_field(section, field.name), elsewhere)


def mark_read(keys: Iterable[str]) -> None:
    """Counts keys as read here that another process read, or that are honoured without being read."""
    _reads.update(keys)


def reads() -> frozenset[str]:
    """The keys that were read in this process since `track`, to be handed to `mark_read` of another."""
    return frozenset(_reads)


def unread(config: PPOTrainerConfig | SFTTrainerConfig) -> list[str]:
    """Keys that the user set and that nothing has read, under their names in the tree.

    Keys that were said to have no effect, here or beside the other keys, and those of a critic that does not exist, are
    left out: that was told.
    """
    # What a recipe of ours sets and this run has no use for is nobody's mistake.
    recipes = {key for key, shown in config.set_keys.items() if is_of_shipped_recipe(shown)}
    tree = tree_of(config)
    told = {key for key in config.set_keys if rules.lookup(key, tree.rules.no_effect) is not None}
    if isinstance(config, SFTTrainerConfig):
        told |= set(sft_idle_keys(config))
    else:
        told |= set(idle_keys(config))
        if not config.critic.enable:
            told |= {key for key in config.set_keys if key.startswith("critic.")}
    # What is followed is read through the keys that follow it.
    through = {leaf.follows for leaf in tree.leaves.values() if leaf.path in _reads}
    return sorted(set(config.set_keys) - recipes - told - _OBEYED_HERE - _reads - through)


def _tracked(cls: type[Section], prefix: str) -> type[Section]:
    """A class like ``cls`` for the section called ``prefix``, of the same layout: an object can change to it."""
    fields = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    names = {field.name: f"{prefix}.{field.name}".lstrip(".") for field in key_fields(cls)}

    def __getattribute__(self: Section, name: str) -> Any:
        if name in names and not sys._getframe(1).f_globals.get("__name__", "").startswith(_not_counted):
            _reads.add(names[name])
        return object.__getattribute__(self, name)

    def __reduce_ex__(self: Section, protocol: Any) -> Any:
        # Another process gets the plain class: what is read there is noted there.
        return _restore, (cls, {name: object.__getattribute__(self, name) for name in fields})

    members = {
        "__slots__": (),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__getattribute__": __getattribute__,
        "__reduce_ex__": __reduce_ex__,
        "untracked_class": cls,
    }
    return type(cls.__name__, (cls,), members)


def _restore(cls: type[Section], values: dict[str, Any]) -> Section:
    return cls(**values)
