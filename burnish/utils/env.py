"""The one home of environment variables and of facts about this machine."""

import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from burnish.utils.cgroup import memory_groups

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface.


def get(name: str, default: str | None = None) -> str | None:
    """The environment variable ``name``, or ``default``."""
    return os.environ.get(name, default)


def names() -> list[str]:
    """The names of all environment variables."""
    return list(os.environ)


def everything() -> dict[str, str]:
    """A copy of all environment variables, for a process to be started."""
    return dict(os.environ)


def set_all(variables: dict[str, str]) -> None:
    """Sets environment variables of this process."""
    os.environ.update(variables)


def unset(name: str) -> None:
    """Removes an environment variable of this process."""
    os.environ.pop(name, None)


@contextmanager
def kept(names: Iterable[str]) -> Iterator[None]:
    """The environment variables ``names`` are after the block as they were before."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_cpus() -> int:
    """CPUs that this process may use (its affinity, not the machine's size)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int | None:
    """Bytes of the computer's memory that nobody uses or that are given up on demand, and that this process may take: a
    container or a job may be allowed less. None where that cannot be told."""
    if sys.platform != "linux":
        return None
    with open("/proc/meminfo", encoding="ascii") as file:
        sizes = dict(line.split(":", 1) for line in file)
    return min([int(sizes["MemAvailable"].split()[0]) * 1024, *(group.free for group in memory_groups())])


def total_memory() -> int:
    """Bytes of the computer's memory, or of what this process's container or job may have of it."""
    whole: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([whole, *(group.limit for group in memory_groups())])


def own_memory() -> int | None:
    """Bytes of memory that this process alone holds, without files and what it shares; None where that cannot be told."""
    if sys.platform != "linux":
        return None
    with open("/proc/self/statm", encoding="ascii") as file:
        resident, shared = file.read().split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def ray_cluster_file(temp_dir: str | None = None) -> Path:
    """Where `ray start` writes the address of the cluster of this computer, and `ray.init` looks for it.

    Args:
        temp_dir: Ray's folder for temporary files; None: the one that the environment says, as Ray reads it.
    """
    if temp_dir is None:
        above = get("RAY_TMPDIR") or (get("TMPDIR") if sys.platform == "linux" else None) or "/tmp"
        temp_dir = f"{above}/ray"
    return Path(temp_dir) / "ray_current_cluster"


def interface_towards(address: str) -> str | None:
    """Name of the network interface by which this machine reaches the IPv4 ``address``, which may be its own.

    None where that cannot be told: on other systems than Linux, without a route, or with IPv6 alone.
    """
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # Of a datagram socket this only chooses the route; nothing is sent.
        except OSError:
            return None
        own_address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # An interface without an IPv4 address.
                continue
            if socket.inet_ntoa(answer[20:24]) == own_address:
                return name
    return None


# A tenth of a millisecond or so: long enough between the parallel regions of a step, short for whoever waits for the core.
_SPINS = {"GOMP_SPINCOUNT": "10000"}


def calm_threads() -> dict[str, str]:
    """Keeps OpenMP's threads from spinning for long while they wait; call it before torch is loaded.

    GNU OpenMP lets them spin for milliseconds. Where another process wants the cores too (a second run, a browser, a test),
    a step then takes ten times as long (docs/performance.md). What the user has set stays.

    Returns:
        the variables, for processes that this one starts.
    """
    if "OMP_WAIT_POLICY" in os.environ:
        return {}
    return {name: os.environ.setdefault(name, count) for name, count in _SPINS.items()}
