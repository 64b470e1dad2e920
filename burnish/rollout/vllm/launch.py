"""How the processes of an engine are started: with which executor, and with what in their environment."""

from __future__ import annotations

import os
import re
import select
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from burnish.utils import env

# What launchers of ranks leave in the environment, and the engine's processes would take for their own.
_OF_LAUNCHERS = re.compile(
    r"^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_\w*)$"
)

_STARTER = "BURNISH_ENGINE_STARTER"
"""Holds, in an engine's processes, the number of the process that started it."""


def with_executor(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of vLLM's ``EngineArgs``, and how its workers run where they do not say it."""
    return {"distributed_executor_backend": "uni" if is_alone(arguments) else "mp", **arguments}


def is_alone(arguments: Mapping[str, Any]) -> bool:
    """Whether the engine has one worker, which then needs no process of its own."""
    return int(arguments.get("tensor_parallel_size", 1)) == 1


def read_environment_anew() -> None:
    """What is in the environment now counts for vLLM.

    An engine that ran in this process has it keep what it read before.
    """
    envs: Any = sys.modules.get("vllm.envs")
    if envs is not None:
        envs.disable_envs_cache()


def follow_starter() -> None:
    """Ends this process when the one that started its engine is gone: the memory of a run that was killed is free again.

    Called early in the engine's life, since a run may be killed while its engine starts. Nothing in a process that no
    `launch_environment` started.
    """
    if (pid := env.get(_STARTER)) is not None:
        threading.Thread(target=_follow, args=(int(pid),), daemon=True, name="follow-starter").start()


def _follow(pid: int) -> None:
    wait_for_end(pid)
    os._exit(1)


def wait_for_end(pid: int) -> None:
    """Returns when the process ``pid`` has ended, also if nobody has asked for its status yet."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # Not Linux, or an old one.
        while _exists(pid):
            time.sleep(1.0)
        return
    try:
        # Readable once it has ended; unlike its number it never names another process.
        ended = select.poll()
        ended.register(process, select.POLLIN)
        ended.poll()
    finally:
        os.close(process)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def launch_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """What processes that start meanwhile find in their environment.

    Afterwards vLLM's own variables stay, since this process's side of it reads them too; the others are as before.
    """
    method = env.get("VLLM_WORKER_MULTIPROC_METHOD") or "spawn"
    given = {"VLLM_WORKER_MULTIPROC_METHOD": method, _STARTER: str(os.getpid()), **variables}
    before = dict(os.environ)
    env.set_all(given)
    read_environment_anew()
    for name in list(os.environ):
        if _OF_LAUNCHERS.match(name):
            del os.environ[name]
    try:
        yield
    finally:
        stays = {name for name in given if name.startswith("VLLM_")}
        for name in {*os.environ, *before} - stays:
            if name not in before:
                del os.environ[name]
            elif os.environ.get(name) != before[name]:
                os.environ[name] = before[name]
