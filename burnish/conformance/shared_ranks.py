"""Ranks that are threads of this process: what a preparation over several ranks decides, without starting processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from burnish.core_algos.collectives import Collective

T = TypeVar("T")

_PATIENCE_S = 20.0


def on_ranks(num_ranks: int, work: Callable[[int, Collective], T]) -> list[T]:
    """``work(rank, collective)`` on every rank at once; the results in the order of the ranks.

    A rank that raises, or does not come to where the others meet, ends all of them.
    """
    meeting = _Meeting(num_ranks)

    def on_rank(rank: int) -> T:
        try:
            return work(rank, _Rank(meeting, rank))
        except BaseException:
            # The others would wait for it in vain.
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(on_rank, rank) for rank in range(num_ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        # Who waited in vain knows nothing; another one says why.
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return [future.result() for future in futures]


class _Meeting:
    """Where all ranks lay down what they have and read what the others have."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=_PATIENCE_S)
        self.brought: list[Tensor] = [torch.empty(0)] * num_ranks

    def exchange(self, rank: int, values: Tensor) -> list[Tensor]:
        self.brought[rank] = values
        self.barrier.wait()
        everything = list(self.brought)
        # Nobody may bring the next thing before all have read this one.
        self.barrier.wait()
        return everything


class _Rank:
    """A `Collective` of one rank."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    def sum(self, values: Tensor) -> Tensor:
        return torch.stack(self._meeting.exchange(self._rank, values.double())).sum(dim=0)

    def gather(self, values: Tensor) -> Tensor:
        return torch.cat(self._meeting.exchange(self._rank, values))
