"""Seconds per stage."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def marked_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Adds the seconds spent in the block to ``timing_raw[name]``, also when the block raises."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - start
