"""Memory that vLLM can empty in its sleep: given back whole when an engine in this process ends.

vLLM allocates an engine's weights and cache through an allocator of its own, of which a process has one, and which refuses a
second engine while anything of the first is in its books. It takes a block out of them where PyTorch frees it, and PyTorch keeps
what was freed for the next tensor of the same pool, which never comes.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
from collections.abc import Collection
from typing import Any

import torch

logger = logging.getLogger("burnish.rollout.vllm")


def let_go(asleep: Collection[str] = ()) -> None:
    """Frees what engines of this process have left; none of them may live.

    Args:
        asleep: tags of the memory that is unmapped already (``weights``, ``kv_cache``).
    """
    gc.unfreeze()  # vLLM freezes what exists when an engine has started, so that no collection looks at it.
    gc.collect()
    module: Any = sys.modules.get("vllm.device_allocator.cumem")
    allocator = None if module is None else module.CuMemAllocator.instance
    if allocator is None or not allocator.pointer_to_data:
        return
    torch.cuda.synchronize()
    pools = [
        pool
        for kept in allocator.allocator_and_pools.values()
        for pool in (kept if isinstance(kept, list) else [kept])  # One of each tag, or all of them, by vLLM's version.
    ]
    free = {segment["address"] for pool, _ in pools for segment in pool.snapshot() if segment["allocated_size"] == 0}
    num_held_bytes = 0
    for address, data in list(allocator.pointer_to_data.items()):
        handle = allocator._python_free_callback(address)
        if getattr(data, "is_asleep", data.tag in asleep):
            continue
        if address in free:
            module.unmap_and_release(handle)
        else:
            num_held_bytes += int(handle[1])
    # A pool that ends asks the allocator for each of its blocks, and those are in no book any more: pools must never end.
    for pool in pools:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    allocator.allocator_and_pools.clear()
    if num_held_bytes:
        logger.warning(
            "%.2f GiB of an engine that was closed are still referred to and stay taken.", num_held_bytes / 2**30
        )
