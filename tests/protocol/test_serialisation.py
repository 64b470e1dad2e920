"""Pickles are zero-copy, files hold no pickle."""

import gc
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.protocol import DataProto, DataProtoFuture
from burnish.utils.errors import BurnishError

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
]  # fmt: skip


def of_every_dtype(num_rows=3):
    values = torch.arange(num_rows * 4).view(num_rows, 4)
    return DataProto.from_dict({str(dtype): values.to(dtype) for dtype in DTYPES}, {"o": ["x"] * num_rows}, {"m": 1})


def same_bits(left, right):
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def assert_same(left, right):
    assert repr(left) == repr(right)
    assert (left.batch is None) == (right.batch is None)
    for key in () if left.batch is None else left.batch.keys():
        assert same_bits(left.batch[key], right.batch[key]), key
    assert {k: v.tolist() for k, v in left.non_tensor_batch.items()} == {
        k: v.tolist() for k, v in right.non_tensor_batch.items()
    }
    assert left.meta_info == right.meta_info


def dump(data):
    buffers = []
    return pickle.dumps(data, protocol=5, buffer_callback=buffers.append), buffers


def test_tensors_leave_as_buffers_of_their_own_memory_and_come_back_as_views_of_it():
    data = DataProto.from_dict(
        {"ids": torch.arange(2**20).view(1024, 1024), "probs": torch.ones(1024, 512, dtype=torch.bfloat16)}
    )
    in_band, buffers = dump(data)
    assert len(in_band) < 2000
    assert sum(buffer.raw().nbytes for buffer in buffers) == data.nbytes()
    addresses = {np.frombuffer(buffer.raw(), dtype=np.uint8).ctypes.data for buffer in buffers}
    assert addresses == {data.batch["ids"].data_ptr(), data.batch["probs"].data_ptr()}
    loaded = pickle.loads(in_band, buffers=buffers)
    assert loaded.batch["ids"].data_ptr() == data.batch["ids"].data_ptr()
    assert loaded.batch["probs"].data_ptr() == data.batch["probs"].data_ptr()
    assert_same(loaded, data)


def test_a_chunk_takes_only_its_own_rows_along():
    chunk = DataProto.from_dict({"x": torch.arange(1000).view(100, 10)}).chunk(10)[3]
    _, buffers = dump(chunk)
    assert [buffer.raw().nbytes for buffer in buffers] == [10 * 10 * 8]


def test_read_only_memory_is_viewed_without_copy_or_warning_and_outlives_its_source():
    data = of_every_dtype()
    in_band, buffers = dump(data)
    shared = [bytes(buffer.raw()) for buffer in buffers]
    addresses = {np.frombuffer(memory, dtype=np.uint8).ctypes.data for memory in shared}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = pickle.loads(in_band, buffers=shared)
    assert {loaded.batch[key].data_ptr() for key in loaded.batch.keys()} == addresses  # noqa: SIM118
    del shared
    gc.collect()
    assert_same(loaded, data)


def test_a_deep_copy_of_shared_memory_may_be_written():
    in_band, buffers = dump(DataProto.from_dict({"x": torch.ones(2, 2)}))
    shared = [bytes(buffer.raw()) for buffer in buffers]
    loaded = pickle.loads(in_band, buffers=shared)
    loaded.select(deepcopy=True).batch["x"].zero_()
    assert loaded.batch["x"].sum() == 4


@pytest.mark.parametrize("protocol", range(2, 6))
def test_every_pickle_protocol_gives_the_batch_back(protocol):
    for data in (of_every_dtype(), of_every_dtype(0), DataProto(), DataProto.from_dict(None, {"o": [None, [1]]})):
        assert_same(pickle.loads(pickle.dumps(data, protocol=protocol)), data)


def test_tensors_of_any_layout_and_with_gradient_history_travel_as_values():
    base = torch.arange(24.0, requires_grad=True).view(4, 6)
    data = DataProto.from_dict(
        {"columns": base[:, 1:3] * 1, "strided": base[::2].t()[:4], "expanded": base[:1].expand(4, 6)}
    )
    loaded = pickle.loads(pickle.dumps(data))
    for key in data.batch.keys():  # noqa: SIM118
        assert torch.equal(loaded.batch[key], data.batch[key])
        assert not loaded.batch[key].requires_grad


def test_a_batch_that_lost_all_its_tensors_keeps_its_rows():
    data = DataProto.from_dict({"x": torch.zeros(3)})
    data.pop(["x"])
    assert len(pickle.loads(pickle.dumps(data))) == 3


def test_files_give_everything_back(tmp_path):
    tensor = torch.arange(6).view(3, 2)
    shared = DataProto.from_dict({"a": tensor, "b": tensor, "c": tensor[:, :1]})
    for data in (of_every_dtype(), of_every_dtype(0), shared, DataProto(meta_info={"k": [1, None, {"x": 0.1}]})):
        data.save_to_disk(tmp_path / "batch.pt")
        assert_same(DataProto.load_from_disk(str(tmp_path / "batch.pt")), data)
    assert [path.name for path in tmp_path.iterdir()] == ["batch.pt"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=40)
@given(values=st.lists(json_values, max_size=4), meta=st.dictionaries(st.text(), json_values, max_size=3))
def test_any_json_value_survives_the_file(values, meta, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "batch"
    data = DataProto.from_dict(non_tensors={"o": values}, meta_info=meta)
    data.save_to_disk(path)
    assert_same(DataProto.load_from_disk(path), data)


def test_lone_surrogates_and_numpy_scalars_survive_the_file(tmp_path):
    data = DataProto.from_dict(non_tensors={"text": ["\ud800", "é\x00"], "n": [np.int64(3), np.float32(0.5)]})
    data.save_to_disk(tmp_path / "batch")
    assert DataProto.load_from_disk(tmp_path / "batch").non_tensor_batch["n"].tolist() == [3, 0.5]
    assert DataProto.load_from_disk(tmp_path / "batch").non_tensor_batch["text"].tolist() == ["\ud800", "é\x00"]


@pytest.mark.parametrize(
    ("non_tensors", "meta", "words"),
    [
        ({"o": [1, {2: 3}]}, {}, r"non_tensor_batch\['o'\]\[1\] is a dict whose keys are not all strings"),
        ({"o": [{"a": [b"x"]}]}, {}, r"non_tensor_batch\['o'\]\[0\]\['a'\]\[0\] is of type bytes"),
        ({"o": [(1, 2)]}, {}, "of type tuple"),
        ({"o": [np.zeros(2)]}, {}, "of type ndarray"),
        ({}, {"fn": len}, r"meta_info\['fn'\] is of type builtin_function_or_method"),
        ({}, {"t": torch.zeros(1)}, r"meta_info\['t'\] is of type Tensor"),
    ],
)
def test_what_json_cannot_give_back_is_refused_with_its_place_and_no_file_is_left(tmp_path, non_tensors, meta, words):
    data = DataProto.from_dict(None, non_tensors, meta)
    with pytest.raises(BurnishError, match=words):
        data.save_to_disk(tmp_path / "batch")
    assert list(tmp_path.iterdir()) == []


def test_files_of_another_kind_are_refused_by_name(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(BurnishError, match=r"gone.*cannot be read"):
        DataProto.load_from_disk(tmp_path / "gone")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(BurnishError, match=r"text.*cannot be read"):
        DataProto.load_from_disk(tmp_path / "text")
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(BurnishError, match=r"not one that DataProto\.save_to_disk wrote"):
        DataProto.load_from_disk(tmp_path / "other")
    with pytest.raises(BurnishError, match="'__json__' is taken"):
        DataProto.from_dict({"__json__": torch.zeros(1)}).save_to_disk(tmp_path / "batch")


def test_a_future_is_chunked_before_it_is_there_and_survives_a_pickle():
    parts = DataProto.from_dict({"x": torch.arange(4)}).chunk(2)
    future = DataProtoFuture.concat(parts)
    assert future.get().batch["x"].tolist() == [0, 1, 2, 3]
    chunks = [pickle.loads(pickle.dumps(chunk)) for chunk in future.chunk(4)]
    assert [chunk.get().batch["x"].tolist() for chunk in chunks] == [[0], [1], [2], [3]]


def test_a_future_waits_for_concurrent_futures_object_references_or_by_its_own_function():
    from concurrent.futures import ThreadPoolExecutor

    class Reference:
        def __init__(self, future):
            self._future = future

        def future(self):
            return self._future

    data = DataProto.from_dict({"x": torch.arange(2)})
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(lambda: data)
        assert DataProtoFuture.concat([later, Reference(later), data]).get().batch["x"].tolist() == [0, 1] * 3
    fetched = DataProtoFuture(DataProto.concat, ["key"], fetch_fn=lambda keys: [data for _ in keys])
    assert fetched.chunk(2)[1].get().batch["x"].tolist() == [1]
    with pytest.raises(BurnishError, match="Future 0 gave a str"):
        DataProtoFuture.concat(["key"]).get()
