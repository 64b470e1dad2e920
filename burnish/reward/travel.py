"""How a reward function gets into another process."""

import inspect
import io
import pickle
import sys
import types
from functools import cached_property, partial
from typing import Any

from burnish.utils.errors import ConfigError
from burnish.utils.extern import load_attribute

_FILE_MODULE = "burnish_extern_"


class FileFunction:
    """The function, or the callable made of the class, ``name`` of the Python file ``path``, with ``kwargs`` bound.

    What travels is the path: every process loads the file itself, and makes its own instance of a class.

    Raises:
        ConfigError: as `load_attribute`, when it is first called or looked at.
    """

    def __init__(self, path: str, name: str, kwargs: dict[str, Any] | None = None, *, key: str = "path") -> None:
        self.path, self.name, self.kwargs, self.key = path, name, dict(kwargs or {}), key

    @property
    def takes_prompt(self) -> bool:
        """Whether the function asks for the prompt, by an attribute of that name."""
        return bool(getattr(self.function, "takes_prompt", False))

    @cached_property
    def function(self) -> Any:
        """The function as it is in the file, its class instantiated, without ``kwargs``."""
        found = load_attribute(self.path, self.name, key=self.key)
        return found() if inspect.isclass(found) else found

    @cached_property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(partial(self.function, **self.kwargs))

    def __call__(self, **row: Any) -> Any:
        return self.function(**(self.kwargs | row))

    def __reduce__(self) -> Any:
        return _file_function, (self.path, self.name, self.kwargs, self.key)


def _file_function(path: str, name: str, kwargs: dict[str, Any], key: str) -> FileFunction:
    return FileFunction(path, name, kwargs, key=key)


def pack(function: Any, keys: str = "reward.num_workers=0") -> bytes:
    """A reward function as bytes: of a module or a file by name, anything else by what it consists of.

    Args:
        keys: what to set so that nothing has to travel, for the message.

    Raises:
        ConfigError: it cannot travel; says what in it cannot, and the way out.
    """
    from cloudpickle import Pickler

    class ByName(Pickler):  # type: ignore[misc]
        """Functions and classes of the user's own file by path and name: the other process loads the file itself."""

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, (type, types.FunctionType)) and _in_its_file(obj):
                return load_attribute, (sys.modules[obj.__module__].__file__, obj.__qualname__)
            if isinstance(obj, types.ModuleType) and obj.__name__.startswith(_FILE_MODULE):
                return _load_file, (obj.__file__,)
            return super().reducer_override(obj)

    stream = io.BytesIO()
    try:
        ByName(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(function)
    except Exception as error:
        raise ConfigError(
            f"The reward function {describe(function)} cannot be sent to reward processes: {type(error).__name__}: "
            f"{error}. What it holds must be made of plain values; things like locks, open files and connections are made "
            f"inside the function, or in a file (reward.custom_reward_function.path) that each process loads. {keys} "
            f"calls it in the driver instead, without time limits."
        ) from error
    return stream.getvalue()


def unpack(payload: bytes) -> Any:
    """The function in what `pack` made; imports what it is made of."""
    return pickle.loads(payload)


def is_async(function: Any) -> bool:
    """Whether calling ``function`` makes a coroutine, as far as can be told without calling it."""
    if isinstance(function, FileFunction):
        return is_async(function.function)
    if isinstance(function, partial):
        return is_async(function.func)
    declared = getattr(function, "is_async", None)
    if isinstance(declared, bool):
        return declared
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def describe(function: Any) -> str:
    """What a function is called, for messages."""
    if isinstance(function, FileFunction):
        return f"{function.name} of {function.path}"
    if isinstance(function, partial):
        return describe(function.func)
    return getattr(function, "__qualname__", type(function).__qualname__)


def _in_its_file(obj: Any) -> bool:
    module = sys.modules.get(getattr(obj, "__module__", None) or "")
    if module is None or not module.__name__.startswith(_FILE_MODULE):
        return False
    found: Any = module
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is obj


def _load_file(path: str) -> types.ModuleType:
    from burnish.utils.extern import load_module

    return load_module(path)
