"""concat and union: widths are reconciled by the table, contradictions are named."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.protocol import BATCH_KEYS, DataProto, union_numpy_dict, union_tensor_dict, union_two_dict
from burnish.utils.errors import BurnishError

PAD = 9


def rollout(prompt_lengths, response_lengths, seed=0, prompt=None, response=None):
    """A batch after the rollout, padded to its own longest prompt and response, or wider."""
    generator = torch.Generator().manual_seed(seed)
    num, prompt, response = len(prompt_lengths), prompt or max(prompt_lengths), response or max(response_lengths)
    tokens = torch.randint(10, 99, (num, prompt + response), generator=generator)
    first = torch.tensor(prompt_lengths).unsqueeze(1)
    last = torch.tensor(response_lengths).unsqueeze(1)
    column = torch.arange(prompt + response).unsqueeze(0) - prompt
    attention_mask = (column >= -first) & (column < last)
    input_ids = tokens.masked_fill(~attention_mask, PAD)
    response_mask = attention_mask[:, prompt:]
    log_probs = torch.randn(num, response, generator=generator).masked_fill(~response_mask, 0.0)
    return DataProto.from_dict(
        {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": (column + first).clamp(min=0).masked_fill(~attention_mask, 0),
            "prompts": input_ids[:, :prompt],
            "responses": input_ids[:, prompt:],
            "response_mask": response_mask,
            "old_log_probs": log_probs,
            "policy_version": torch.arange(num),
        },
        {"uid": [f"{seed}-{row}" for row in range(num)]},
        {"pad_token_id": PAD},
    )


def assert_same(left, right):
    assert set(left.batch.keys()) == set(right.batch.keys())
    for key in left.batch.keys():  # noqa: SIM118
        assert torch.equal(left.batch[key], right.batch[key]), key
        assert left.batch[key].dtype == right.batch[key].dtype
    assert {k: v.tolist() for k, v in left.non_tensor_batch.items()} == {
        k: v.tolist() for k, v in right.non_tensor_batch.items()
    }
    assert left.meta_info == right.meta_info


def test_ragged_parts_are_padded_on_the_side_and_with_the_value_of_the_table():
    joined = DataProto.concat([rollout([2], [3]), rollout([4], [1], seed=1)])
    mask = joined.batch["attention_mask"]
    assert mask.int().tolist() == [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]]
    assert (joined.batch["input_ids"][~mask] == PAD).all()
    assert joined.batch["prompts"].tolist() == joined.batch["input_ids"][:, :4].tolist()
    assert joined.batch["responses"].tolist() == joined.batch["input_ids"][:, 4:].tolist()
    assert joined.batch["response_mask"].int().tolist() == [[1, 1, 1], [1, 0, 0]]
    assert joined.batch["old_log_probs"][1, 1:].tolist() == [0.0, 0.0]
    assert joined.batch["position_ids"].tolist() == [[0, 0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0, 0]]


def test_equal_total_width_with_another_split_is_realigned():
    joined = DataProto.concat([rollout([2], [3]), rollout([3], [2], seed=1)])
    assert joined.batch["attention_mask"].int().tolist() == [[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]
    assert joined.batch["responses"].shape == (2, 3)


def test_before_the_rollout_prompts_grow_on_the_left():
    parts = [
        DataProto.from_dict({"input_ids": torch.ones(1, width, dtype=torch.int64)}, meta_info={"pad_token_id": PAD})
        for width in (1, 3)
    ]
    assert DataProto.concat(parts).batch["input_ids"].tolist() == [[PAD, PAD, 1], [1, 1, 1]]


lengths = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(groups=st.lists(lengths, min_size=1, max_size=4))
def test_parts_trimmed_to_their_own_widths_join_to_what_the_whole_would_be(groups):
    parts = [rollout(*zip(*group, strict=True), seed=seed) for seed, group in enumerate(groups)]
    joined = DataProto.concat(parts)
    prompt = max(p for group in groups for p, _ in group)
    response = max(r for group in groups for _, r in group)
    row = 0
    for part in parts:
        own_prompt = part.batch["prompts"].shape[1]
        for index in range(len(part)):
            valid = joined.batch["attention_mask"][row]
            for key, entry in BATCH_KEYS.items():
                if key in part.batch and entry.pad == "prompt_response":
                    tokens = part.batch[key][index][part.batch["attention_mask"][index]]
                    assert torch.equal(joined.batch[key][row][valid], tokens)
            width = part.batch["responses"].shape[1]
            assert torch.equal(joined.batch["old_log_probs"][row, :width], part.batch["old_log_probs"][index])
            assert torch.equal(joined.batch["prompts"][row, prompt - own_prompt :], part.batch["prompts"][index])
            row += 1
    assert joined.batch["responses"].shape == (row, response)
    assert joined.batch["input_ids"].shape == (row, prompt + response)
    assert joined.non_tensor_batch["uid"].tolist() == [uid for part in parts for uid in part.non_tensor_batch["uid"]]


tensors = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool, torch.uint8]
)


@st.composite
def batches(draw, divisible_by=1, min_size=0):
    num = draw(st.integers(min_size, 4)) * divisible_by
    shapes = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2)), min_size=0, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    content = {
        f"t{number}": torch.randint(0, 2 if number else 99, (num, *shape), generator=generator).to(draw(tensors))
        for number, shape in enumerate(shapes)
    }
    values = st.one_of(
        st.none(), st.text(), st.lists(st.integers(), max_size=2), st.dictionaries(st.text(), st.booleans())
    )
    objects = {"o": draw(st.lists(values, min_size=num, max_size=num))} if draw(st.booleans()) or not content else {}
    return DataProto.from_dict(content, objects, {"k": draw(st.integers())})


@settings(deadline=None, max_examples=60)
@given(data=st.data(), chunks=st.integers(1, 4))
def test_the_chunks_of_a_batch_join_to_the_batch(data, chunks):
    batch = data.draw(batches(divisible_by=chunks))
    parts = batch.chunk(chunks)
    joined = DataProto.concat(parts)
    if batch.batch is None:
        assert joined.non_tensor_batch["o"].tolist() == batch.non_tensor_batch["o"].tolist()
    else:
        assert_same(joined, batch)
        assert_same(DataProto.concat(batch.split(2) or [batch]), batch)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), times=st.integers(1, 3))
def test_repeating_selecting_and_reordering_undo_each_other(data, times):
    batch = data.draw(batches(min_size=1).filter(lambda b: b.batch is not None))
    num = len(batch)
    assert_same(batch.repeat(times)[::times], batch)
    assert_same(batch.repeat(times, interleave=False)[:num], batch)
    assert_same(batch.repeat(times), batch.sample_level_repeat([times] * num))
    assert_same(batch.repeat(times, interleave=False), DataProto.concat([batch] * times))
    order = data.draw(st.permutations(range(num)))
    moved = batch.select()
    moved.reorder(order)
    assert_same(moved, batch[list(order)])
    moved.reorder(torch.tensor(order).argsort())
    assert_same(moved, batch)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=num, max_size=num)))
    assert_same(batch[mask], batch[mask.nonzero().squeeze(-1)])
    popped = batch.select().pop(batch_keys=list(batch.batch.keys()))
    if popped.batch is not None:
        assert_same(popped.union(batch), batch)


def test_different_keys_are_named():
    one = DataProto.from_dict({"x": torch.zeros(1)})
    with pytest.raises(BurnishError, match=r"Batches 0 and 1 .* tensor keys \['y'\]"):
        DataProto.concat([one, DataProto.from_dict({"x": torch.zeros(1), "y": torch.zeros(1)})])
    with pytest.raises(BurnishError, match=r"non-tensor keys \['y'\]"):
        DataProto.concat([one, DataProto.from_dict({"x": torch.zeros(1)}, {"y": ["a"]})])
    with pytest.raises(BurnishError, match="nothing to concatenate"):
        DataProto.concat([])


@pytest.mark.parametrize("shape", [(1, 3), (1, 2, 2), (1,)])
def test_widths_that_the_table_does_not_know_are_refused_with_the_key(shape):
    with pytest.raises(BurnishError, match=r"'mine' has shape .* does not say how to pad"):
        DataProto.concat(
            [DataProto.from_dict({"mine": torch.zeros(1, 2)}), DataProto.from_dict({"mine": torch.zeros(shape)})]
        )


def test_parts_without_rows_or_keys_add_their_facts_only():
    joined = DataProto.concat([DataProto(meta_info={"a": 1}), rollout([2], [3]), rollout([5], [5])[[]]])
    assert len(joined) == 1
    assert joined.meta_info == {"a": 1, "pad_token_id": PAD}
    assert DataProto.concat([DataProto(meta_info={"a": 1})] * 2).meta_info == {"a": 1}


def test_facts_must_agree_and_metrics_are_gathered():
    parts = [
        DataProto(meta_info={"k": 1, "metrics": {"loss": 1.0}}),
        DataProto(meta_info={"k": 1, "metrics": [{"loss": 2.0}, {"loss": 3.0}]}),
        DataProto(meta_info={"metrics": None}),
    ]
    assert DataProto.concat(parts).meta_info == {"k": 1, "metrics": {"loss": [1.0, 2.0, 3.0]}}
    with pytest.raises(BurnishError, match=r"meta_info\['k'\] is 1 in one batch and 2 in another"):
        DataProto.concat([parts[0], DataProto(meta_info={"k": 2})])


def test_union_adds_keys_in_place_and_takes_equal_ones_silently():
    batch = rollout([2, 1], [3, 2])
    result = batch.union(
        DataProto.from_dict({"values": torch.ones(2, 3), "responses": batch.batch["responses"].clone()}, {"n": [1, 2]})
    )
    assert result is batch
    assert batch.batch["values"].shape == (2, 3)
    assert batch.non_tensor_batch["n"].tolist() == [1, 2]


def test_what_a_worker_trimmed_is_padded_back():
    batch = rollout([2, 1], [3, 2], prompt=4, response=6)
    trimmed = rollout([2, 1], [3, 2])
    batch.union(DataProto.from_dict({"values": torch.ones(2, 3)}))
    assert batch.batch["values"].tolist() == [[1, 1, 1, 0, 0, 0]] * 2
    wide = rollout([2, 1], [3, 2], prompt=4, response=6)
    narrow = wide.select()
    narrow.batch = DataProto.from_dict({k: v for k, v in wide.batch.items() if k != "policy_version"}).batch
    for key, columns in {
        "input_ids": slice(2, 7),
        "attention_mask": slice(2, 7),
        "position_ids": slice(2, 7),
        "prompts": slice(2, 4),
        "responses": slice(0, 3),
        "response_mask": slice(0, 3),
        "old_log_probs": slice(0, 3),
    }.items():
        narrow.batch[key] = narrow.batch[key][:, columns]
    for first, second in ((wide, narrow), (narrow, wide)):
        joined = first.select().union(second)
        for key in narrow.batch.keys():  # noqa: SIM118
            assert torch.equal(joined.batch[key], wide.batch[key]), key
    assert trimmed.batch["input_ids"].shape == narrow.batch["input_ids"].shape


def test_a_wider_result_widens_the_batch():
    batch = rollout([2, 1], [3, 2])
    batch.union(DataProto.from_dict({"values": torch.ones(2, 5)}))
    assert batch.batch["responses"].shape == (2, 5)
    assert batch.batch["input_ids"].shape == (2, 7)
    assert not batch.batch["attention_mask"][:, 5:].any()


def test_a_full_sequence_without_responses_takes_the_split_of_the_other_if_it_has_its_width():
    batch = rollout([2, 1], [3, 2])
    full = batch.select(["position_ids"], [])
    assert batch.select().union(full).batch["responses"].shape == (2, 3)
    wider = DataProto.from_dict({"position_ids": torch.zeros(2, 8, dtype=torch.int64)})
    with pytest.raises(BurnishError, match="width 8 without 'responses'"):
        batch.select(["input_ids", "responses"]).union(wider)


def test_positions_of_padding_do_not_count():
    batch = rollout([2, 1], [3, 2])
    other = batch.select(["position_ids", "attention_mask"], [], deepcopy=True)
    other.batch["position_ids"][~other.batch["attention_mask"]] = 77
    batch.union(other)
    other.batch["position_ids"] += 1
    with pytest.raises(BurnishError, match="'position_ids'"):
        batch.union(other)


def test_contradicting_values_are_named_and_leave_the_batch_as_it_was():
    batch = rollout([2, 1], [3, 2])
    other = DataProto.from_dict({"responses": batch.batch["responses"] + 1, "values": torch.zeros(2, 3)})
    with pytest.raises(BurnishError, match="tensor 'responses', with different values"):
        batch.union(other)
    cut = DataProto.from_dict({"responses": batch.batch["responses"][:, :2], "values": torch.zeros(2, 2)})
    with pytest.raises(BurnishError, match="tensor 'responses'"):
        batch.union(cut)
    with pytest.raises(BurnishError, match="non-tensor key 'uid'"):
        batch.union(DataProto.from_dict(non_tensors={"uid": ["a", "b"]}))
    with pytest.raises(BurnishError, match="pad_token_id"):
        batch.union(DataProto(meta_info={"pad_token_id": 0}))
    with pytest.raises(BurnishError, match="2 rows cannot take keys of a batch of 3 rows"):
        batch.union(DataProto.from_dict({"x": torch.zeros(3)}))
    assert "values" not in batch.batch


def test_union_of_batches_with_and_without_tensors():
    objects = DataProto.from_dict(non_tensors={"uid": ["a", "b"]})
    floats = DataProto.from_dict({"x": torch.zeros(2)})
    assert set(objects.select().union(floats).batch.keys()) == {"x"}
    assert set(floats.union(objects).non_tensor_batch) == {"uid"}
    assert DataProto().union(floats).batch["x"].tolist() == [0.0, 0.0]


def test_nan_equals_nan_in_unions():
    nan = torch.tensor([[float("nan"), 1.0]])
    data = DataProto.from_dict({"x": nan}, {"o": [{"a": [float("nan"), np.array([1.0, np.nan])]}]}, {"m": float("nan")})
    other = DataProto.from_dict(
        {"x": nan.clone()}, {"o": [{"a": [float("nan"), np.array([1.0, np.nan])]}]}, {"m": float("nan")}
    )
    assert torch.equal(data.union(other).batch["x"].isnan(), nan.isnan())
    with pytest.raises(BurnishError, match="'x'"):
        data.union(DataProto.from_dict({"x": torch.tensor([[1.0, float("nan")]])}))


def test_the_functions_behind_union_leave_their_arguments_alone():
    one, two = DataProto.from_dict({"x": torch.zeros(2)}).batch, DataProto.from_dict({"y": torch.zeros(2)}).batch
    assert set(union_tensor_dict(one, two).keys()) == {"x", "y"}
    assert set(one.keys()) == {"x"}
    with pytest.raises(BurnishError, match=r"sizes \[2\] and \[3\]"):
        union_tensor_dict(one, DataProto.from_dict({"y": torch.zeros(3)}).batch)
    array = np.array([1, None], dtype=object)
    assert union_numpy_dict({"a": array}, {"a": array.copy()}).keys() == {"a"}
    assert union_two_dict({"a": [1, (2,)]}, {"a": [1, (2,)], "b": torch.ones(2)}).keys() == {"a", "b"}
    with pytest.raises(BurnishError, match="'a'"):
        union_two_dict({"a": (1,)}, {"a": [1]})
