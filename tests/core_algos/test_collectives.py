"""The interface to the other ranks: one rank, and the ranks of threads that other tests stand on."""

import pytest
import torch

from burnish.conformance.shared_ranks import on_ranks
from burnish.core_algos.collectives import ONE_RANK, Collective


def test_one_rank_is_the_whole_mini_batch():
    values = torch.tensor([1.0, 2.0])
    assert isinstance(ONE_RANK, Collective)
    assert ONE_RANK.sum(values).dtype == torch.float64
    assert ONE_RANK.sum(values).tolist() == [1.0, 2.0]
    assert ONE_RANK.gather(values).tolist() == [1.0, 2.0]


def test_ranks_get_the_same_sums_and_one_list_in_the_order_of_the_ranks():
    def both(rank: int, collective: Collective):
        assert isinstance(collective, Collective)
        total = collective.sum(torch.tensor([1.0, 10.0 * rank]))
        # A different number from each rank, none from the first.
        return total.tolist(), collective.gather(torch.arange(rank) + 100.0 * rank).tolist()

    assert on_ranks(3, both) == [([3.0, 30.0], [100.0, 200.0, 201.0])] * 3


def test_an_error_of_one_rank_ends_all():
    def fails(rank: int, collective: Collective):
        if rank == 1:
            raise ValueError("rank 1")
        return collective.sum(torch.ones(1))

    with pytest.raises(ValueError, match="rank 1"):
        on_ranks(2, fails)
