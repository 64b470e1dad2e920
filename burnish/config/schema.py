"""The tree of keys, read off the dataclasses: every key with its type, default and rules."""

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from burnish.config.section import Section
from burnish.config.trainer import PPOTrainerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One key.

    Attributes:
        root: the class of the tree that it is in.
        path: its dotted name.
        types: the types a value may have (a ``list[...]`` or ``dict[...]`` counts as ``list`` or ``dict``).
        item_type: the type of a list's items.
        nullable: whether null is a value.
        default: the value when nobody sets it.
        follows: the absolute name of the key that gives the value when this one is null.
        choices, planned, impossible, plug_in, blank, is_path, bounds: see `burnish.config.section.key`.
    """

    root: Any
    path: str
    types: tuple[type, ...]
    item_type: type
    nullable: bool
    default: Any
    follows: str | None
    choices: tuple[str, ...] | None
    planned: tuple[str, ...]
    impossible: dict[str, str]
    plug_in: bool
    blank: bool
    is_path: bool
    bounds: dict[str, float]

    def accepts(self, kind: type) -> bool:
        """Whether a value of type ``kind`` is allowed."""
        return kind in self.types


def key_fields(section: Section | type[Section]) -> Iterator[dataclasses.Field]:
    """The fields of a section that are keys or sub-sections."""
    # Every section is a dataclass, which the type of the base class does not say.
    return (field for field in dataclasses.fields(section) if not field.metadata.get("not_a_key"))  # type: ignore[arg-type]


def walk(section: Section, prefix: str = "") -> Iterator[tuple[str, Section]]:
    """Every section of a tree with its dotted name, parents first; the root's name is empty."""
    yield prefix, section
    for field in key_fields(section):
        value = get_field(section, field.name)
        if isinstance(value, Section):
            yield from walk(value, f"{prefix}.{field.name}" if prefix else field.name)


def get_field(section: Section, name: str) -> Any:
    """A field's value, read without `burnish.config.usage` counting it."""
    return object.__getattribute__(section, name)


@functools.cache
def leaves(root: Any = PPOTrainerConfig) -> dict[str, Leaf]:
    """Every key of the tree below ``root``, in the tree's order."""
    return {leaf.path: leaf for prefix, section in walk(root()) for leaf in _leaves_of(section, prefix, root)}


@functools.cache
def sections(root: Any = PPOTrainerConfig) -> dict[str, type[Section]]:
    """Every section by its dotted name, without the root."""
    return {prefix: type(section) for prefix, section in walk(root()) if prefix}


def root_of(config: Section) -> Any:
    """The class of a whole configuration, also of one whose reads are noted (`burnish.config.usage`)."""
    return getattr(type(config), "untracked_class", type(config))


def _leaves_of(section: Section, prefix: str, root: type[Section]) -> Iterator[Leaf]:
    hints = typing.get_type_hints(type(section))
    for field in key_fields(section):
        default = get_field(section, field.name)
        if isinstance(default, Section):
            continue
        kinds, item_type, optional = _read_type(hints[field.name])
        rules = dict(field.metadata)
        follows = rules.pop("follows")
        if follows and follows.startswith("."):
            follows = prefix + follows
        path = f"{prefix}.{field.name}" if prefix else field.name
        yield Leaf(
            root=root,
            path=path,
            types=kinds,
            item_type=item_type,
            nullable=optional or default is None,
            default=default,
            follows=follows,
            **rules,
        )


def _read_type(hint: Any) -> tuple[tuple[type, ...], type, bool]:
    """A field's annotation as (types, type of list items, whether None is one of them)."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = [member for member in members if member is not types.NoneType]
    item_type: type = str
    for kind in kinds:
        if typing.get_origin(kind) is list:
            item_type = typing.get_args(kind)[0]
    plain = tuple(typing.get_origin(kind) or kind for kind in kinds)
    return plain, item_type, types.NoneType in members
