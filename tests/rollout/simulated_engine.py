"""An engine without a model: its cache is a dictionary of tokens, checked after every call of the scheduler."""

from collections import Counter, deque
from collections.abc import Sequence as Tokens
from itertools import count
from random import Random

from burnish.rollout.base import RolloutRequest, SamplingParams
from burnish.rollout.native.blocks import BlockManager
from burnish.rollout.native.scheduler import BlockCopy, PrefillChunk, Scheduler, Sequence

NAMES = count()


def sequence(prompt: Tokens[int], max_new: int = 4) -> Sequence:
    request = RolloutRequest(str(next(NAMES)), prompt, "p", 0)
    return Sequence(request, SamplingParams(max_new_tokens=max_new))


def sequences(number: int, prompt: Tokens[int], max_new: int = 4) -> list[Sequence]:
    return [sequence(prompt, max_new) for _ in range(number)]


class Engine:
    """Rounds of a generation over a dictionary place -> token; every call is followed by a recount of all references."""

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        block_size: int = 4,
        max_running: int = 100,
        budget: int = 1000,
        chunked: bool = True,
        window: int = 1,
    ) -> None:
        self.blocks = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(self.blocks, max_running, budget, chunked)
        self.max_running, self.budget, self.chunked, self.window = max_running, budget, chunked, window
        self.cache: dict[int, int] = {}
        self.new_tokens = count(1000)  # Each is sampled once, so that no stale token can pass for a right one.
        self.rows: list[Sequence] = []
        self.started: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.comes_back: deque[Sequence] = deque()
        self.windows: Counter[Sequence] = Counter()
        self.num_prefilled = 0

    def check(self) -> None:
        """References are those of running sequences and waiting prefixes; what nobody holds is overwritten by others."""
        groups = self.scheduler.groups
        held = Counter(block for owner in (*self.rows, *groups) for block in owner.blocks)
        for block in range(self.blocks.num_blocks):
            assert self.blocks.references(block) == held[block]
        assert self.blocks.num_free == self.blocks.num_blocks - 1 - len(held)
        self.cache = {place: token for place, token in self.cache.items() if held[place // self.blocks.block_size]}
        assert self.scheduler.running == self.rows
        assert self.scheduler.num_running == len(self.rows) <= self.max_running
        assert self.scheduler.num_waiting == sum(len(group.waiting) for group in groups)
        for group in groups:
            assert self.read(group.blocks, group.num_filled) == list(group.context[: group.num_filled])
        for row in self.rows:
            assert self.read(row.blocks, row.num_cached) == row.context[:-1]

    def read(self, blocks: list[int], num_tokens: int) -> list[int]:
        size = self.blocks.block_size
        return [self.cache[blocks[i // size] * size + i % size] for i in range(num_tokens)]

    def write(self, blocks: list[int], position: int, token: int) -> None:
        size = self.blocks.block_size
        block = blocks[position // size]
        assert self.blocks.references(block) == 1
        self.cache[block * size + position % size] = token

    def copy(self, copies: list[BlockCopy]) -> None:
        """All at once, as the cache does."""
        size = self.blocks.block_size
        assert not {copy.source for copy in copies} & {copy.target for copy in copies}
        assert len({copy.target for copy in copies}) == len(copies)
        for copy in copies:
            assert 0 < copy.num_tokens <= size
            for offset in range(copy.num_tokens):
                if copy.source * size + offset in self.cache:
                    self.cache[copy.target * size + offset] = self.cache[copy.source * size + offset]

    def add(self, new: list[Sequence]) -> None:
        self.scheduler.add(new)
        self.check()

    def prefill(self) -> list[PrefillChunk]:
        chunks = self.scheduler.next_prefill()
        lengths = [len(chunk.token_ids) for chunk in chunks]
        assert all(lengths)
        assert sum(lengths) <= self.budget or (len(chunks) == 1 and not self.chunked)
        self.num_prefilled += sum(lengths)
        for chunk in chunks:
            assert self.chunked or chunk.start == 0
            self.read(chunk.blocks, chunk.start)
            for i, token in enumerate(chunk.token_ids):
                self.write(chunk.blocks, chunk.start + i, token)
        self.check()
        return chunks

    def start(self) -> list[Sequence]:
        started, copies = self.scheduler.start()
        self.copy(copies)
        self.rows += started
        for row in started:
            assert len(row.blocks) * self.blocks.block_size > row.num_cached == len(row.context) - 1
            assert not self.comes_back or row is self.comes_back.popleft()
        self.started += started
        self.check()
        return started

    def admit(self) -> None:
        progress = True
        while progress:
            progress = False
            while self.prefill():
                progress = True
            progress |= bool(self.start())

    def grow(self) -> None:
        needs = [
            (row, row.num_cached + min(self.window, row.sampling.max_new_tokens - len(row.token_ids)))
            for row in self.rows
        ]
        before = list(self.rows)
        preempted = self.scheduler.grow(needs)
        self.rows = [row for row in self.rows if row not in preempted]
        assert [*self.rows, *preempted] == before, "the youngest give way"
        assert self.rows or not before
        self.check()
        self.scheduler.requeue(preempted[::-1])  # In any order.
        self.comes_back.extendleft(reversed(preempted))
        self.check()
        for row, num_tokens in needs:
            assert row in preempted or len(row.blocks) * self.blocks.block_size >= num_tokens

    def decode(self, choices: Random, stop: float) -> None:
        """A window of every row; each may stop at any token."""
        ended = []
        for row in self.rows:
            self.windows[row] += 1
            for _ in range(self.window):
                assert self.read(row.blocks, row.num_cached) == row.context[:-1]
                self.write(row.blocks, row.num_cached, row.context[-1])
                row.num_cached += 1
                row.token_ids.append(next(self.new_tokens))
                if len(row.token_ids) == row.sampling.max_new_tokens or choices.random() < stop:
                    ended.append(row)
                    break
        self.end(ended)

    def end(self, ended: list[Sequence]) -> None:
        self.scheduler.release(ended)
        self.rows = [row for row in self.rows if row not in ended]
        self.finished += ended
        self.check()

    def abort(self, doomed: list[Sequence]) -> None:
        ids = {one.request.request_id for one in doomed}
        taken = self.scheduler.take_waiting(ids)
        self.comes_back = deque(one for one in self.comes_back if one not in taken)
        self.finished += taken
        self.check()
        self.end([row for row in self.rows if row.request.request_id in ids])

    def compact(self) -> None:
        self.copy(self.scheduler.compact())
        self.check()

    @property
    def is_dense(self) -> bool:
        ids = [row.blocks[0] for row in self.rows]
        return not ids or max(ids) - min(ids) + 1 == len(ids)

    def round(self, choices: Random, stop: float = 0.0) -> None:
        self.admit()
        assert self.rows
        self.grow()
        self.decode(choices, stop)
