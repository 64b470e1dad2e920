"""The operations compiled for this machine's CPU, where it has a compiler; plain torch does the same, slower."""

import ctypes
import logging

import torch
from torch import Tensor

from burnish.model.kernels.cpu.build import load_or_tell
from burnish.rollout.native.kernels.cpu.build import SOURCE
from burnish.rollout.native.kernels.cpu.compiled import CompiledKernels

logger = logging.getLogger("burnish.rollout")

# Below this hidden size a step is Python's time and no product or attention; a toy or a demo must not wait three
# seconds for a compiler that would not make it faster, nor need one to give the same numbers everywhere.
MIN_HIDDEN_SIZE = 256

_kernels: dict[torch.dtype, CompiledKernels] = {}
_tried = False


def prepare(hidden_size: int) -> None:
    """Compiles and loads the kernels if a model of this size is worth it; once a process, and never inside a step.

    The environment variable BURNISH_CPU_KERNELS=0 keeps the process to plain torch.
    """
    global _tried
    if _tried or hidden_size < MIN_HIDDEN_SIZE:
        return
    _tried = True
    library = load_or_tell(SOURCE, "The native engine computes", logger)
    if library is not None:
        _kernels.update(kernels_of(library))


def kernels_of(library: ctypes.CDLL) -> dict[torch.dtype, CompiledKernels]:
    """Those of ``library`` for each dtype."""
    return {dtype: CompiledKernels(library, dtype) for dtype in CompiledKernels.DTYPES}


def compiled_for(x: Tensor) -> CompiledKernels | None:
    """The compiled kernels for tensors like ``x``, if there are any."""
    return _kernels.get(x.dtype) if x.is_cpu else None
