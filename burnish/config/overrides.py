"""Single overrides of a command line, ``key=value`` in Hydra's grammar -> what they set."""

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from burnish.config.settings import Setting, is_known, settings_of
from burnish.config.trees import RL, Tree
from burnish.config.values import is_text, show
from burnish.utils.errors import ConfigError


def parse(text: str, tree: Tree = RL) -> Override | str:
    """The override, or its text where a path holds characters that the grammar has another use for.

    Raises:
        ConfigError: it is no ``key=value``.
    """
    name, equals, value = text.partition("=")
    if not name.strip("+~ "):
        raise ConfigError(f"{text!r} names no key; settings are written key=value. Is a variable of the shell empty?")
    if text.startswith("-"):
        raise ConfigError(f"{text}: keys are written without dashes, as {text.lstrip('-') if equals else 'key=value'}.")
    if not equals and not text.startswith("~"):
        leaf = tree.leaves.get(tree.rules.rename(name.lstrip("+")))
        example = f"{name}={show(leaf.default)}" if leaf is not None else "key=value"
        raise ConfigError(f"{text}: a key needs a value and an equals sign, as {example}.")
    # A path may hold '=', '~' or ','; only a quoted value or a list is left to the grammar.
    takes_text, takes_comma = _takes_text(name, value, tree)
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        if takes_text and (takes_comma or "," not in value):
            return text
        reason, quoted = str(error).splitlines()[0].partition(" expecting")[0], value.strip("'\"")
        raise ConfigError(
            f"{text}: this cannot be read ({reason}). Quote the value for Hydra and for the shell: "
            f"'{name}=\"{quoted}\"'."
        ) from error
    if override.is_sweep_override():
        if takes_comma:
            return text
        if name.lstrip("+") == "recipe":
            raise ConfigError(f"{text}: a run starts from one recipe, and recipes do not add up. Name one.")
        leaf = tree.leaves.get(tree.rules.rename(name.lstrip("+")))
        ways = []
        if leaf is None or leaf.accepts(list):
            ways.append(f" A list is written '{name}=[{value}]'.")
        if leaf is None or is_text(leaf):
            ways.append(f" Text with a comma is written '{name}=\"{value}\"'.")
        advice = "".join(ways) or " Give one of them; a loop of the shell runs over several."
        raise ConfigError(f"{text}: this names several values, and one run has one.{advice}")
    return override


def _takes_text(name: str, value: str, tree: Tree) -> tuple[bool, bool]:
    """Whether a key takes ``value`` as it stands, and whether also with a comma, which separates items of a list."""
    key = tree.rules.rename(name.lstrip("+"))
    leaf = tree.leaves.get(key)
    if leaf is not None and leaf.accepts(list) and is_text(leaf) and value[:1] == "[" and value[-1:] == "]":
        return True, True
    if value[:1] in ("", "[", "{", "'", '"'):
        return False, False
    if leaf is None:
        return is_known(key, tree), False
    return is_text(leaf), is_text(leaf) and leaf.accepts(str)


def to_settings(text: str, override: Override | str, tree: Tree = RL) -> list[Setting]:
    """What a parsed override sets."""
    if isinstance(override, str):
        name, _, value = override.partition("=")
        return list(settings_of(name.lstrip("+"), value, value, tree=tree))
    key = override.key_or_group
    if override.is_delete():
        return [Setting(typed=key, key=tree.rules.rename(key), value=None, text=text, delete=True)]
    return list(settings_of(key, override.value(), text.partition("=")[2], tree=tree))
