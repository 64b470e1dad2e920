"""How the processes of an engine are started: with which executor, and with what in their environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from burnish.utils import env

# What launchers of ranks leave in the environment, and the engine's processes would take for their own.
_OF_LAUNCHERS = re.compile(
    r"^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_\w*)$"
)


def with_executor(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of vLLM's ``EngineArgs``, and how its workers run where they do not say it."""
    return {"distributed_executor_backend": "uni" if is_alone(arguments) else "mp", **arguments}


def is_alone(arguments: Mapping[str, Any]) -> bool:
    """Whether the engine has one worker, which then needs no process of its own."""
    return int(arguments.get("tensor_parallel_size", 1)) == 1


@contextmanager
def launch_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """What processes that start meanwhile find in their environment.

    Afterwards vLLM's own variables stay, since this process's side of it reads them too; the others are as before.
    """
    given = {"VLLM_WORKER_MULTIPROC_METHOD": env.get("VLLM_WORKER_MULTIPROC_METHOD") or "spawn", **variables}
    before = dict(os.environ)
    env.set_all(given)
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
