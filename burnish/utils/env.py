"""The one home of environment variables and of facts about this machine."""

import os


def get(name: str, default: str | None = None) -> str | None:
    """The environment variable ``name``, or ``default``."""
    return os.environ.get(name, default)


def set_all(variables: dict[str, str]) -> None:
    """Sets environment variables of this process."""
    os.environ.update(variables)


def num_cpus() -> int:
    """CPUs that this process may use (its affinity, not the machine's size)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
