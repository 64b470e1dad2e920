"""How kernels are laid out; ``python -m benchmarks.kernels --training`` compares layouts."""

from functools import cache
from typing import NamedTuple

import torch
import triton


class Tile(NamedTuple):
    """One program: how many elements of a row at once, and by how many warps."""

    block: int
    num_warps: int


class Shared(NamedTuple):
    """The rows of a kernel that adds up over all of them, shared by programs that stay."""

    per_processor: int
    """Programs a multiprocessor."""
    num_warps: int
    num_stages: int
    """Rows that are loaded before they are needed, and this one."""


def warps_for(elements: int, most: int = 16) -> int:
    """So many that a thread has eight elements: 16 bytes of half precision."""
    return min(max(elements // 256, 1), most)


def tile_for(width: int, largest: int = 1024) -> Tile:
    """For stretches of a row of ``width`` elements."""
    block = min(triton.next_power_of_2(width), largest)
    return Tile(block, warps_for(block))


def num_programs(rows: int, device: torch.device, shared: Shared) -> int:
    """Programs in all, no more than there are rows."""
    return min(rows, shared.per_processor * _num_processors(device))


@cache
def _num_processors(device: torch.device) -> int:
    # Triton's interpreter gives CPU tensors.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
