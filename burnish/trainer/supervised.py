"""The side of a run's process that a supervisor has started: it dies with the supervisor, and says why it failed."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import asdict, replace

from burnish.trainer.restarts import Failure
from burnish.utils import env

VARIABLE = "BURNISH_SUPERVISOR"
"""``<process id>:<file descriptor>``: who watches, and the pipe that takes the failure as one line of JSON."""
STARTED = "BURNISH_RUN_STARTED"
"""When the first attempt began, in unix seconds."""
_PR_SET_PDEATHSIG = 1
_MOST_CHARACTERS = 4000
"""Of a message that the supervisor is told, who reads when this process has ended: a full pipe would let it wait for ever."""


def in_supervision() -> bool:
    """Whether this process was started by a supervisor: then that one starts the next attempt."""
    said = env.get(VARIABLE)
    # Processes that this one starts inherit the variable, not the parent.
    return said is not None and int(said.partition(":")[0]) == os.getppid()


def run_started() -> float:
    """When the run began, in unix seconds: the first attempt at it."""
    return float(env.get(STARTED, "") or time.time()) if in_supervision() else time.time()


def follow_supervisor() -> None:
    """The system ends this process when its supervisor is gone."""
    if not in_supervision() or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if not in_supervision():
        os._exit(1)  # It was gone before it could be followed.


def report_failure(failure: Failure) -> None:
    """Tells the supervisor, if there is one, what ended this attempt."""
    if not in_supervision():
        return
    pipe = int((env.get(VARIABLE) or ":").partition(":")[2])
    short = replace(failure, message=failure.message[:_MOST_CHARACTERS])
    with contextlib.suppress(OSError):  # It is gone; then so is this process, soon.
        os.write(pipe, json.dumps(asdict(short)).encode() + b"\n")
