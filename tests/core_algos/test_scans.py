"""Work on blocks of rows: every row once, on threads that leave no trace; and the statistics of groups that it is used for."""

import threading

import pytest
import torch

from burnish.core_algos.blocks import over_rows, row_lengths, zeroed_outside
from burnish.core_algos.groups import Groups
from burnish.core_algos.scans import discounted_sum, rewards_to_go


@pytest.fixture(params=[1, 3])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_row_is_worked_on_once_without_gradient(num_threads):
    seen, names = torch.zeros(1000), set()

    def work(rows: slice) -> None:
        seen[rows] += 1
        names.add(threading.current_thread().name)
        assert not torch.is_grad_enabled()
        assert torch.get_num_threads() == 1

    over_rows(work, seen, 7)
    assert torch.equal(seen, torch.ones(1000))
    assert len(names) <= num_threads
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == num_threads


def test_what_a_block_raises_is_raised_and_the_threads_are_as_before(num_threads):
    def work(rows: slice) -> None:
        if rows.start == 20:
            raise ValueError("row 20")

    with pytest.raises(ValueError, match="row 20"):
        over_rows(work, torch.zeros(50), 10)
    assert torch.get_num_threads() == num_threads


def test_without_rows_there_is_no_work(num_threads):
    over_rows(lambda rows: pytest.fail("called"), torch.zeros(0, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_outside_the_mask_there_is_zero_whatever_was_there(dtype):
    block = torch.tensor([[1.5, torch.nan, -torch.inf], [-2.0, torch.inf, 3.0]], dtype=dtype)
    mask = torch.tensor([[True, False, False], [True, True, False]])
    before = block.clone()
    kept = zeroed_outside(mask, block)
    assert kept.dtype == torch.promote_types(dtype, torch.float32)
    assert kept.tolist() == [[1.5, 0.0, 0.0], [-2.0, torch.inf, 0.0]]
    assert zeroed_outside(mask[:, 1:], block[:, 1:]).tolist() == kept[:, 1:].tolist()
    assert zeroed_outside(mask.T, block.T).tolist() == kept.T.tolist()
    assert torch.equal(block.nan_to_num(9.0), before.nan_to_num(9.0))


def test_rows_are_counted_and_summed_from_the_end():
    mask = torch.rand(300, 20, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(row_lengths(mask), mask.sum(dim=1))
    rewards = torch.tensor([[1.0, 5.0, 2.0], [0.0, 3.0, 9.0]])
    inside = torch.tensor([[True, False, True], [False, True, False]])
    assert rewards_to_go(rewards, inside).tolist() == [[3.0, 2.0, 2.0], [3.0, 3.0, 0.0]]
    assert discounted_sum(rewards, inside, 1.0).tolist() == [[3.0, 0.0, 2.0], [0.0, 3.0, 0.0]]


def test_the_two_greatest_of_a_group_are_equal_where_they_tie():
    values = torch.tensor([1.0, 3.0, 2.0, 2.0, 7.0, 0.5, 2.0])
    groups = Groups.of(["a", "a", "b", "b", "c", "a", "b"], 7, values.device)
    best, second = groups.top_two(values)
    assert best.tolist() == [3.0, 2.0, 7.0]
    assert second.tolist() == [1.0, 2.0, -torch.inf]
    assert groups.is_single.tolist() == [False, False, True]


def test_rows_of_a_group_are_summed_wherever_they_lie():
    matrix = torch.rand(2500, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    groups = Groups.of(torch.arange(2500) % 3, 2500, matrix.device)
    totals = groups.sum_rows(matrix, 2 * matrix)
    want = torch.stack([matrix[group::3].sum(dim=0) for group in range(3)])
    torch.testing.assert_close(totals, (want, 2 * want))
