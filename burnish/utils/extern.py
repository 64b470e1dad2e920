"""The user's own Python files: an attribute of a file named by its path."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from burnish.utils import local_paths, storage
from burnish.utils.errors import ConfigError, StorageError

_PACKAGE_PREFIX = "pkg://"


def load_attribute(path: str, name: str, *, key: str = "path") -> Any:
    """The attribute ``name`` of the Python file at ``path``.

    A process that needs the attribute (a Ray worker, say) calls this itself: what travels is the path and the name,
    never the pickled object. The module's name is made of the file's place and content, so that two files called
    ``reward.py`` do not meet, loading a file twice runs it once, and an edited file is loaded anew.

    Args:
        path: a ``.py`` file (``~`` is expanded) or the URL of one, or ``pkg://package.module`` for an installed module.
        name: the attribute, dots allowed ("Scorer.score").
        key: the configuration key that gave ``path``, for messages.

    Raises:
        ConfigError: no such file or attribute, or the file cannot be imported.
    """
    module = load_module(path, key=key)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = ", ".join(sorted(entry for entry in vars(module) if not entry.startswith("_"))) or "nothing public"
            raise ConfigError(f"{key}={path}: there is no {name!r} in it. It defines: {public}.")
        found = getattr(found, part)
    return found


def load_module(path: str, *, key: str = "path") -> ModuleType:
    """The module that ``path`` names, as `load_attribute` takes it.

    Raises:
        ConfigError: no such file, or it cannot be imported.
    """
    return _import_package(path, key) if path.startswith(_PACKAGE_PREFIX) else _import_file(path, key)


def load_class(path: str, name: str | None, base: type, *, path_key: str, name_key: str) -> Callable[..., Any]:
    """The class ``name`` of the Python file at ``path``, which must be a subclass of ``base``.

    Raises:
        ConfigError: as `load_attribute`, or ``name`` is not given, or is no such class.
    """
    if name is None:
        raise ConfigError(f"{path_key}={path}: {name_key} must name the class in it.")
    found = load_attribute(path, name, key=path_key)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{name_key}={name}: this is no subclass of {base.__module__}.{base.__qualname__}.")
    return found


def _import_package(path: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(path.removeprefix(_PACKAGE_PREFIX))
    except ImportError as error:
        raise ConfigError(f"{key}={path}: the module cannot be imported: {error}.") from error


def _import_file(path: str, key: str) -> ModuleType:
    try:
        file = local_paths.expanded(storage.localize(path)).absolute()
    except StorageError as error:
        raise ConfigError(f"{key}: {error}") from error
    if not local_paths.is_file(file):
        raise ConfigError(f"{key}={path}: there is no such file ({file}).")
    file = file.resolve()
    if file.suffix != ".py":
        raise ConfigError(f"{key}={path}: this must be a Python file whose name ends in .py.")
    fingerprint = hashlib.sha256(str(file).encode() + b"\0" + file.read_bytes()).hexdigest()[:16]
    module_name = f"burnish_extern_{file.stem}_{fingerprint}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None  # a file that ends in .py always has one
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs: dataclasses and typing look their module up by name.
    sys.modules[module_name] = module
    done = False
    try:
        spec.loader.exec_module(module)
        done = True
    except SyntaxError as error:
        raise ConfigError(f"{key}={path}: the file is not valid Python: {error}.") from error
    except ImportError as error:
        raise ConfigError(
            f"{key}={path}: the file imports something that is not there: {error}. "
            f"A helper module of your own is found if its folder is on PYTHONPATH."
        ) from error
    finally:
        if not done:
            del sys.modules[module_name]
    return module
