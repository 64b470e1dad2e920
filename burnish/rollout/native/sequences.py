"""A response in the making, and the groups in which they wait: plain Python, no tensors."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import NamedTuple

from burnish.rollout.base import RolloutRequest, SamplingParams
from burnish.rollout.native.blocks import BlockManager


@dataclass(slots=True, eq=False)
class Sequence:
    """One response in the making."""

    request: RolloutRequest
    sampling: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    """What it has sampled. While it runs, newer tokens are elsewhere; they are here again when it leaves its row."""
    log_probs: list[float] = field(default_factory=list)
    truncated_log_probs: list[float] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    """[policy version, number of tokens] of each stretch that one policy sampled."""
    blocks: list[int] = field(default_factory=list)
    """While it runs: where its keys and values are."""
    num_cached: int = 0
    """Tokens that the cache held when it started to run."""
    num_preemptions: int = 0
    start_number: int = 0
    """Of those that run, the one with the lowest started first."""
    siblings: dict["Sequence", None] = field(default_factory=dict, repr=False)
    """Those with the same prompt that run now, in order of start; one dictionary for all of them."""

    @property
    def prompt_ids(self) -> Tokens[int]:
        """The prompt's token ids."""
        return self.request.prompt_ids

    @property
    def context(self) -> list[int]:
        """The prompt and what was sampled: all of it but the last token is in the cache when it starts to run."""
        return [*self.request.prompt_ids, *self.token_ids]

    @property
    def max_tokens(self) -> int:
        """The most tokens that it can have, prompt included."""
        return len(self.request.prompt_ids) + self.sampling.max_new_tokens


class PrefillChunk(NamedTuple):
    """Tokens to be computed and stored: those from ``start`` on of a prefix, as many as ``token_ids`` has."""

    token_ids: Tokens[int]
    start: int
    """Tokens of the prefix that the cache holds already."""
    blocks: list[int]
    """Of the whole prefix."""


class BlockCopy(NamedTuple):
    """The first ``num_tokens`` tokens of block ``source`` are to be copied to block ``target``."""

    source: int
    target: int
    num_tokens: int


class PrefixGroup:
    """Waiting sequences with the same context, which share the cached prefix ``context[:-1]``.

    Attributes:
        key: under which others find and join it.
        num_prefix: tokens of the prefix.
        blocks: the prefix's, once it has some.
        num_filled: tokens of the prefix that are in the cache.
        max_tokens: of the member that can become longest.
        grows: whether a member may outgrow the blocks with which it starts.
    """

    __slots__ = (
        "_num_full",
        "_partial",
        "_size",
        "blocks",
        "context",
        "grows",
        "key",
        "max_tokens",
        "num_filled",
        "num_prefix",
        "waiting",
    )

    def __init__(self, context: Tokens[int], block_size: int, key: int = 0) -> None:
        self.context = context
        self.key = key
        self.num_prefix = len(context) - 1
        self.waiting: list[Sequence] = []
        self.blocks: list[int] = []
        self.num_filled = 0
        self.max_tokens = 0
        self.grows = False
        self._size = block_size
        self._num_full, self._partial = divmod(self.num_prefix, block_size)

    def append(self, sequence: Sequence) -> None:
        """One more member."""
        self.waiting.append(sequence)
        self.max_tokens = max(self.max_tokens, sequence.max_tokens)
        self.grows = self.max_tokens > (self._num_full + 1) * self._size

    def has_context(self, context: Tokens[int]) -> bool:
        """Whether its members' context is this one."""
        mine = self.context
        return mine is context or (
            mine == context if type(mine) is type(context) is list else tuple(mine) == tuple(context)
        )

    @property
    def num_prefix_blocks(self) -> int:
        """Blocks of the whole prefix."""
        return self._num_full + (self._partial > 0)

    def blocks_to_start(self, count: int) -> int:
        """New blocks for ``count`` members: one each, but the last of all takes the partial block over."""
        return count - (self._partial > 0 and count == len(self.waiting))

    def cost(self, count: int) -> int:
        """`blocks_to_start`, and one more for each that may outgrow them."""
        return count + count * self.grows - (self._partial > 0 and count == len(self.waiting))

    def num_startable(self, rows: int, room: int) -> int:
        """How many members can start with that many rows and blocks, if each needs what `cost` says."""
        count = min(rows, len(self.waiting))
        return count if self.cost(count) <= room else max(0, room // (1 + self.grows))

    def hand_out(
        self, manager: BlockManager, count: int, *, all_of_it: bool
    ) -> tuple[list[list[int]], list[BlockCopy]]:
        """The blocks of ``count`` sequences that start: full blocks shared, the partial one copied.

        Args:
            all_of_it: the last of them takes the group's own references over, and the group has none any more.

        Returns:
            blocks, one list a sequence, and the copies to be made.
        """
        num_sharing = count - all_of_it
        new = manager.allocate(num_sharing if self._partial else count)
        tables: list[list[int]] = []
        copies: list[BlockCopy] = []
        if num_sharing:
            full = self.blocks[: self._num_full]
            manager.share(full, num_sharing)
            tables = [[*full, block] for block in new[:num_sharing]]
            if self._partial:
                copies = [BlockCopy(self.blocks[-1], block, self._partial) for block in new]
        if all_of_it:
            tables.append(self.blocks + new[num_sharing:])
            self.blocks, self.num_filled = [], 0
        return tables, copies

    def drop(self, manager: BlockManager) -> None:
        """Gives the prefix's blocks back; it is to be filled again."""
        manager.release(self.blocks)
        self.blocks, self.num_filled = [], 0
