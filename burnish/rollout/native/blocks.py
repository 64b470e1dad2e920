"""Which blocks of the paged cache are taken, and by how many: plain Python, no tensors."""

import heapq
from collections.abc import Iterable

from burnish.rollout.native.paged_cache import SCRATCH_BLOCK
from burnish.utils.errors import RolloutError


class NoFreeBlocks(RolloutError):
    """More blocks were asked for than are free; nothing was allocated."""


class BlockManager:
    """Counts the references to blocks ``1 .. num_blocks - 1``; a block without one is free.

    Only the owner of a block's single reference may write into it.

    Args:
        num_blocks: blocks of the cache, the scratch block included.
        block_size: tokens of a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._fresh = SCRATCH_BLOCK + 1  # From here on no block was ever taken.
        self._free: list[int] = []  # Those before it that are free again: a heap.
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + self.num_blocks - self._fresh

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks ``num_tokens`` tokens take."""
        return -(-num_tokens // self.block_size)

    def references(self, block: int) -> int:
        """How many hold ``block``."""
        return self._references[block]

    def free_blocks(self) -> list[int]:
        """The blocks that nobody holds, in order."""
        return [*sorted(self._free), *range(self._fresh, self.num_blocks)]

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` free blocks, the lowest ids first, with one reference each.

        Raises:
            NoFreeBlocks: there are fewer.
        """
        if count > self.num_free:
            raise NoFreeBlocks(
                f"{count} blocks of {self.block_size} tokens are asked for, but {self.num_free} of "
                f"{self.num_blocks - 1} are free. Give the cache more blocks, or run fewer sequences at once."
            )
        free, references, pop = self._free, self._references, heapq.heappop
        taken = [pop(free) for _ in range(min(count, len(free)))]
        end = self._fresh + count - len(taken)
        taken += range(self._fresh, end)
        self._fresh = end
        for block in taken:
            references[block] = 1
        return taken

    def take(self, blocks: Iterable[int]) -> None:
        """Takes these free blocks. The time goes with the number of all free ones, unlike that of `allocate`.

        Raises:
            RolloutError: one is not free.
        """
        free, wanted = self.free_blocks(), set(blocks)
        if not wanted <= set(free):
            raise RolloutError(f"Blocks {sorted(wanted - set(free))} cannot be taken: they are not free.")
        self._free, self._fresh = [block for block in free if block not in wanted], self.num_blocks
        for block in wanted:
            self._references[block] = 1

    def share(self, blocks: Iterable[int], times: int = 1) -> None:
        """``times`` more references to each of ``blocks``.

        Raises:
            RolloutError: nobody holds one of them.
        """
        references = self._references
        for block in blocks:
            if not references[block]:
                raise RolloutError(f"Block {block} cannot be shared: nobody holds it. Allocate it first.")
            references[block] += times

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each of ``blocks``; without any left a block is free.

        Raises:
            RolloutError: nobody holds one of them.
        """
        references, free, push = self._references, self._free, heapq.heappush
        for block in blocks:
            if not references[block]:
                raise RolloutError(f"Block {block} cannot be released: nobody holds it. It was released twice.")
            references[block] -= 1
            if not references[block]:
                push(free, block)
