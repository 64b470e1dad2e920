"""From what the user typed to a value of the key's type, or an error that says what would be right."""

import difflib
import math
import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from burnish.config.schema import Leaf, leaves
from burnish.utils import local_paths
from burnish.utils.errors import ConfigError

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}
_NULL = {"none", "null", "~"}
_BOUNDS = {
    "ge": ("at least", operator.ge),
    "gt": ("above", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("below", operator.lt),
}
_KIND_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a dict",
}


def coerce(value: Any, leaf: Leaf, shown: str, text: str | None = None) -> Any:
    """``value`` as the type of the key ``leaf``, checked against its choices and bounds.

    Args:
        value: as the parser or YAML gave it.
        leaf: the key.
        shown: the key and value as typed, for messages.
        text: the value as typed; a key that takes text takes it unparsed (``experiment_name=1e3``).

    Raises:
        ConfigError: names the key and value as typed, the rule and the nearest legal value.
    """
    if is_null(value, leaf):
        if leaf.accepts(list) and not leaf.nullable:
            return []
        if not leaf.nullable:
            raise ConfigError(f"{shown}: the key cannot be null. {allowed(leaf)}")
        return None
    value = _to_type(value, leaf, shown, text)
    _check_empty(value, leaf, shown)
    for item in value if isinstance(value, list) else [value]:
        _check_choice(item, leaf, shown)
        _check_bounds(item, leaf, shown)
    return value


def is_null(value: Any, leaf: Leaf) -> bool:
    """Whether ``value`` is null, or a word for it where the key takes one."""
    return value is None or (isinstance(value, str) and value.lower() in _NULL and _takes_null_word(value, leaf))


def is_text(leaf: Leaf) -> bool:
    """Whether the key takes free text, such as a path, or a list of it."""
    return leaf.choices is None and (leaf.accepts(str) or (leaf.accepts(list) and leaf.item_type is str))


def near(name: str, names: Iterable[str]) -> list[str]:
    """The one of ``names`` that looks most like ``name``, if any does."""
    best = max(names, key=lambda candidate: likeness(name, candidate), default="")
    return [best] if likeness(name, best) >= 0.6 else []


def likeness(one: str, other: str, least: float = 0.0) -> float:
    """From 0 to 1, whatever the case and dashes; 0 where that is less than ``least``, which is faster to see."""
    first, second = (word.lower().replace("-", "_") for word in (one, other))
    matcher = difflib.SequenceMatcher(None, first, second)
    if matcher.real_quick_ratio() < least or matcher.quick_ratio() < least:
        return 0.0
    ratio = matcher.ratio()
    return ratio if ratio >= least else 0.0


def divisors(number: int) -> list[int]:
    """Those of a number of prompts or workers, in order; beyond a square of a million not all of them."""
    small = [size for size in range(1, min(math.isqrt(number), 1_000_000) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def show(value: Any) -> str:
    """A value as one would type it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(show(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{show(entry)}" for name, entry in value.items()) + "}"
    return str(value)


def _takes_null_word(value: str, leaf: Leaf) -> bool:
    return not (leaf.choices and value in leaf.choices) and (leaf.nullable or not leaf.accepts(str))


def _to_type(value: Any, leaf: Leaf, shown: str, text: str | None) -> Any:
    # `int | str` is a number or a word: numbers first, so that "4" in quotes is 4; so with `bool | str`.
    for kind in sorted(leaf.types, key=lambda kind: kind is str):
        # Two bounds, as 0.5_2, which Python and YAML read as 0.52.
        if kind is float and leaf.accepts(str) and "_" in (value if isinstance(value, str) else text or ""):
            continue
        converted = _convert(value, kind, leaf, text)
        if converted is not None:
            return converted
    kinds = leaf.types
    if isinstance(value, list | tuple) and leaf.accepts(list):
        value = next(item for item in value if _convert(item, leaf.item_type, leaf) is None)
        shown, kinds = f"{shown}: item {show(value)}", (leaf.item_type,)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{shown}: the value must be finite. {allowed(leaf)}")
    if isinstance(value, str) and value in leaf.impossible:
        raise ConfigError(f"{shown} is refused: {leaf.impossible[value]}. {allowed(leaf)}")
    given, wanted = _KIND_NAMES.get(type(value), "this"), " or ".join(_KIND_NAMES[kind] for kind in kinds)
    raise ConfigError(f"{shown}: {given} is given where {wanted} belongs. {allowed(leaf)}")


def _convert(value: Any, kind: type, leaf: Leaf, text: str | None = None) -> Any:
    """``value`` as a ``kind``, or None where it is none."""
    if kind is bool:
        word = str(value).lower() if isinstance(value, bool | int | str) else ""
        return True if word in _TRUE else False if word in _FALSE else None
    if kind in (int, float):
        return _to_number(value, kind)
    if kind is str:
        if isinstance(value, str):
            return value
        return text if text is not None else show(value) if isinstance(value, bool | int | float) else None
    if kind is dict:
        return {str(name): entry for name, entry in value.items()} if isinstance(value, dict) else None
    return _to_list(value, leaf, text)


def _to_number(value: Any, kind: type) -> Any:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            value = float(value) if not value.strip().lstrip("+-").isdigit() else int(value)
        except ValueError:
            return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if kind is float:
        return float(value)
    return int(value) if value == int(value) else None


def _to_list(value: Any, leaf: Leaf, text: str | None) -> list[Any] | None:
    if isinstance(value, str) and value.strip().startswith("["):
        # A list inside quotes, as scripts write it: "['a.parquet', 'b.parquet']".
        inner = value.strip().removeprefix("[").removesuffix("]")
        value = [item.strip().strip("'\"") for item in inner.split(",") if item.strip()]
    # The text is that of the whole value: an object whose keys were set one by one has none.
    text = text if isinstance(value, bool | int | float) else None
    items = [(item, None) for item in value] if isinstance(value, list | tuple) else [(value, text)]
    converted = [_convert(item, leaf.item_type, leaf, its_text) for item, its_text in items]
    return None if any(item is None for item in converted) else converted


def _check_empty(value: Any, leaf: Leaf, shown: str) -> None:
    """Text and lists of text, such as files, are not empty, nor white space where that means nothing."""
    if isinstance(value, str) and is_text(leaf) and not leaf.blank and not value.strip():
        raise ConfigError(f"{shown}: the value is empty. Is a variable of the shell empty? {allowed(leaf)}")
    if not isinstance(value, list) or not is_text(leaf):
        return
    if any(isinstance(item, str) and not (item if leaf.blank else item.strip()) for item in value):
        raise ConfigError(f"{shown}: an empty text is no item of this list. {allowed(leaf)}")


def _check_choice(item: Any, leaf: Leaf, shown: str) -> None:
    if leaf.choices is None or not isinstance(item, str) or item in leaf.choices:
        return
    if leaf.plug_in and ":" in item:
        return
    own = " Your own is named as package.module:attribute." if leaf.plug_in else ""
    if item in leaf.planned:
        raise ConfigError(f"{shown}: {item} does not exist in burnish yet. There is: {', '.join(leaf.choices)}.{own}")
    if item in leaf.impossible:
        raise ConfigError(f"{shown} is refused: {leaf.impossible[item]}. There is: {', '.join(leaf.choices)}.{own}")
    close = near(item, leaf.choices)
    hint = _elsewhere(item, leaf) or (f" Did you mean {close[0]}?" if close else "")
    number = "".join(f" Or {_KIND_NAMES[kind]}." for kind in (int, bool) if leaf.accepts(kind))
    raise ConfigError(
        f"{shown}: {item!r} is no value of this key.{hint} There is: {', '.join(leaf.choices)}.{number}{own}"
    )


def _elsewhere(item: str, leaf: Leaf) -> str:
    """Where a name belongs that is no value of this key: algorithms are known by the names of their recipes and losses."""
    if not leaf.plug_in:
        return ""
    homes = [other.path for other in leaves(leaf.root).values() if other.plug_in and item in (other.choices or ())]
    home = f" It is one of {homes[0]}." if homes else ""
    has_recipe = local_paths.is_file(Path(__file__).parent / "recipes" / f"{item}.yaml")
    return home + (f" recipe={item} sets all that goes by that name." if has_recipe else "")


def _check_bounds(item: Any, leaf: Leaf, shown: str) -> None:
    if isinstance(item, str | dict | bool):
        return
    for name, bound in leaf.bounds.items():
        if not _BOUNDS[name][1](item, bound):
            rule = " and ".join(f"{_BOUNDS[name][0]} {show(bound)}" for name, bound in leaf.bounds.items())
            nearest = f" The nearest value is {show(bound)}." if name in ("ge", "le") else ""
            raise ConfigError(f"{shown}: the value must be {rule}.{nearest}")


def allowed(leaf: Leaf) -> str:
    """What one could set instead, in words."""
    if leaf.choices:
        return f"There is: {', '.join(leaf.choices)}."
    if leaf.default is None:
        return "Leave it out, or set null." if leaf.nullable else ""
    return f"The default is {show(leaf.default)}."
