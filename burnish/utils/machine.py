"""What this computer has, asked of the system and not of torch: answers in a moment, and before anything is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_NVIDIA = Path("/proc/driver/nvidia")
_QUERY = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU."""

    name: str
    memory_gib: float | None
    """None where nvidia-smi did not say."""
    driver: str | None


@contextmanager
def gpus_asked_for(timeout: float = 1.2) -> Iterator[list[Gpu]]:
    """The GPUs: the list is filled at the block's end, so that other things are done while nvidia-smi takes its time.

    Where that is not there, or takes longer than ``timeout`` seconds after the block, what the driver's files say.
    """
    found: list[Gpu] = []
    command = shutil.which("nvidia-smi")
    asked = None
    if command is not None:
        asked = subprocess.Popen([command, *_QUERY], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield found
        if asked is not None:
            try:
                out, _ = asked.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                out = ""
            if asked.returncode == 0:
                found += _parsed(out)
        if not found:
            found += gpus_of_driver(_NVIDIA)
    finally:
        if asked is not None and asked.poll() is None:
            asked.kill()
            asked.wait()


def _parsed(out: str) -> list[Gpu]:
    gpus = []
    for line in out.splitlines():
        name, memory, driver = (part.strip() for part in line.rsplit(",", 2))
        gpus.append(Gpu(name, round(float(memory) / 1024, 1) if memory.replace(".", "").isdigit() else None, driver))
    return gpus


def gpus_of_driver(folder: Path) -> list[Gpu]:
    """What the NVIDIA driver's files in ``folder`` say."""
    version = folder / "version"
    match = re.search(r"(\d+\.\d+(?:\.\d+)?)", version.read_text()) if version.is_file() else None
    driver = match.group(1) if match else None
    gpus = []
    for file in sorted(folder.glob("gpus/*/information")):
        model = re.search(r"^Model:\s*(.+)$", file.read_text(), re.M)
        gpus.append(Gpu(model.group(1).strip() if model else "an NVIDIA GPU", None, driver))
    return gpus


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch is built for; None: it is built for CPUs, or not there."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    match = re.search(r"^cuda[^=\n]*=\s*'([\d.]+)'", file.read_text(), re.M) if file.is_file() else None
    return match.group(1) if match else None


def free_bytes(folder: str) -> int | None:
    """Free on the disk (or in the memory) that ``folder`` lies on; None where there is no such folder."""
    return shutil.disk_usage(folder).free if Path(folder).is_dir() else None


def used_memory_bytes(file: Path = Path("/proc/meminfo")) -> int | None:
    """Memory of the computer that programs hold and cannot give back at once; None where the system does not say."""
    if not file.is_file():
        return None
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", file.read_text(), re.M))
    return (int(found["MemTotal"]) - int(found["MemAvailable"])) * 1024 if len(found) == 2 else None
