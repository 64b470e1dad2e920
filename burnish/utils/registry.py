"""One registry for everything that is named in the configuration."""

import difflib
import importlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from burnish.utils.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to plug-ins; a plug-in is named by its registered name or as ``package.module:attribute``.

    Args:
        kind: what is registered, in words, for messages ("advantage estimator").
        config_key: the configuration key that names an entry ("algorithm.adv_estimator").
    """

    def __init__(self, kind: str, config_key: str) -> None:
        self.kind = kind
        self.config_key = config_key
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that registers under ``name``; a second, different entry of that name is an error."""

        def decorator(entry: T) -> T:
            if name in self._entries and self._entries[name] is not entry:
                raise ConfigError(f"The {self.kind} {name!r} is registered already, by {self._entries[name]!r}.")
            self._entries[name] = entry
            return entry

        return decorator

    def get(self, name: str) -> T:
        """The entry called ``name``, or the attribute it points to.

        Raises:
            ConfigError: no such name (lists the choices), module or attribute.
        """
        if name in self._entries:
            return self._entries[name]
        if ":" in name:
            return self._load(name)
        near = difflib.get_close_matches(name, self._entries, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{self.config_key}={name}: there is no {self.kind} of that name.{hint} Known: {', '.join(sorted(self))}. "
            f"Your own is named as package.module:attribute."
        )

    def _load(self, target: str) -> T:
        module_name, _, attribute = target.partition(":")
        try:
            return getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{self.config_key}={target}: the {self.kind} cannot be loaded: {error}.") from error

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
