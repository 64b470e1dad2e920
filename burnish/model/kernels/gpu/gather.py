"""The sum over the places that read a row: one program a row, so that no two add to one number."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.model.kernels.gpu.launch import tile_for


def add_up(grad: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    """Row r of the result is the sum of ``grad[places[ends[r]:ends[r + 1]]]``, in float32 and in this order.

    Args:
        grad: [places, ...].
        places: int64, the places of each row, one row after the other.
        ends: int64 [rows + 1].

    Returns:
        [rows, ...] in the dtype of ``grad``.
    """
    flat = grad.flatten(1).contiguous()
    num_rows, width = len(ends) - 1, flat.shape[1]
    out = torch.empty(num_rows, width, dtype=grad.dtype, device=grad.device)
    if num_rows:
        block, num_warps = tile_for(width)
        _add_up[(num_rows, triton.cdiv(width, block))](
            flat, places, ends, out, WIDTH=width, BLOCK=block, num_warps=num_warps
        )
    return out.view(num_rows, *grad.shape[1:])


@triton.jit
def _add_up(grad, places, ends, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(tl.load(ends + row), tl.load(ends + row + 1)):
        place = tl.load(places + i)
        total += tl.load(grad + place * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, total.to(out.dtype.element_ty), mask=inside)
