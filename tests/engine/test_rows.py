"""What a batch's rows become when they are packed, against the definition written out row by row."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.engine.rows import Rows
from burnish.model.packing import Packed
from burnish.protocol import DataProto

PROMPT_WIDTH, RESPONSE_WIDTH = 6, 4
# Of each row: a prompt of one token and more, of few different ones, and which of its response's tokens are trained.
Drawn = list[tuple[list[int], list[bool]]]
DRAWN = st.lists(
    st.tuples(
        st.lists(st.integers(1, 2), min_size=1, max_size=3),
        st.lists(st.booleans(), max_size=RESPONSE_WIDTH) | st.just([True] * RESPONSE_WIDTH),
    ),
    min_size=1,
    max_size=12,
)


def batch_of(drawn: Drawn, padding: int = 0) -> DataProto:
    """Prompts padded on the left, by ``padding`` columns more than they need; responses on the right."""
    width, rows = PROMPT_WIDTH + padding, len(drawn)
    ids = torch.zeros(rows, width + RESPONSE_WIDTH, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    label_mask = torch.zeros(rows, RESPONSE_WIDTH, dtype=torch.int64)
    for row, (prompt, trained) in enumerate(drawn):
        length = len(trained)
        ids[row, width - len(prompt) : width] = torch.tensor(prompt)
        ids[row, width : width + length] = torch.arange(10, 10 + length) + 10 * row
        mask[row, width - len(prompt) : width + length] = 1
        label_mask[row, :length] = torch.tensor(trained, dtype=torch.int64)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": mask,
            "responses": ids[:, width:],
            "response_mask": label_mask,
        }
    )


def seen_by(packed: Packed, place: int) -> list[tuple[int, int]]:
    """(token, position) of everything that the token at ``place`` sees, itself included."""
    begin = 0
    for length, (first, prefix) in zip(packed.context.lengths, packed.context.prefixes, strict=True):
        if place < begin + length:
            places = [*range(first, first + prefix), *range(begin, place + 1)]
            return [(int(packed.input_ids[0, x]), int(packed.position_ids[0, x])) for x in places]
        begin += length
    raise AssertionError("no segment has it")


@settings(max_examples=150, deadline=None)
@given(DRAWN, st.booleans())
def test_every_label_is_predicted_from_its_own_rows_tokens(drawn: Drawn, share: bool) -> None:
    packed = Rows(batch_of(drawn), share).pack(list(range(len(drawn))), torch.device("cpu"))
    labels = {
        (int(row), int(column)): index
        for index, (row, column) in enumerate(zip(packed.rows, packed.columns, strict=True))
    }
    expected = {
        (row, column) for row, (_, trained) in enumerate(drawn) for column, is_it in enumerate(trained) if is_it
    }
    assert set(labels) == expected
    for (row, column), index in labels.items():
        tokens = [*drawn[row][0], *range(10 + 10 * row, 10 + 10 * row + column)]
        assert seen_by(packed, int(packed.label_positions[index])) == list(zip(tokens, range(len(tokens)), strict=True))
        assert int(packed.labels[index]) == 10 + 10 * row + column
    if share and expected:
        shared = {tuple(prompt) for prompt, trained in drawn if any(trained)}
        # The last label of each row: as many tokens of its response are computed as lie before it.
        last = dict(sorted(expected))
        assert packed.num_tokens == sum(last.values()) + sum(map(len, shared))


def as_lists(packed: Packed) -> list[Any]:
    tensors = (
        packed.input_ids,
        packed.position_ids,
        packed.labels,
        packed.rows,
        packed.columns,
        packed.label_positions,
    )
    return [*(tensor.tolist() for tensor in tensors), packed.context.lengths, packed.context.prefixes]


@settings(max_examples=50, deadline=None)
@given(DRAWN, st.integers(1, 9), st.randoms(use_true_random=False))
def test_columns_that_only_pad_change_nothing(drawn: Drawn, padding: int, random: Any) -> None:
    random.shuffle(drawn)
    rows = list(range(len(drawn)))
    plain, padded = (Rows(batch_of(drawn, more), True).pack(rows, torch.device("cpu")) for more in (0, padding))
    assert as_lists(plain) == as_lists(padded)


@pytest.mark.parametrize("share", [True, False, None])
@pytest.mark.parametrize("response_width", [0, 3])
@pytest.mark.parametrize("num_rows", [0, 2])
def test_rows_without_a_token_are_one_token_and_no_label(
    num_rows: int, response_width: int, share: bool | None
) -> None:
    ids = torch.zeros(num_rows, 2 + response_width, dtype=torch.int64)
    tensors = {"input_ids": ids, "attention_mask": ids, "responses": ids[:, 2:], "response_mask": ids[:, 2:]}
    rows = Rows(DataProto.from_dict(tensors=tensors), share)
    packed = rows.pack(list(range(num_rows)), torch.device("cpu"))
    assert rows.lengths == [0] * num_rows
    assert (packed.num_tokens, packed.labels.tolist(), packed.shape) == (1, [], (num_rows, response_width))


@settings(max_examples=100, deadline=None)
@given(DRAWN)
def test_the_keys_of_a_segment_are_its_prefix_and_its_own(drawn: Drawn) -> None:
    context = Rows(batch_of(drawn), True).pack(list(range(len(drawn))), torch.device("cpu")).context
    index, ends, begin = [], [0], 0
    for length, (first, prefix) in zip(context.lengths, context.prefixes, strict=True):
        index += [*range(first, first + prefix), *range(begin, begin + length)]
        begin += length
        ends.append(len(index))
    assert context.keys.gather.index_on_host.tolist() == index
    assert context.keys.cu_seqlens.tolist() == ends
    assert context.keys.max_seqlen == max(b - a for a, b in pairwise(ends))
    pairs = sum(
        length * prefix + length * (length + 1) // 2
        for length, (_, prefix) in zip(context.lengths, context.prefixes, strict=True)
    )
    assert context.num_pairs == pairs
