"""Compiles C++ for this machine with the compiler that it has, once, and loads it."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from burnish.utils import env, local_paths
from burnish.utils.errors import ConfigError

_HEADERS = Path(__file__).parent
_COMPILERS = ("c++", "g++", "clang++")
# Without -ffast-math: logits that are not finite must stay so. Contraction would skip roundings that Hugging Face makes.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_LINKING = ("-shared", "-fPIC")
_TIMEOUT = 120


class CannotBuild(Exception):
    """Why there are no compiled kernels, as the end of a sentence."""


def load(source: Path, folder: Path | None = None) -> ctypes.CDLL:
    """The library of ``source``, which may include ``vectors.h``, compiled if it is not in ``folder`` yet.

    Args:
        folder: None is ``burnish/kernels`` in the user's cache folder.

    Raises:
        CannotBuild: it cannot be had on this machine.
    """
    flags = _cpu_flags()
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise CannotBuild(f"none of {', '.join(_COMPILERS)} is on the PATH")
    command = (compiler, *_FLAGS, *_LINKING)
    version = _run((compiler, "--version"))
    text = b"".join(file.read_bytes() for file in (source, *sorted(_HEADERS.glob("*.h"))))
    named = hashlib.sha256("\0".join((*command, version, flags)).encode() + text).hexdigest()[:32]
    try:
        path = _private(folder or local_paths.user_cache("kernels")) / f"{named}.so"
        if not path.exists():
            _compile((*command, f"-I{_HEADERS}", str(source)), path)
        _check_own(path)
        library = ctypes.CDLL(str(path))
    except (OSError, ConfigError) as error:  # A ConfigError is of a user without a home folder.
        raise CannotBuild(str(error)) from error
    library.set_parallel(ctypes.cast(_gomp_parallel(), ctypes.c_void_p))
    return library


def load_or_tell(source: Path, what_computes: str, logger: logging.Logger) -> ctypes.CDLL | None:
    """As `load`; None where it cannot be had, and where the environment variable BURNISH_CPU_KERNELS=0 keeps the process to plain
    torch. ``logger`` is told why."""
    if env.get("BURNISH_CPU_KERNELS") == "0":
        logger.info("%s in plain torch, as BURNISH_CPU_KERNELS=0 says.", what_computes)
        return None
    try:
        return load(source)
    except CannotBuild as reason:
        logger.info("%s in plain torch, without compiled kernels: %s.", what_computes, reason)
        return None


def _cpu_flags() -> str:
    """What the CPU can do; an image of this machine's folder may run on another one."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise CannotBuild(f"they are for Linux on x86-64, and this is {sys.platform} on {platform.machine()}")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    if not {"avx2", "fma"} <= set(flags.split()):
        raise CannotBuild("they need a CPU with AVX2 and FMA")
    return flags


def _gomp_parallel() -> Any:
    """The entry of the OpenMP library that torch calls, found in the order in which the linker found it for torch."""
    for name in (None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")):
        try:
            return ctypes.CDLL(name).GOMP_parallel
        except (OSError, AttributeError):
            continue
    raise CannotBuild("torch has no OpenMP library whose threads they could use")


def _private(folder: Path) -> Path:
    """``folder``, which only this user can write: what lies in it is run."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_own(folder)
    return folder


def _check_own(path: Path) -> None:
    status = path.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CannotBuild(f"{path} belongs to another user, or others may write it; remove it")


def _compile(command: tuple[str, ...], path: Path) -> None:
    # Under a name of its own, and renamed when it is whole: several processes may start at once.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        output = Path(folder) / path.name
        _run((*command, "-o", str(output)))
        output.chmod(0o700)
        output.replace(path)


def _run(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        raise CannotBuild(f"{command[0]} failed: {done.stderr[:500].strip()}")
    return done.stdout
