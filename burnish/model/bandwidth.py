"""How fast a device's memory is: what decoding, which reads all weights for a few tokens, is measured against."""

import time
from functools import cache

import torch

from burnish.utils.device_table import find_device

# Bytes that are copied to measure a device: more than its caches hold.
_COPIED_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}


def device_bandwidth(device: torch.device) -> float:
    """Bytes per second that ``device`` can read and write: its data sheet's, or else `measured_bandwidth`."""
    if device.type == "cuda":
        known = find_device(torch.cuda.get_device_name(device))
        if known is not None:
            return known.bandwidth
    return measured_bandwidth(device, torch.get_num_threads() if device.type == "cpu" else 0)


@cache
def measured_bandwidth(device: torch.device, num_threads: int = 0) -> float:
    """Bytes per second of one large copy, reading and writing counted; the best of three, some tenths of a second, once a
    process.

    Args:
        num_threads: of a CPU; a bandwidth holds for as many threads as it was measured with.
    """
    num_bytes = _COPIED_BYTES.get(device.type, 128 << 20)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    # The first is the warm-up, in which memory is touched.
    for attempt in range(4):
        _wait_for(device)
        start = time.perf_counter()
        target.copy_(source)
        _wait_for(device)
        if attempt:
            best = min(best, time.perf_counter() - start)
    return 2.0 * num_bytes / best


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
