"""Which sequences run, wait and prefill, and which blocks of the paged cache they hold: plain Python, no tensors."""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Tokens

from burnish.rollout.native.blocks import BlockManager
from burnish.rollout.native.compaction import compact
from burnish.rollout.native.sequences import BlockCopy, PrefillChunk, PrefixGroup, Sequence
from burnish.utils.errors import RolloutError

__all__ = ["BlockCopy", "PrefillChunk", "Scheduler", "Sequence"]


class Scheduler:
    """Continuous refill, first come first served, over a paged cache that may be too small for all that runs.

    A round is: ``next_prefill`` and ``start`` in turn until neither gives anything, ``grow``, decode steps, ``release``.
    Block copies are to be made at once, before the next call.

    Sequences with the same context form a group, which is prefilled once: full blocks of the prefix are shared, the last
    partial one is copied for each sequence that starts; the last to start takes it over. A group is closed when its
    prefill begins, so that later arrivals cannot keep it ahead of others for ever.

    The order is total: running sequences in their order of start, then waiting groups. Where blocks run out, the last in
    that order gives way first: prefixes that only wait, then the youngest running sequence, which goes to the front of
    the waiting ones. Nobody overtakes a group that does not fit.

    A sequence starts beside others only if each running sequence that may outgrow its blocks, itself included, then
    finds one more free block. So a window of up to ``block_size`` steps never preempts what has just started: nobody is
    preempted more often than it has run windows, and the oldest is never preempted.

    Args:
        blocks: of the cache.
        max_running: sequences that run at the same time.
        max_prefill_tokens: tokens of one prefill.
        chunked: a prefill may continue a prefix that is partly in the cache. Then a longer prefix is cut, and one whose
            prompt a running sequence has too takes the prompt's full blocks from there. Else a longer one goes alone.
    """

    def __init__(self, blocks: BlockManager, max_running: int, max_prefill_tokens: int, chunked: bool = True) -> None:
        self._blocks = blocks
        self._max_running = max_running
        self._max_prefill_tokens = max_prefill_tokens
        self._chunked = chunked
        self._running: dict[Sequence, int] = {}  # In order of start; the most blocks that each can need.
        self._ready: deque[PrefixGroup] = deque()  # Prefix filled; before all of the queue.
        self._queue: deque[PrefixGroup] = deque()
        self._open: dict[int, PrefixGroup] = {}  # By the hash of the context.
        self._num_waiting = 0
        self._num_started = 0
        self._promised: tuple[int, int] | None = None  # What `_promises` gave last, while it holds.

    @property
    def num_running(self) -> int:
        """Sequences that run."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not run yet, or not any more."""
        return self._num_waiting

    @property
    def done(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._running and not self._num_waiting

    @property
    def running(self) -> list[Sequence]:
        """The sequences that run, in order of start."""
        return list(self._running)

    @property
    def groups(self) -> list[PrefixGroup]:
        """The waiting sequences, in the order in which they will start."""
        return [*self._ready, *self._queue]

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Lets sequences wait, the first ones first."""
        # Samples of one prompt often hold the same list; then its tokens need not be hashed again.
        by_identity: dict[int, PrefixGroup] = {}
        for sequence in sequences:
            prompt = sequence.request.prompt_ids
            if sequence.token_ids:
                group = self._group_of(sequence.context)
            else:
                known = by_identity.get(id(prompt))
                group = by_identity[id(prompt)] = known or self._group_of(prompt)
            if group.waiting:
                sequence.siblings = group.waiting[0].siblings
            group.append(sequence)
            self._num_waiting += 1

    def _group_of(self, context: Tokens[int]) -> PrefixGroup:
        """The open group of that context; a new one at the end of the queue if there is none."""
        key = hash(tuple(context))
        group = self._open.get(key)
        if group is None or not group.has_context(context):
            group = self._open[key] = PrefixGroup(context, self._blocks.block_size, key)
            self._queue.append(group)
        return group

    def next_prefill(self) -> list[PrefillChunk]:
        """Prefixes, or a part of one, that are to be filled now; they count as filled from the next call on.

        At most ``max_prefill_tokens`` tokens, except for one longer prefix where prefixes cannot be cut. Empty if no
        prefix needs to be filled, or rows or blocks are lacking.
        """
        chunks: list[PrefillChunk] = []
        budget = self._max_prefill_tokens
        while self._queue:
            group = self._queue[0]
            # A longer prefix than this call still takes waits for the next; only one longer than a whole prefill is cut.
            if chunks and group.num_prefix - group.num_filled > budget:
                break
            if not group.blocks and not self._admit(group):
                break
            start, end = group.num_filled, group.num_prefix
            if self._chunked:
                end = min(end, start + budget)
            if end > start:
                chunks.append(PrefillChunk(group.context[start:end], start, list(group.blocks)))
                group.num_filled = end
                budget -= end - start
            if end < group.num_prefix:
                break
            self._promise(group)
            self._ready.append(self._queue.popleft())
        return chunks

    def start(self) -> tuple[list[Sequence], list[BlockCopy]]:
        """Sequences that run from now on, and the copies that give each of them its own last block.

        Each has room for one more token at least.
        """
        started: list[Sequence] = []
        copies: list[BlockCopy] = []
        growing = self._num_growing() if self._ready else 0
        while self._ready and len(self._running) < self._max_running:
            group = self._ready[0]
            count, alone = 1, False
            if self._running:
                rows = self._max_running - len(self._running)
                count = group.num_startable(rows, self._blocks.num_free - growing)
            else:
                self._drop_prefixes(group.blocks_to_start(1), keep=group)
                # Without one free block it runs in the prefix's own; the rest of the group prefill theirs again.
                alone = group.blocks_to_start(1) > self._blocks.num_free
            if not count:
                break
            growing += count * group.grows
            last = alone or count == len(group.waiting)
            tables, new_copies = group.hand_out(self._blocks, count, all_of_it=last)
            copies += new_copies
            for sequence, blocks in zip(group.waiting, tables, strict=False):
                self._run(sequence, blocks, group.num_prefix)
                started.append(sequence)
            del group.waiting[:count]
            if last:
                self._ready.popleft()
                self._queue.extendleft([group] if group.waiting else [])
        self._num_waiting -= len(started)
        self._promised = None
        return started, copies

    def _run(self, sequence: Sequence, blocks: list[int], num_cached: int) -> None:
        sequence.blocks, sequence.num_cached = blocks, num_cached
        sequence.siblings[sequence] = None
        sequence.start_number = self._num_started = self._num_started + 1
        self._running[sequence] = self._blocks.blocks_for(sequence.max_tokens)

    def grow(self, needs: Iterable[tuple[Sequence, int]]) -> list[Sequence]:
        """Gives running sequences room for that many tokens in all.

        Returns:
            Sequences that had to be preempted for it: they run no more and hold no blocks. `requeue` them, all at once,
            when their tokens are written back.

        Raises:
            NoFreeBlocks: the only running sequence does not fit into the whole cache.
        """
        size = self._blocks.block_size
        missing: dict[Sequence, int] = {}
        for sequence, num_tokens in needs:
            count = -(-num_tokens // size) - len(sequence.blocks)
            if count > 0:
                missing[sequence] = count
        if not missing:
            return []
        self._promised = None
        total = sum(missing.values())
        preempted: list[Sequence] = []
        self._drop_prefixes(total)
        while total > self._blocks.num_free and len(self._running) > 1:
            youngest = next(reversed(self._running))
            self._leave(youngest)
            preempted.append(youngest)
            total -= missing.pop(youngest, 0)
        taken = self._blocks.allocate(total)
        place = 0
        for sequence, count in missing.items():
            sequence.blocks += taken[place : place + count]
            place += count
        return preempted[::-1]

    def requeue(self, sequences: Iterable[Sequence]) -> None:
        """Lets preempted sequences wait before all others, as they once started; running ones give up their blocks."""
        groups: dict[tuple[int, ...], PrefixGroup] = {}
        for sequence in sorted(sequences, key=lambda one: one.start_number):
            if sequence in self._running:
                self._leave(sequence)
            sequence.num_preemptions += 1
            context = tuple(sequence.context)
            group = groups.get(context)
            if group is None:
                group = groups[context] = PrefixGroup(context, self._blocks.block_size)
            group.append(sequence)
            self._num_waiting += 1
        # Filled prefixes stay filled, but whoever comes back starts before them.
        self._queue.extendleft(reversed(self._ready))
        self._ready.clear()
        self._queue.extendleft(reversed(groups.values()))
        self._promised = None

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Takes the blocks of running sequences that are finished or aborted.

        Raises:
            RolloutError: one does not run.
        """
        for sequence in sequences:
            if sequence not in self._running:
                raise RolloutError(
                    f"Request {sequence.request.request_id!r} does not run, so it cannot be released; waiting sequences "
                    f"are taken out by take_waiting."
                )
            self._leave(sequence)

    def take_waiting(self, request_ids: Iterable[str]) -> list[Sequence]:
        """Removes waiting sequences, and prefixes that nobody waits for any more."""
        request_ids = set(request_ids)
        taken: list[Sequence] = []
        if not request_ids:
            return taken
        for groups in (self._ready, self._queue):
            for _ in range(len(groups)):
                group = groups.popleft()
                gone = [sequence for sequence in group.waiting if sequence.request.request_id in request_ids]
                if gone:
                    taken += gone
                    group.waiting = [s for s in group.waiting if s.request.request_id not in request_ids]
                if group.waiting:
                    groups.append(group)
                else:
                    self._close(group)
                    group.drop(self._blocks)
        self._num_waiting -= len(taken)
        self._promised = None
        return taken

    def drop_prefixes(self) -> None:
        """Frees the prefixes of waiting sequences; they are filled again. For weights that changed meanwhile."""
        self._drop_prefixes(self._blocks.num_blocks)

    def compact(self) -> list[BlockCopy]:
        """See `burnish.rollout.native.compaction.compact`."""
        return compact(self._blocks, self._running, self.groups)

    def _admit(self, group: PrefixGroup) -> bool:
        """Gives the first group of the queue the blocks of its prefix, if one of it can start then."""
        rows, promised = self._promises()
        rows = self._max_running - len(self._running) - rows
        if rows < 1:
            return False
        shared = self._blocks_of_sibling(group)
        num_new = group.num_prefix_blocks - len(shared)
        count = group.num_startable(rows, self._blocks.num_free - num_new - promised)
        if not count:
            if self._running or self._ready:
                return False
            self._drop_prefixes(num_new)
        if count < len(group.waiting) and num_new and group.max_tokens <= self._blocks.block_size:
            # At the far end, where it does not part the blocks that run.
            new = self._blocks.free_blocks()[-num_new:]
            self._blocks.take(new)
        else:
            new = self._blocks.allocate(num_new)
        self._blocks.share(shared)
        group.blocks = shared + new
        group.num_filled = len(shared) * self._blocks.block_size
        self._close(group)
        return True

    def _blocks_of_sibling(self, group: PrefixGroup) -> list[int]:
        """The prompt's full blocks, where a sequence with the same prompt runs: it writes only behind them."""
        first = group.waiting[0]
        if not self._chunked or not first.siblings:
            return []
        num_full = (len(first.prompt_ids) - 1) // self._blocks.block_size
        return next(iter(first.siblings)).blocks[:num_full]

    def _promises(self) -> tuple[int, int]:
        """Rows that ready groups will take, and blocks for them and for the growth of all that run then."""
        if self._promised is None:
            self._promised = (0, self._num_growing())
            for group in self._ready:
                self._promise(group)
        return self._promised

    def _promise(self, group: PrefixGroup) -> None:
        rows, blocks = self._promises()
        count = max(0, min(len(group.waiting), self._max_running - len(self._running) - rows))
        self._promised = (rows + count, blocks + group.cost(count))

    def _num_growing(self) -> int:
        """Running sequences that may outgrow their blocks."""
        return sum(len(sequence.blocks) < most for sequence, most in self._running.items())

    def _leave(self, sequence: Sequence) -> None:
        """A running sequence runs no more."""
        del self._running[sequence]
        del sequence.siblings[sequence]
        self._blocks.release(sequence.blocks)
        sequence.blocks, sequence.num_cached = [], 0
        self._promised = None

    def _drop_prefixes(self, num_blocks: int, keep: PrefixGroup | None = None) -> None:
        """Takes the blocks of waiting groups, the last first, until ``num_blocks`` are free."""
        if self._blocks.num_free >= num_blocks:
            return
        self._promised = None
        for group in reversed(self._queue):
            group.drop(self._blocks)
            if self._blocks.num_free >= num_blocks:
                return
        while self._blocks.num_free < num_blocks and self._ready and self._ready[-1] is not keep:
            group = self._ready.pop()
            group.drop(self._blocks)
            self._queue.appendleft(group)

    def _close(self, group: PrefixGroup) -> None:
        """Nobody joins the group any more."""
        if self._open.get(group.key) is group:
            del self._open[group.key]
