"""One reward process as its driver sees it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Hashable
from dataclasses import dataclass, field

from burnish.utils import env

_MARK = "BURNISH_REWARD_POOL"
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from burnish.reward.pool_worker import main
main(int(sys.argv[1]))
"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How reward processes are run; see `RewardPool`."""

    function: bytes
    name: str
    num_workers: int
    timeout: float | None
    memory_limit_mb: int | None
    concurrency: int
    start_timeout: float
    timeout_key: str = "reward.timeout"


@dataclass
class Task:
    """One row on its way."""

    key: Hashable
    row: bytes
    alone: bool = False
    """It was in a process that went down with several rows: it is repeated in one that has nothing else."""
    started: float = 0.0


@dataclass
class Worker:
    """A process, and what it is at."""

    process: subprocess.Popen[bytes]
    link: socket.socket
    started: float
    ready: bool = False
    runs_async: bool = False
    tasks: dict[int, Task] = field(default_factory=dict)
    """Rows that it has, in the order in which it got them."""
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)


def spawn(mark: str = "") -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A fresh process, leader of a session of its own, that waits for the hello; and the driver's end of its socket.

    ``mark`` is in its environment, and so in that of whatever it starts.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    one_thread = {name: env.get(name) or "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno()), json.dumps(sys.path)],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env={**env.everything(), "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", _MARK: mark, **one_thread},
        )
    return process, ours


def how_it_ended(status: int | None, memory_limit_mb: int | None) -> str:
    """What became of a process, by its exit status, in words."""
    if status is None:
        return "closed its connection"
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name if -status in signal.Signals.__members__.values() else f"signal {-status}"
    out_of_memory = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    may_be_memory = memory_limit_mb is not None and name in ("SIGKILL", "SIGABRT", "SIGSEGV")
    limit = f" (reward.memory_limit_mb={memory_limit_mb})" if may_be_memory else ""
    return f"was ended by {name}{out_of_memory}{limit}"
