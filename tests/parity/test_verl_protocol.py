"""`DataProto` beside verl's: the same operations on the same rows, and a batch that goes there and back."""

import numpy as np
import pytest
import torch

from burnish import protocol
from burnish.protocol import DataProto

ROWS, WIDTH = 7, 5


def made(cls):
    generator = torch.Generator().manual_seed(0)
    return cls.from_dict(
        tensors={
            "responses": torch.randint(0, 50, (ROWS, WIDTH), generator=generator),
            "attention_mask": torch.ones(ROWS, WIDTH, dtype=torch.long),
            "old_log_probs": torch.randn(ROWS, WIDTH, generator=generator),
        },
        non_tensors={
            "uid": np.array([f"u{i // 2}" for i in range(ROWS)], dtype=object),
            "extra_info": np.array([{"index": i} for i in range(ROWS)], dtype=object),
        },
        meta_info={"temperature": 0.7},
    )


def same(ours, theirs):
    assert set(ours.batch.keys()) == set(theirs.batch.keys())
    for key in theirs.batch.keys():  # noqa: SIM118
        torch.testing.assert_close(ours.batch[key], theirs.batch[key], rtol=0, atol=0)
    assert set(ours.non_tensor_batch) == set(theirs.non_tensor_batch)
    for key, values in theirs.non_tensor_batch.items():
        assert list(ours.non_tensor_batch[key]) == list(values)
    assert ours.meta_info == theirs.meta_info
    return True


OPERATIONS = {
    "select": lambda data: data.select(batch_keys=["responses"], non_tensor_batch_keys=["uid"]),
    "select_idxs of numbers": lambda data: data.select_idxs(torch.tensor([4, 0, 6])),
    "select_idxs of a mask": lambda data: data.select_idxs(np.array([True, False] * 3 + [True])),
    "slice": lambda data: data.slice(1, 6, 2),
    "a slice in brackets": lambda data: data[2:5],
    "a list in brackets": lambda data: data[[1, 3]],
    "repeat interleaved": lambda data: data.repeat(3, interleave=True),
    "repeat in turn": lambda data: data.repeat(2, interleave=False),
    "sample_level_repeat": lambda data: data.sample_level_repeat([1, 2, 0, 1, 3, 1, 1]),
    "rename": lambda data: data.rename("responses", "answers"),
    "pop": lambda data: data.pop(batch_keys=["old_log_probs"], non_tensor_batch_keys=["uid"]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_the_same_rows(verl_protocol, name):
    assert same(OPERATIONS[name](made(DataProto)), OPERATIONS[name](made(verl_protocol.DataProto)))


def test_reorder_and_union_change_the_batch_itself(verl_protocol):
    ours, theirs = made(DataProto), made(verl_protocol.DataProto)
    for data in (ours, theirs):
        data.reorder(torch.tensor([6, 5, 4, 3, 2, 1, 0]))
    values = {"values": torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH)}
    ours = ours.union(DataProto.from_dict(tensors=dict(values)))
    theirs = theirs.union(verl_protocol.DataProto.from_dict(tensors=dict(values)))
    assert same(ours, theirs)


@pytest.mark.parametrize("divisor", [1, 2, 3, 4, 7, 16])
def test_pad_to_a_divisor_and_back(verl_protocol, divisor):
    """The padding is the first rows again, in their order, in both."""
    ours, pad = protocol.pad_dataproto_to_divisor(made(DataProto), divisor)
    theirs, their_pad = verl_protocol.pad_dataproto_to_divisor(made(verl_protocol.DataProto), divisor)
    assert pad == their_pad
    assert same(ours, theirs)
    assert same(protocol.unpad_dataproto(ours, pad), verl_protocol.unpad_dataproto(theirs, pad))


@pytest.mark.parametrize("chunks", [1, 2, 3, 6])
def test_chunks_of_a_batch_that_divides_and_their_concatenation(verl_protocol, chunks):
    ours, theirs = made(DataProto)[:6], made(verl_protocol.DataProto)[:6]
    parts, their_parts = ours.chunk(chunks), theirs.chunk(chunks)
    assert len(parts) == len(their_parts) == chunks
    assert all(same(mine, other) for mine, other in zip(parts, their_parts, strict=True))
    assert same(DataProto.concat(parts), verl_protocol.DataProto.concat(their_parts))


def test_chunks_of_a_batch_that_does_not_divide_are_an_error_in_both(verl_protocol):
    for data in (made(DataProto), made(verl_protocol.DataProto)):
        with pytest.raises(Exception, match="chunk|divi|equal"):
            data.chunk(2)


def test_a_batch_goes_there_and_back(verl_protocol):
    ours = made(DataProto)
    there = verl_protocol.DataProto(batch=ours.batch, non_tensor_batch=ours.non_tensor_batch, meta_info=ours.meta_info)
    assert same(ours, there)
    back = DataProto(batch=there.batch, non_tensor_batch=there.non_tensor_batch, meta_info=there.meta_info)
    assert same(back, there)
    assert same(DataProto.from_tensordict(there.to_tensordict()), there)


def test_rows_of_other_widths_are_padded_by_the_table_and_an_error_there(verl_protocol):
    def two(cls):
        return [cls.from_dict(tensors={"responses": torch.ones(2, width, dtype=torch.long)}) for width in (3, 5)]

    assert DataProto.concat(two(DataProto)).batch["responses"].shape == (4, 5)
    with pytest.raises(RuntimeError):
        verl_protocol.DataProto.concat(two(verl_protocol.DataProto))
