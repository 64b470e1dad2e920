"""References between keys that need no grammar: one key's name in ``${...}``, alone or in a text."""

import copy
import re
from typing import Any, cast

_ONE_KEY = re.compile(r"\$\{([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}")


def followed(tree: dict[str, Any], path: str, seen: tuple[str, ...] = ()) -> tuple[Any] | None:
    """The value at the end of references to one key each, or text with such to text; None where OmegaConf has to read them, or to
    refuse them.

    Most keys that follow others do only this, and OmegaConf's grammar takes a millisecond for each.
    """
    try:
        value = look_up(tree, path)
    except (KeyError, TypeError):
        return None
    if path in seen or isinstance(value, (dict, tuple)) or (isinstance(value, str) and value == "???"):
        return None
    if "${" not in str(value):
        return (copy.deepcopy(value),)
    if not isinstance(value, str) or "\\" in value:
        return None
    if whole := _ONE_KEY.fullmatch(value):
        return followed(tree, whole[1], (*seen, path))
    parts = {found[0]: followed(tree, found[1], (*seen, path)) for found in _ONE_KEY.finditer(value)}
    if not all(part is not None and isinstance(part[0], str) for part in parts.values()):
        return None
    text = _ONE_KEY.sub(lambda found: cast(tuple[str], parts[found[0]])[0], value)
    return None if "${" in text else (text,)


def look_up(tree: dict[str, Any], path: str) -> Any:
    """What stands at a dotted path.

    Raises:
        KeyError: nothing does.
        TypeError: a part of the path is no section.
    """
    value: Any = tree
    for name in path.split("."):
        value = value[name]
    return value
