"""Work on large matrices in blocks of rows that stay in the cache."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from burnish.utils.torch_functional import at_least_fp32

ROWS = 64
"""Rows of a block of whole rows."""

# More would wait for the interpreter, which starts every operation.
_MAX_THREADS = 16


def over_rows(work: Callable[[slice], None], matrix: Tensor, size: int = ROWS) -> None:
    """Calls ``work`` on blocks of rows of ``matrix``, as `over_blocks` does."""
    over_blocks(work, len(matrix), size, matrix.device)


def over_blocks(work: Callable[[slice], None], total: int, size: int, device: torch.device) -> None:
    """Calls ``work`` on slices that make up ``total``, without gradient; on a CPU on as many threads as torch has.

    torch's own threads meet after every operation. With blocks that fit the cache these are thousands of meetings, and where
    the cores are shared with another process every one of them waits for its turn there. The threads here compute alone,
    and meet once.
    """
    num_threads = torch.get_num_threads()
    if device.type != "cpu":
        size = max(total, 1)
    blocks = [slice(start, min(start + size, total)) for start in range(0, total, size)]

    @torch.no_grad()
    def run(rows: slice) -> None:
        work(rows)

    if num_threads == 1 or len(blocks) <= 1:
        for rows in blocks:
            run(rows)
        return
    workers = min(num_threads, len(blocks), _MAX_THREADS)
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            # Listed to raise what a block has raised.
            list(pool.map(run, blocks))
    finally:
        # A thread's setting becomes that of the threads that are started after it.
        torch.set_num_threads(num_threads)


def zeroed_outside(mask: Bool[Tensor, "*shape"], block: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """``block`` in fp32 or wider where ``mask`` is True, and 0 elsewhere, whatever is there: a faster ``torch.where``.

    That branches for every number, and guesses wrong where a mask has gaps. And-ing the bits with ones or with zeros does not.
    """
    block = at_least_fp32(block)
    bits = torch.int64 if block.dtype == torch.float64 else torch.int32
    # -1 is all ones. By way of bytes, from which torch converts several at a time.
    ones_inside = mask.view(torch.uint8).to(bits).neg_()
    return ones_inside.bitwise_and_(block.view(bits)).view(block.dtype)


def row_lengths(mask: Bool[Tensor, "batch response"]) -> Int[Tensor, " batch"]:
    """Tokens of ``mask`` in each row."""
    lengths = torch.empty(len(mask), dtype=torch.int64, device=mask.device)

    def count(rows: slice) -> None:
        # torch makes numbers of all that it sums up before it does so: eight bytes for each token.
        lengths[rows] = mask[rows].sum(dim=1)

    over_rows(count, mask)
    return lengths
