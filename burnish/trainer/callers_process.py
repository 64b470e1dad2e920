"""What a run changes in the process that it was called from, and puts back: a notebook goes on when it is over."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from burnish.trainer.generators import generators_kept
from burnish.utils import env


@contextmanager
def left_as_found() -> Iterator[None]:
    """Random number generators, the handling of Ctrl-C and SIGTERM (Ray brings its own), the number of torch's threads, and the
    variables that tell a worker its rank (RANK, WORLD_SIZE, ...), by which other libraries would take the process for a part of
    a distributed program."""
    # Not above: whoever asks for what is wrong gets the answer before torch is loaded.
    import torch

    from burnish.single_controller import WorkerContext

    threads = torch.get_num_threads()
    with generators_kept(), env.kept(WorkerContext().to_env()), _handlers_kept():
        try:
            yield
        finally:
            torch.set_num_threads(threads)


@contextmanager
def _handlers_kept() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            # One that was not made in Python cannot be put back.
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
