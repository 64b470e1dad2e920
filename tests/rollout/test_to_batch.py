"""Batches to requests and responses to batches: lengths decide every mask, padding ids none."""

import numpy as np
import pytest
import torch

from burnish.protocol import DataProto
from burnish.rollout.base import RolloutResponse
from burnish.rollout.to_batch import requests_from_dataproto, responses_to_dataproto
from burnish.utils.errors import RolloutError

EOS = PAD = 2


def make_prompts() -> DataProto:
    """Two left-padded prompts, the first with the padding id among its own tokens."""
    ids, mask = torch.tensor([[2, 5, 2], [2, 2, 9]]), torch.tensor([[1, 1, 1], [0, 0, 1]], dtype=torch.bool)
    names = {"uid": np.array(["a", "b"], dtype=object), "sample_index": np.array([0, 3], dtype=object)}
    return DataProto.from_dict(tensors={"input_ids": ids, "attention_mask": mask}, non_tensors=names)


def test_requests_hold_the_unpadded_prompts_and_the_rows_names() -> None:
    requests = requests_from_dataproto(make_prompts())
    assert [(list(r.prompt_ids), r.uid, r.sample_index) for r in requests] == [([2, 5, 2], "a", 0), ([9], "b", 3)]


def test_right_padded_prompts_are_unpadded_too() -> None:
    prompts = make_prompts()
    prompts.batch["attention_mask"] = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    assert [list(r.prompt_ids) for r in requests_from_dataproto(prompts)] == [[2, 5], [2]]


def test_copied_rows_have_request_ids_of_their_own() -> None:
    prompts = make_prompts().select_idxs([0, 0, 1])
    requests = requests_from_dataproto(prompts)
    assert len({r.request_id for r in requests}) == 3
    assert requests[0].prompt_ids == requests[1].prompt_ids


@pytest.mark.parametrize("key", ["uid", "sample_index"])
def test_rows_without_a_name_are_refused(key: str) -> None:
    prompts = make_prompts()
    del prompts.non_tensor_batch[key]
    with pytest.raises(RolloutError, match=f"no '{key}'"):
        requests_from_dataproto(prompts)


def test_the_response_mask_is_the_true_length_without_an_eos_and_with_pad_equal_to_eos() -> None:
    responses = [
        RolloutResponse("x", [5, 6, 7], [-1.0, -2.0, -3.0], "length", 4),
        RolloutResponse("y", [8, 2, 5, 6, EOS], [-0.1, -0.2, -0.3, -0.4, -0.5], "stop", 5),
    ]
    batch = responses_to_dataproto(make_prompts(), responses, PAD)
    tensors = batch.batch
    assert tensors["response_mask"].tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    assert tensors["response_mask"].dtype == torch.bool
    assert tensors["responses"].tolist() == [[5, 6, 7, PAD, PAD], [8, 2, 5, 6, EOS]]
    assert tensors["prompts"].tolist() == [[2, 5, 2], [2, 2, 9]]
    assert tensors["input_ids"].tolist() == [[2, 5, 2, 5, 6, 7, PAD, PAD], [2, 2, 9, 8, 2, 5, 6, EOS]]
    assert tensors["attention_mask"].int().tolist() == [[1, 1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1]]
    positions, mask = tensors["position_ids"], tensors["attention_mask"]
    assert positions[0][mask[0]].tolist() == positions[1][mask[1]].tolist() == list(range(6))
    expected = torch.tensor([[-1.0, -2.0, -3.0, 0, 0], [-0.1, -0.2, -0.3, -0.4, -0.5]])
    assert torch.equal(tensors["rollout_log_probs"], expected)
    assert tensors["policy_version"].tolist() == [4, 5]
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["length", "stop"]


def test_responses_without_a_token_still_make_a_batch() -> None:
    responses = [RolloutResponse(name, [], [], "abort", 0) for name in "xy"]
    batch = responses_to_dataproto(make_prompts(), responses, PAD).batch
    assert batch["responses"].shape == (2, 1)
    assert not batch["response_mask"].any()


def test_as_many_responses_as_rows_are_needed() -> None:
    with pytest.raises(ValueError, match="1 responses were given for 2"):
        responses_to_dataproto(make_prompts(), [RolloutResponse("x", [1], [0.0], "stop", 0)], PAD)
