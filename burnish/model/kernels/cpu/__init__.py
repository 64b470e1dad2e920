"""The passes over the logits, compiled for this machine's CPU where it has a compiler; plain torch does the same, slower."""

import ctypes
import logging
from pathlib import Path

import torch
from torch import Tensor

from burnish.model.kernels.cpu.build import load_or_tell
from burnish.model.kernels.cpu.compiled import CompiledHead

logger = logging.getLogger("burnish.model")

SOURCE = Path(__file__).with_name("head.cpp")

# With fewer logits a token the products and Python are all there is; a toy must not wait three seconds for a compiler that
# would not make it faster, nor need one to give the same numbers everywhere.
MIN_VOCAB = 8192

_kernels: dict[torch.dtype, CompiledHead] = {}
_tried = False


def compiled_for(raw: Tensor) -> CompiledHead | None:
    """The compiled kernels for a chunk of logits like ``raw`` [tokens, vocab], if there are any.

    The first chunk of a process that is worth it compiles and loads them, which takes some seconds once a machine. The
    environment variable BURNISH_CPU_KERNELS=0 keeps the process to plain torch.
    """
    if not raw.is_cpu or raw.dtype not in CompiledHead.DTYPES or raw.shape[1] < MIN_VOCAB:
        return None
    if not _tried:
        _prepare()
    return _kernels.get(raw.dtype)


def _prepare() -> None:
    global _tried
    _tried = True
    library = load_or_tell(SOURCE, "The head computes", logger)
    if library is not None:
        _kernels.update(kernels_of(library))


def kernels_of(library: ctypes.CDLL) -> dict[torch.dtype, CompiledHead]:
    """Those of ``library`` for each dtype."""
    return {dtype: CompiledHead(library, dtype) for dtype in CompiledHead.DTYPES}
