"""Every row is in exactly one micro-batch, and the token bound holds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.engine.micro_batches import split_by_tokens, split_rows
from burnish.utils.errors import ConfigError


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=60), st.integers(50, 120))
def test_every_row_is_once_in_a_micro_batch_within_the_bound(lengths: list[int], bound: int) -> None:
    micro_batches = split_by_tokens(lengths, bound)
    assert sorted(row for rows in micro_batches for row in rows) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in rows) <= bound for rows in micro_batches)
    assert all(rows == sorted(rows) for rows in micro_batches)
    # Two micro-batches that would fit into one are a wasted pass.
    loads = sorted(sum(lengths[row] for row in rows) for rows in micro_batches)
    assert len(loads) < 2 or loads[0] + loads[1] > bound or loads[0] == 0


def test_a_row_longer_than_the_bound_is_an_error_that_names_both() -> None:
    with pytest.raises(ConfigError, match=r"max_token_len=10 tokens, but row 1 alone has 12"):
        split_by_tokens([3, 12, 5], 10)


def test_rows_are_counted_off_in_their_order() -> None:
    assert split_rows([1] * 5, micro_batch_size=2) == [[0, 1], [2, 3], [4]]
    assert split_rows([1] * 3) == [[0, 1, 2]]
    assert split_rows([], micro_batch_size=2) == []


def test_log_normal_lengths_fill_the_bound() -> None:
    import random

    source = random.Random(0)
    lengths = [min(2000, int(source.lognormvariate(5.5, 0.8)) + 1) for _ in range(2000)]
    micro_batches = split_by_tokens(lengths, 8192)
    assert sum(lengths) / (8192 * len(micro_batches)) > 0.95
