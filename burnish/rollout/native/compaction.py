"""Moves running sequences that have one block each together, so that attention reads them as one stretch of memory."""

from collections.abc import Collection, Iterable
from itertools import accumulate

from burnish.rollout.native.blocks import BlockManager
from burnish.rollout.native.sequences import BlockCopy, PrefixGroup, Sequence


def compact(manager: BlockManager, running: Collection[Sequence], waiting: Iterable[PrefixGroup]) -> list[BlockCopy]:
    """Moves as few blocks as possible so that those of running sequences follow each other, and says what to copy.

    Nothing is done unless each running sequence has exactly one block, unshared. Waiting prefixes that part them are
    moved out of the way first; then, and where too few blocks are free, more calls are needed. No source is also a
    target. A sequence's copy is as long as a block: how much of it is filled, whoever decodes it knows.
    """
    owners: dict[int, tuple[list[int], int]] = {}  # Where the number of a block is to be changed.
    for sequence in running:
        if len(sequence.blocks) != 1 or manager.references(sequence.blocks[0]) != 1:
            return []
        owners[sequence.blocks[0]] = (sequence.blocks, 0)
    if not owners or max(owners) - min(owners) + 1 == len(owners):
        return []
    movable, free, size = list(owners), manager.free_blocks(), manager.block_size
    window = _best_window(set(movable), set(free), manager.num_blocks)
    filled: dict[int, int] = {}
    for group in waiting:
        for place, block in enumerate(group.blocks):
            owners[block] = (group.blocks, place)
            filled[block] = min(size, group.num_filled - place * size)
    inside, outside = [block for block in free if block in window], [block for block in free if block not in window]
    moves = [
        *zip((block for block in movable if block not in window), inside, strict=False),
        *zip((block for block in filled if block in window), reversed(outside), strict=False),
    ]
    manager.take(target for _, target in moves)
    manager.release(source for source, _ in moves)
    for source, target in moves:
        blocks, place = owners[source]
        blocks[place] = target
    return [BlockCopy(source, target, filled.get(source, size)) for source, target in moves]


def _best_window(running: set[int], free: set[int], num_blocks: int) -> range:
    """As many blocks in a row as run: with the fewest waiting prefixes, then the most running, then the lowest."""
    count, ids = len(running), range(1, num_blocks)
    costs = (-1 if block in running else 0 if block in free else count + 1 for block in ids)
    sums = list(accumulate(costs, initial=0))
    first = min(range(len(sums) - count), key=lambda place: sums[place + count] - sums[place])
    return range(ids[first], ids[first] + count)
