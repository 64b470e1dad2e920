"""Keeps what vLLM sets for the whole process while an engine starts from reaching whatever else runs there."""

import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from burnish.utils import env

_VARIABLES = (
    "LD_PRELOAD",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NUMEXPR_MAX_THREADS",
    "OMP_NUM_THREADS",
    "RANK",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "WORLD_SIZE",
)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Random numbers, threads, the default dtype and the environment of launchers are afterwards what they were.

    Warnings of Python's about vLLM's own code are nobody's here, and not shown.
    """
    variables = {name: env.get(name) for name in _VARIABLES}
    python, numpy, default_dtype = random.getstate(), np.random.get_state(), torch.get_default_dtype()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_default_dtype(default_dtype)
            torch.set_num_threads = set_num_threads  # On a CPU vLLM forbids to change it.
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)
            for name, value in variables.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
