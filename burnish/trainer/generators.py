"""The random number generators that all Python code of a process shares."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def generators_kept() -> Iterator[None]:
    """Python's, numpy's and torch's generators are after the block as they were before, whatever it drew."""
    # Not above: whoever asks for what is wrong gets the answer before torch is loaded.
    import numpy as np
    import torch

    pythons, numpys, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
        torch.set_rng_state(torchs)
        if devices:
            torch.cuda.set_rng_state_all(devices)
