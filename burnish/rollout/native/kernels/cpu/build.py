"""The library of ``kernels.cpp``."""

import ctypes
from pathlib import Path

from burnish.model.kernels.cpu import build
from burnish.model.kernels.cpu.build import CannotBuild

__all__ = ["SOURCE", "CannotBuild", "load"]

SOURCE = Path(__file__).with_name("kernels.cpp")


def load(folder: Path | None = None) -> ctypes.CDLL:
    """See `burnish.model.kernels.cpu.build.load`."""
    return build.load(SOURCE, folder)
