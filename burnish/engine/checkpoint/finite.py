"""Whether a model and its optimizer hold anything that is not finite."""

import math

import torch
from torch import Tensor

from burnish.engine import ranks
from burnish.engine.layout import Layout, local_parts
from burnish.engine.optimizer import MasterOptimizer


def non_finite(layout: Layout, optimizer: MasterOptimizer | None, device: torch.device) -> list[str]:
    """Names of the weights, masters and moments that hold NaN or infinity on any rank; all ranks call it and get the same."""
    parts = local_parts(layout) | ({} if optimizer is None else optimizer.moments())
    # By their largest entry: one pass over the memory, and one look at the device for all of them.
    held = [name for name, part in parts.items() if part.numel() and part.is_floating_point()]
    largest = _largest([parts[name] for name in held])
    broken = dict.fromkeys(parts, 0.0)
    if largest:
        finite = torch.stack([value.double().to(device) for value in largest]).isfinite().tolist()
        broken |= {name: float(not is_finite) for name, is_finite in zip(held, finite, strict=True)}
    anywhere = ranks.all_reduce_numbers(list(broken.values()), "max", device)
    return [name for name, flag in zip(broken, anywhere, strict=True) if flag]


def _largest(parts: list[Tensor]) -> list[Tensor]:
    """The largest absolute value of each tensor; NaN where one holds that."""
    if all(part.device.type == "cpu" for part in parts):
        # Some twenty times faster there than a norm, which has no vector instructions for this one.
        extremes = [torch.aminmax(part) for part in parts]
        return [torch.maximum(-low, high) for low, high in extremes]
    return list(torch._foreach_norm(parts, math.inf))
