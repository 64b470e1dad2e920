"""Blocks: lowest first, free exactly when nobody holds them, and never released twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.rollout.native.blocks import BlockManager, NoFreeBlocks
from burnish.rollout.native.paged_cache import SCRATCH_BLOCK
from burnish.utils.errors import RolloutError


def test_the_lowest_free_blocks_are_allocated_and_the_scratch_block_never() -> None:
    blocks = BlockManager(num_blocks=6, block_size=4)
    assert blocks.num_free == 5
    assert blocks.allocate(5) == [1, 2, 3, 4, 5]
    assert SCRATCH_BLOCK not in range(1, 6)
    blocks.release([4, 2, 5])
    assert blocks.allocate(2) == [2, 4]


def test_a_shared_block_is_free_when_its_last_holder_releases_it() -> None:
    blocks = BlockManager(4, 4)
    [block] = blocks.allocate(1)
    blocks.share([block])
    assert blocks.references(block) == 2
    blocks.release([block])
    assert blocks.num_free == 2
    blocks.release([block])
    assert blocks.num_free == 3


def test_too_large_an_allocation_says_so_and_takes_nothing() -> None:
    blocks = BlockManager(4, 16)
    with pytest.raises(NoFreeBlocks, match="4 blocks of 16 tokens are asked for, but 3 of 3 are free"):
        blocks.allocate(4)
    assert blocks.allocate(3) == [1, 2, 3]


def test_a_block_that_nobody_holds_can_be_neither_released_nor_shared() -> None:
    blocks = BlockManager(4, 4)
    taken = blocks.allocate(1)
    blocks.release(taken)
    with pytest.raises(RolloutError, match="released twice"):
        blocks.release(taken)
    with pytest.raises(RolloutError, match="nobody holds it"):
        blocks.share(taken)


def test_named_blocks_are_taken_only_if_all_of_them_are_free() -> None:
    blocks = BlockManager(6, 4)
    blocks.take([5, 3])
    assert blocks.free_blocks() == [1, 2, 4]
    with pytest.raises(RolloutError, match=r"\[3\] cannot be taken"):
        blocks.take([2, 3])
    assert blocks.allocate(3) == [1, 2, 4]


@given(tokens=st.integers(0, 100), size=st.integers(1, 9))
def test_tokens_fill_whole_blocks(tokens: int, size: int) -> None:
    count = BlockManager(2, size).blocks_for(tokens)
    assert (count - 1) * size < tokens <= count * size or tokens == count == 0


@settings(max_examples=100, deadline=None)
@given(num_blocks=st.integers(1, 12), choices=st.randoms(use_true_random=False))
def test_any_use_counts_as_a_plain_list_of_holders_does(num_blocks: int, choices) -> None:
    blocks = BlockManager(num_blocks, 4)
    holders: list[int] = []  # A block once for each of its references.
    for _ in range(60):
        free = [block for block in range(1, num_blocks) if block not in holders]
        action = choices.randrange(4)
        if action == 0 and free:
            count = choices.randint(1, len(free))
            assert blocks.allocate(count) == free[:count]
            holders += free[:count]
        elif action == 1 and free:
            named = choices.sample(free, choices.randint(1, len(free)))
            blocks.take(named)
            holders += named
        elif action == 2 and holders:
            block = choices.choice(holders)
            blocks.share([block])
            holders.append(block)
        elif action == 3 and holders:
            block = choices.choice(holders)
            blocks.release([block])
            holders.remove(block)
        assert [blocks.references(block) for block in range(num_blocks)] == [
            holders.count(block) for block in range(num_blocks)
        ]
        assert blocks.num_free == num_blocks - 1 - len(set(holders))
        assert blocks.free_blocks() == [block for block in range(1, num_blocks) if block not in holders]
