"""Sharing out sequences: complete, bounded, balanced, repeatable."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.utils.errors import BurnishError
from burnish.utils.seqlen_balancing import get_seqlen_balanced_partitions

lengths_lists = st.lists(st.integers(0, 1000), min_size=1, max_size=60)


def sums(lengths, parts):
    return [sum(lengths[index] for index in part) for part in parts]


@given(lengths=lengths_lists, data=st.data())
def test_every_sequence_is_in_exactly_one_part_and_no_part_is_empty(lengths, data):
    parts = get_seqlen_balanced_partitions(lengths, data.draw(st.integers(1, len(lengths))), equal_size=False)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(parts)
    assert all(part == sorted(part) for part in parts)


@given(size=st.integers(1, 6), parts=st.integers(1, 8), data=st.data())
def test_equal_size_gives_every_part_the_same_number(size, parts, data):
    lengths = data.draw(st.lists(st.integers(0, 1000), min_size=size * parts, max_size=size * parts))
    result = get_seqlen_balanced_partitions(lengths, parts, equal_size=True)
    assert [len(part) for part in result] == [size] * parts
    assert sorted(index for part in result for index in part) == list(range(len(lengths)))
    assert max(sums(lengths, result)) - min(sums(lengths, result)) <= max(lengths) - min(lengths)


@given(lengths=lengths_lists, data=st.data())
def test_no_part_exceeds_another_by_more_than_the_longest_sequence(lengths, data):
    parts = get_seqlen_balanced_partitions(lengths, data.draw(st.integers(1, len(lengths))), equal_size=False)
    assert max(sums(lengths, parts)) - min(sums(lengths, parts)) <= max(lengths)


def test_a_known_case_is_solved_as_the_differencing_method_does():
    lengths = [8, 7, 6, 5, 4]
    assert sums(lengths, get_seqlen_balanced_partitions(lengths, 2, equal_size=False)) == [16, 14]


def test_heavy_tails_are_balanced_better_than_by_position():
    lengths = [1000, 900, 10, 10, 800, 700, 10, 10]
    parts = get_seqlen_balanced_partitions(lengths, 4, equal_size=True)
    assert max(sums(lengths, parts)) == 1010


def test_the_same_lengths_give_the_same_parts():
    lengths = [5, 5, 5, 5, 3, 3]
    first = get_seqlen_balanced_partitions(lengths, 3, equal_size=True)
    assert all(get_seqlen_balanced_partitions(lengths, 3, equal_size=True) == first for _ in range(3))


@pytest.mark.parametrize(
    ("lengths", "parts", "equal_size", "words"),
    [
        ([1, 2], 3, False, "2 sequences cannot be shared out to 3 parts"),
        ([1, 2, 3], 2, True, "3 sequences cannot be shared out to 2 parts of equal size"),
        ([1, 2], 0, False, "0 parts"),
        ([1, -2], 1, False, "Sequence 1 has the length -2"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(lengths, parts, equal_size, words):
    with pytest.raises(BurnishError, match=words):
        get_seqlen_balanced_partitions(lengths, parts, equal_size)
