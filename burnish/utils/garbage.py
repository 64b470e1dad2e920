"""Python's search for garbage, and what it need not look through."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 100_000


@contextmanager
def kept() -> Iterator[None]:
    """What the block makes is there to stay, as modules are: nobody looks for garbage in it, neither now nor later.

    Loading torch and transformers makes a million objects, and Python looks through all of them again and again: a tenth of the
    time that loading takes, and as much again while the rows of a data set come on top. Where the block makes few, since modules
    are loaded already, nothing is done.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > _MANY:
            gc.freeze()
        if was_enabled:
            gc.enable()
