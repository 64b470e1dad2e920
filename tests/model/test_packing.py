"""Packing keeps what labels depend on, in order, and finds the way back."""

import pytest
import torch

from burnish.model.packing import pack, unpack_response
from tests.model.tiny_models import padded_rows


def test_padding_and_tokens_behind_the_last_label_are_not_computed() -> None:
    rows = padded_rows([[5, 6, 7], [8]], [[9, 10], [11, 12, 13]])
    packed = pack(**rows)
    assert packed.input_ids.tolist() == [[5, 6, 7, 9, 8, 11, 12]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert packed.context.lengths == [4, 3]
    assert packed.num_tokens == 7
    assert packed.labels.tolist() == [9, 10, 11, 12, 13]
    assert packed.label_positions.tolist() == [2, 3, 4, 5, 6]


def test_labels_return_to_their_places() -> None:
    packed = pack(**padded_rows([[5, 6, 7], [8]], [[9, 10], [11, 12, 13]]))
    values = unpack_response(packed.labels.double(), packed)
    assert values.tolist() == [[9, 10, 0], [11, 12, 13]]


def test_tokens_that_the_policy_did_not_sample_are_context_and_no_labels() -> None:
    rows = padded_rows([[5]], [[6, 7, 8, 9]])
    rows["label_mask"][0, 1:3] = False
    packed = pack(**rows)
    assert packed.input_ids.tolist() == [[5, 6, 7, 8]]
    assert packed.labels.tolist() == [6, 9]
    assert packed.label_positions.tolist() == [0, 3]


def test_a_row_without_labels_is_skipped() -> None:
    rows = padded_rows([[5, 6], [7, 8], [9]], [[10], [11], [12]])
    rows["label_mask"][1] = False
    packed = pack(**rows)
    assert packed.input_ids.tolist() == [[5, 6, 9]]
    assert unpack_response(packed.labels, packed).tolist() == [[10], [0], [12]]


def test_nothing_to_predict_is_still_a_row_that_runs() -> None:
    rows = padded_rows([[5, 6]], [[10]])
    rows["label_mask"][:] = False
    packed = pack(**rows)
    assert packed.num_tokens == 1
    assert unpack_response(packed.labels.float(), packed).tolist() == [[0.0]]


def test_a_response_without_a_prompt_is_refused() -> None:
    ids = torch.tensor([[0, 4, 5]])
    with pytest.raises(ValueError, match="no token before it"):
        pack(ids, torch.tensor([[0, 1, 1]]).bool(), torch.tensor([[1, 1]]).bool())


def test_a_label_on_padding_is_refused() -> None:
    ids = torch.tensor([[3, 4, 0]])
    with pytest.raises(ValueError, match="padding"):
        pack(ids, torch.tensor([[1, 1, 0]]).bool(), torch.tensor([[1, 1]]).bool())
