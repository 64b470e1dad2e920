"""Metrics of micro-batches as tensors on the device, put together without waiting for it."""

import torch
from torch import Tensor


def combine_shares(name: str, a: Tensor, b: Tensor) -> Tensor:
    """As `ranks.combine`, on tensors: a float would synchronise the device after every micro-batch."""
    if name.endswith("_max"):
        return torch.maximum(a, b)
    if name.endswith("_min"):
        return torch.minimum(a, b)
    return a + b


def to_floats(shares: dict[str, Tensor]) -> dict[str, float]:
    """In one look at the device; a loss of the user's own may give numbers, which are on the CPU."""
    on_device = {name: share for name, share in shares.items() if share.device.type != "cpu"}
    floats = {name: float(share) for name, share in shares.items() if name not in on_device}
    if on_device:
        floats |= dict(zip(on_device, torch.stack(list(on_device.values())).tolist(), strict=True))
    return {name: floats[name] for name in shares}
