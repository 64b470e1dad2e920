"""One registry for everything that is named in the configuration."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from burnish.utils.errors import ConfigError
from burnish.utils.foreign_code import Caught, told

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to plug-ins; a plug-in is named by its registered name or as ``package.module:attribute``.

    Args:
        kind: what is registered, in words, for messages ("advantage estimator").
        config_key: the configuration key that names an entry ("algorithm.adv_estimator").
        called_with: the arguments that every entry is called with, in order, where that is one list for all.
    """

    def __init__(self, kind: str, config_key: str, called_with: Sequence[str] = ()) -> None:
        self.kind = kind
        self.config_key = config_key
        self._called_with = called_with
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
            ConfigError: no such name (lists the choices), module or attribute, or a module that fails.
        """
        if name in self._entries:
            return self._entries[name]
        if ":" in name:
            return self._load(name)
        raise ConfigError(
            f"{self.config_key}={name}: there is no {self.kind} of that name.{_hint(name, self)} Known: "
            f"{', '.join(sorted(self))}. Your own is named as package.module:attribute."
        )

    def _load(self, target: str) -> T:
        module_name, _, attribute = target.partition(":")
        if not module_name or not attribute:
            raise ConfigError(f"{self.config_key}={target}: the {self.kind} is named as package.module:attribute.")
        with Caught() as caught:
            module = importlib.import_module(module_name)
        if caught.error is not None:
            raise ConfigError(
                f"{self.config_key}={target}: the {self.kind} cannot be loaded: {_reason(caught.error, module_name)}"
            ) from caught.error
        if not hasattr(module, attribute):
            raise ConfigError(
                f"{self.config_key}={target}: the {self.kind} cannot be loaded: "
                f"{module.__file__ or module_name} has no {attribute!r}.{_hint(attribute, vars(module))}"
            )
        entry = getattr(module, attribute)
        if not callable(entry):
            raise ConfigError(f"{self.config_key}={target}: this is {type(entry).__name__}, not a function.")
        if self._called_with:
            self._check_parameters(target, inspect.signature(entry))
        return entry

    def _check_parameters(self, target: str, signature: inspect.Signature) -> None:
        try:
            signature.bind(*self._called_with)
        except TypeError as error:
            raise ConfigError(
                f"{self.config_key}={target}: a {self.kind} is called with ({', '.join(self._called_with)}), but the "
                f"parameters of this one are {signature}: {error}."
            ) from error

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _reason(error: Exception, module_name: str) -> str:
    is_missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
    if is_missing:
        return f"{error}. It must be installed, or lie in the folder you are in or in one on PYTHONPATH."
    return f"{told(error)}."
