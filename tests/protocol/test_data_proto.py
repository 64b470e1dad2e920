"""DataProto: rows and keys."""

import copy

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from burnish.protocol import (
    BATCH_KEYS,
    STAGES,
    DataProto,
    DataProtoItem,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)
from burnish.utils.errors import BurnishError


@pytest.fixture
def data():
    return DataProto.from_dict(
        tensors={"obs": torch.tensor([[1, 2], [3, 4], [5, 6]]), "act": torch.arange(3.0)},
        non_tensors={"labels": ["a", "b", "c"]},
        meta_info={"info": "test"},
    )


def rows(data):
    return data.batch["obs"][:, 0].tolist(), data.non_tensor_batch["labels"].tolist()


def test_a_batch_is_made_of_a_collated_dict():
    data = DataProto.from_single_dict(
        {"x": torch.zeros(2, 3), "name": np.array(["a", "b"], dtype=object), "l": [[1], 2]}
    )
    assert len(data) == 2
    assert set(data.batch.keys()) == {"x"}
    assert data.non_tensor_batch["l"].tolist() == [[1], 2]


def test_lists_of_equal_length_stay_one_value_a_row():
    messages = [[{"role": "system"}, {"role": "user"}]] * 3
    data = DataProto.from_dict(non_tensors={"raw_prompt": messages, "matrix": np.ones((3, 2))})
    assert data.non_tensor_batch["raw_prompt"].shape == (3,)
    assert data.non_tensor_batch["raw_prompt"][1] == messages[1]
    assert data.non_tensor_batch["matrix"].shape == (3,)


def test_numeric_arrays_become_python_values():
    data = DataProto.from_dict(non_tensors={"index": np.array([1, 2])})
    assert [type(value) for value in data.non_tensor_batch["index"]] == [int, int]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DataProto.from_single_dict({"x": 3}), "'x' is a int"),
        (lambda: DataProto.from_dict({"x": torch.zeros(2), "y": torch.zeros(3)}), "same first dimension"),
        (lambda: DataProto.from_dict({"x": torch.tensor(1.0)}), "same first dimension"),
        (lambda: DataProto.from_dict({"x": torch.zeros(2)}, {"y": ["a"]}), "'y' has 1 rows, the batch has 2"),
        (lambda: DataProto.from_dict(None, {"x": ["a", "b"], "y": ["a"]}), "'y' has 1 rows, the batch has 2"),
        (lambda: DataProto(non_tensor_batch={"y": ["a"]}), "'y' is a list"),
        (lambda: DataProto(TensorDict({}, batch_size=[2, 3])), "one batch dimension"),
        (lambda: DataProto(TensorDict({"x": TensorDict({}, [2])}, batch_size=[2])), "'x' is a TensorDict"),
    ],
)
def test_what_is_no_batch_is_refused_with_the_key(make, words):
    with pytest.raises(BurnishError, match=words):
        make()


def test_length_counts_rows_of_whatever_is_there(data):
    assert len(data) == 3
    assert len(DataProto.from_dict(non_tensors={"labels": ["a", "b"]})) == 2
    assert len(DataProto(batch=None, non_tensor_batch=None, meta_info={"a": 1})) == 0


def test_a_row_is_an_item_and_iteration_ends(data):
    assert isinstance(data[1], DataProtoItem)
    assert data[1].batch["obs"].tolist() == [3, 4]
    assert data[np.int64(-1)].non_tensor_batch == {"labels": "c"}
    assert [item.non_tensor_batch["labels"] for item in data] == ["a", "b", "c"]
    with pytest.raises(IndexError):
        data[3]


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor], ids=["list", "array", "tensor"])
def test_rows_are_selected_by_indices_and_masks_of_any_kind(data, convert):
    assert rows(data[convert([2, 0, 2, -1])]) == ([5, 1, 5, 5], ["c", "a", "c", "c"])
    selected = data[convert([True, False, True])]
    assert rows(selected) == ([1, 5], ["a", "c"])
    assert all(isinstance(size, int) for size in selected.batch.batch_size)
    assert rows(selected.chunk(2)[1]) == ([5], ["c"])


def test_selecting_nothing_gives_an_empty_batch_with_all_keys(data):
    for empty in (data[[]], data[torch.zeros(3, dtype=torch.bool)], data[3:], data.select_idxs(np.array([]))):
        assert len(empty) == 0
        assert set(empty.batch.keys()) == {"obs", "act"}
        assert empty.batch["obs"].shape == (0, 2)
        assert len(empty.non_tensor_batch["labels"]) == 0
    assert len(DataProto.concat([data[[]], data])) == 3


def test_bad_indices_are_errors_and_not_other_rows(data):
    with pytest.raises(IndexError):
        data[[0, 3]]
    with pytest.raises(IndexError):
        data[[-4]]
    with pytest.raises(BurnishError, match="mask of length 2 cannot select from 3 rows"):
        data[[True, False]]


def test_slices_are_views_in_any_direction(data):
    assert rows(data.slice(1, 3)) == ([3, 5], ["b", "c"])
    assert rows(data[::2]) == ([1, 5], ["a", "c"])
    assert rows(data[::-1]) == ([5, 3, 1], ["c", "b", "a"])
    assert data[1:].batch["obs"].data_ptr() == data.batch["obs"][1:].data_ptr()


def test_select_takes_keys_and_shares_values(data):
    selected = data.select(batch_keys=["obs"], non_tensor_batch_keys=[], meta_info_keys=["info"])
    assert (set(selected.batch.keys()), selected.non_tensor_batch, selected.meta_info) == (
        {"obs"},
        {},
        {"info": "test"},
    )
    assert selected.batch["obs"].data_ptr() == data.batch["obs"].data_ptr()
    assert set(data.select().batch.keys()) == {"obs", "act"}
    assert len(data.select(batch_keys=[])) == 3


def test_a_deep_copy_shares_nothing(data):
    for other in (data.select(deepcopy=True), copy.deepcopy(data)):
        other.batch["obs"].zero_()
        other.non_tensor_batch["labels"][0] = "z"
        assert rows(data) == ([1, 3, 5], ["a", "b", "c"])


def test_a_shallow_copy_shares_values_but_no_containers(data):
    other = copy.copy(data)
    other.batch["new"] = torch.zeros(3)
    other.non_tensor_batch["new"] = np.zeros(3)
    other.meta_info["new"] = 1
    assert "new" not in data.batch
    assert "new" not in data.non_tensor_batch
    assert "new" not in data.meta_info
    assert other.batch["obs"].data_ptr() == data.batch["obs"].data_ptr()


def test_pop_moves_keys_and_leaves_the_rows(data):
    popped = data.pop(batch_keys=["obs", "act"], non_tensor_batch_keys=["labels"], meta_info_keys=["info"])
    assert rows(popped) == ([1, 3, 5], ["a", "b", "c"])
    assert popped.meta_info == {"info": "test"}
    assert (len(data), list(data.batch.keys()), data.non_tensor_batch, data.meta_info) == (3, [], {}, {})


def test_a_missing_key_is_named_with_those_there_and_nothing_is_taken(data):
    with pytest.raises(BurnishError, match="no tensor key 'ob'; it has: obs, act"):
        data.select(batch_keys=["ob"])
    with pytest.raises(BurnishError, match="no non-tensor key 'label'; it has: labels"):
        data.pop(batch_keys=["obs"], non_tensor_batch_keys=["label"])
    assert "obs" in data.batch
    with pytest.raises(BurnishError, match="no tensor key 'x'; it has: none"):
        DataProto().select(batch_keys=["x"])


def test_rename_works_on_both_kinds_of_keys_and_swaps(data):
    assert data.rename("labels", "names") is data
    data.rename(["obs", "act"], ["act", "obs"])
    assert data.batch["act"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert data.non_tensor_batch["names"].tolist() == ["a", "b", "c"]
    with pytest.raises(BurnishError, match="two keys one name"):
        data.rename("obs", "names")
    with pytest.raises(BurnishError, match="as many new keys"):
        data.rename(["obs"], [])
    with pytest.raises(BurnishError, match="'gone'"):
        data.rename("gone", "x")


def test_reorder_permutes_in_place(data):
    data.reorder(torch.tensor([2, 0, 1]))
    assert rows(data) == ([5, 1, 3], ["c", "a", "b"])
    assert data.meta_info == {"info": "test"}
    for wrong in ([0, 1], [0, 0, 1], [1, 2, 3]):
        with pytest.raises(BurnishError, match="each of the 3 rows exactly once"):
            data.reorder(wrong)


def test_repeat_interleaves_or_tiles(data):
    assert rows(data.repeat(2)) == ([1, 1, 3, 3, 5, 5], ["a", "a", "b", "b", "c", "c"])
    assert rows(data.repeat(2, interleave=False)) == ([1, 3, 5, 1, 3, 5], ["a", "b", "c", "a", "b", "c"])
    assert rows(data.sample_level_repeat([0, 2, 1])) == ([3, 3, 5], ["b", "b", "c"])
    with pytest.raises(BurnishError, match="each of 3 rows"):
        data.sample_level_repeat([1, 2])


def test_chunks_are_equal_views_and_uneven_ones_refused_with_the_way_out(data):
    assert [rows(chunk) for chunk in data.chunk(3)] == [([1], ["a"]), ([3], ["b"]), ([5], ["c"])]
    assert [len(part) for part in data.split(2)] == [2, 1]
    with pytest.raises(BurnishError, match=r"3 rows cannot be cut into 2 equal chunks\. pad_dataproto_to_divisor"):
        data.chunk(2)
    with pytest.raises(BurnishError, match="0 rows"):
        data.split(0)


@pytest.mark.parametrize(("divisor", "added", "expected"), [(2, 1, "abca"), (3, 0, "abc"), (7, 4, "abcabca")])
def test_padding_repeats_rows_from_the_start_and_is_undone(data, divisor, added, expected):
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert pad_size == added
    assert "".join(padded.non_tensor_batch["labels"]) == expected
    assert rows(unpad_dataproto(padded, pad_size)) == rows(data)


def test_an_empty_batch_divides_by_anything():
    empty = DataProto.from_dict({"x": torch.zeros(0, 3)})
    assert pad_dataproto_to_divisor(empty, 4) == (empty, 0)
    assert [len(chunk) for chunk in empty.chunk(4)] == [0, 0, 0, 0]
    assert list(empty.make_iterator(2, epochs=2)) == []


def test_the_iterator_covers_every_epoch_in_an_order_of_the_seed_alone():
    data = DataProto.from_dict({"x": torch.arange(12)}, {"name": list("abcdefghijkl")}, {"k": 1})

    def order(seed, **kwargs):
        batches = list(data.make_iterator(4, epochs=2, seed=seed, dataloader_kwargs=kwargs))
        assert all(batch.meta_info == {"k": 1} for batch in batches)
        assert all(
            "abcdefghijkl"[x] == name
            for b in batches
            for x, name in zip(b.batch["x"], b.non_tensor_batch["name"], strict=True)
        )
        return [x for batch in batches for x in batch.batch["x"].tolist()]

    before = torch.get_rng_state()
    first = order(1, shuffle=True)
    assert sorted(first[:12]) == sorted(first[12:]) == list(range(12))
    assert first[:12] != first[12:]
    torch.rand(1)
    assert order(1, shuffle=True) == first
    assert order(2, shuffle=True) != first
    assert order(None) == [*range(12), *range(12)]
    torch.set_rng_state(before)
    order(1, shuffle=True)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(BurnishError, match="12 rows cannot be cut into mini-batches of 5"):
        data.make_iterator(5, epochs=1)


def test_a_batch_without_tensors_does_all_of_it():
    data = DataProto.from_dict(non_tensors={"labels": ["a", "b"]}, meta_info={"k": 1})
    assert data.select(non_tensor_batch_keys=["labels"]).non_tensor_batch["labels"].tolist() == ["a", "b"]
    assert data.repeat(2).non_tensor_batch["labels"].tolist() == ["a", "a", "b", "b"]
    assert DataProto.concat(data.chunk(2)).non_tensor_batch["labels"].tolist() == ["a", "b"]
    assert data.to("cpu").batch is None
    assert data[0].batch is None
    assert data.pop(non_tensor_batch_keys=["labels"]).non_tensor_batch["labels"].tolist() == ["a", "b"]
    assert (data.non_tensor_batch, len(data)) == ({}, 0)


def test_a_tensordict_holds_everything_and_gives_it_back(data):
    data.non_tensor_batch["messages"] = np.array([None, [1], [1, 2]], dtype=object)
    for original in (data, data[[]], DataProto.from_dict(non_tensors={"labels": ["a", "a"]})):
        back = DataProto.from_tensordict(original.to_tensordict())
        assert repr(back) == repr(original)
        assert {k: v.tolist() for k, v in back.non_tensor_batch.items()} == {
            k: v.tolist() for k, v in original.non_tensor_batch.items()
        }
        assert back.meta_info == original.meta_info
    data.meta_info["obs"] = 1
    with pytest.raises(BurnishError, match="'obs' is in two parts"):
        data.to_tensordict()


def test_the_size_is_that_of_the_tensors_and_the_text_is_short(data):
    assert data.nbytes() == 3 * 2 * 8 + 3 * 4
    assert repr(data) == "DataProto(3 rows: obs int64[3, 2], act float32[3], labels; meta_info: info)"


def test_every_key_of_the_table_has_a_stage_a_meaning_and_a_pad_value_of_its_dtype():
    assert {entry.stage for entry in BATCH_KEYS.values()} <= set(STAGES)
    for key, entry in BATCH_KEYS.items():
        assert entry.meaning, key
        assert (entry.dtype is None) <= (entry.pad is None), key
        if entry.dtype is torch.bool:
            assert entry.pad_value is False, key
    # The table is read from top to bottom, as the step goes.
    stages = [STAGES.index(entry.stage) for entry in BATCH_KEYS.values()]
    assert stages == sorted(stages)
