"""The home of printing: ``from burnish.utils.console import console, error_console``.

Both are a ``rich.console.Console``, one to standard output, one to standard error, made when first asked for, so that
importing this module costs nothing. They print text as it is: brackets in a prompt are no markup and ``:name:`` is no
emoji, unless a call says ``markup=True``.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    console: Console
    error_console: Console


@cache
def _make_console(stderr: bool) -> "Console":
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def __getattr__(name: str) -> Any:
    if name in ("console", "error_console"):
        return _make_console(stderr=name == "error_console")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
