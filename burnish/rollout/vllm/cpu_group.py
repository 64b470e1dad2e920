"""Shared memory of vLLM's tensor-parallel ranks on a CPU: a name of its own for each engine."""

from __future__ import annotations

import secrets
from typing import Any

import torch.distributed as dist


def name_shared_memory_uniquely() -> None:
    """From now on two engines of one computer do not share their memory; call it before vLLM makes its groups.

    vLLM names it after the port of its rendezvous. Ranks that were started together have none, so that a second engine would
    sum its states with those of the first, and what a killed one left behind would stop the next.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    named = _CPUSHMDistributed.make_group_name
    if getattr(named, "is_unique", False):
        return

    def make_group_name(communicator: Any) -> str:
        if not hasattr(communicator, "burnish_name"):
            # All ranks ask for the name at the same time, before they use it.
            name = [secrets.token_hex(8)]
            dist.broadcast_object_list(name, src=communicator.ranks[0], group=communicator.device_group)
            communicator.burnish_name = f"{named(communicator)}-{name[0]}"
        return str(communicator.burnish_name)

    make_group_name.is_unique = True  # type: ignore[attr-defined]
    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
