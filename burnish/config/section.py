"""What a configuration dataclass is made of: `Section`, and `key` to declare a field with its rules."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar


class Section:
    """Base of every configuration dataclass; a field that is itself a `Section` is a sub-tree of keys."""

    __slots__ = ()

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key, ``default`` where there is none of that name: for code of a user's own that takes the section for
        a dictionary."""
        return getattr(self, name, default)


S = TypeVar("S", bound=Section)


def key(
    default: Any,
    *,
    follows: str | None = None,
    choices: Sequence[str] | None = None,
    planned: Sequence[str] = (),
    impossible: Mapping[str, str] | None = None,
    plug_in: bool = False,
    blank: bool = False,
    is_path: bool = False,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """Declares one configuration key.

    Args:
        default: the value when nobody sets it; lists and dicts are copied for each instance.
        follows: the key whose value is taken when this one is null: absolute or a sibling (".clip_ratio"). After
            `load_config` such a field is null only where what it follows is null.
        choices: the names that are allowed.
        planned: names that mean something but do not exist in burnish yet; they are refused with that word.
        impossible: names that mean something in the field and will not exist in burnish, with the reason.
        plug_in: whether ``package.module:attribute`` is allowed besides the choices.
        blank: whether an empty text is a value, or white space alone an item of a list of text.
        is_path: whether text names a file or a folder, unless it is a name of the hub or a URL: ``~`` in it is replaced.
        ge, gt, le, lt: bounds of a number, or of every number of a list.
    """
    rules = {
        "follows": follows,
        "choices": tuple(choices) if choices is not None else None,
        "planned": tuple(planned),
        "impossible": dict(impossible or {}),
        "plug_in": plug_in,
        "blank": blank,
        "is_path": is_path,
        "bounds": {
            name: bound for name, bound in (("ge", ge), ("gt", gt), ("le", le), ("lt", lt)) if bound is not None
        },
    }
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=rules)
    return dataclasses.field(default=default, metadata=rules)


def section(cls: type[S], **defaults: Any) -> S:
    """Declares a sub-section; ``defaults`` replace those of ``cls`` at this place of the tree."""
    return dataclasses.field(default_factory=lambda: cls(**defaults))  # type: ignore[return-value]


def not_a_key(default_factory: Any, *, same_as: str | None = None) -> Any:
    """Declares a field that is no configuration key: it is neither set, printed nor saved.

    Args:
        default_factory: makes the value.
        same_as: the section of the tree that the field refers to, where it does.
    """
    metadata = {"not_a_key": True, "same_as": same_as}
    return dataclasses.field(default_factory=default_factory, repr=False, compare=False, metadata=metadata)
