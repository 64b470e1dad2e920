"""One event loop for what waits for others, in a thread of its own."""

import asyncio
import functools
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def background_loop() -> asyncio.AbstractEventLoop:
    """One loop for the life of the process, since connections belong to the loop that they were opened in; in a thread of
    its own, since the caller may run in a loop itself."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards that wait for others", daemon=True).start()
    return loop


def run_in_background(work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns, run in the background loop; the caller waits for it."""
    return asyncio.run_coroutine_threadsafe(work, background_loop()).result()
