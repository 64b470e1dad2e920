"""How much memory the kernel lets the processes of a container, or of a job of a cluster, have together (control groups).

A container, a pod and a job under SLURM see the whole machine in ``/proc/meminfo``, and are ended by the kernel when they
take more than their group may. A limit may stand at any level above the group of a process; the least counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60
"""Version 1 writes a number of this size where there is no limit."""


@dataclass(frozen=True)
class _Files:
    """Names of one version's files: the limit, what is used, and what of that are files' pages that nobody waits for."""

    limit: str
    used: str
    reclaimable: str


_V2 = _Files("memory.max", "memory.current", "inactive_file")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@dataclass(frozen=True)
class MemoryGroup:
    """A group of processes whose memory is limited.

    Attributes:
        limit: bytes that they may have together.
        free: bytes that they may take beside what they have, pages of files that can be given up included.
    """

    limit: int
    free: int


def memory_groups(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[MemoryGroup]:
    """The groups with a limit that this process is in, from the innermost to the outermost; empty where nothing limits it.

    Args:
        proc: says which groups the process is in.
        root: where the groups lie.
    """
    try:
        lines = proc.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            tops, files = (root, root / "unified"), _V2
        elif "memory" in controllers.split(","):
            tops, files = (root / "memory", root / controllers), _V1
        else:
            continue
        for top in dict.fromkeys(tops):
            groups += [group for folder in _upwards(top, path) if (group := _read(folder, files)) is not None]
    return groups


def _upwards(top: Path, path: str) -> Iterator[Path]:
    """The folder of the group ``path`` below ``top`` and those above it. In a container ``top`` is often the group itself,
    whatever its path was outside."""
    # A group outside of what the process may see has "..": what it may see of it is at the top.
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:length])


def _read(folder: Path, files: _Files) -> MemoryGroup | None:
    try:
        limit = (folder / files.limit).read_text(encoding="ascii").strip()
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None
        used = int((folder / files.used).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return MemoryGroup(int(limit), max(0, int(limit) - used + _reclaimable(folder, files.reclaimable)))


def _reclaimable(folder: Path, name: str) -> int:
    """Nothing where it is not told, as in some sandboxes: the limit counts all the same."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
    except (OSError, ValueError):
        return 0
