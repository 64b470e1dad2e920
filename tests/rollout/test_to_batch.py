"""Batches to requests and responses to batches: lengths decide every mask, padding ids none."""

from dataclasses import replace

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
        RolloutResponse("0:a:0", [5, 6, 7], [-1.0, -2.0, -3.0], "length", 4),
        RolloutResponse("1:b:3", [8, 2, 5, 6, EOS], [-0.1, -0.2, -0.3, -0.4, -0.5], "stop", 5),
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
    assert tensors["policy_version"].tolist() == tensors["last_policy_version"].tolist() == [4, 5]
    assert tensors["num_preemptions"].tolist() == [0, 0]
    assert "rollout_truncated_log_probs" not in tensors
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["length", "stop"]


def test_responses_without_a_token_still_make_a_batch() -> None:
    responses = [RolloutResponse(r.request_id, [], [], "abort", 0) for r in requests_from_dataproto(make_prompts())]
    batch = responses_to_dataproto(make_prompts(), responses, PAD).batch
    assert batch["responses"].shape == (2, 1)
    assert not batch["response_mask"].any()


def answers(prompts: DataProto) -> list[RolloutResponse]:
    """Row i is answered with i + 1 times the token i + 3."""
    requests = enumerate(requests_from_dataproto(prompts))
    return [RolloutResponse(r.request_id, [i + 3] * (i + 1), [-1.0] * (i + 1), "stop", 0) for i, r in requests]


def test_responses_that_are_not_those_of_the_rows_are_refused() -> None:
    prompts = make_prompts()
    with pytest.raises(RolloutError, match="1 responses to 2 requests"):
        responses_to_dataproto(prompts, answers(prompts)[:1], PAD)
    with pytest.raises(RolloutError, match="answered request '1:b:3' where the answer to '0:a:0' belongs"):
        responses_to_dataproto(prompts, answers(prompts)[::-1], PAD)
    first, second = answers(prompts)
    shifted = [replace(first, log_probs=[-1.0] * 2), replace(second, log_probs=[-1.0])]  # As many as tokens in sum.
    with pytest.raises(RolloutError, match="gave 1 tokens and 2 log-probs to request '0:a:0'"):
        responses_to_dataproto(prompts, shifted, PAD)


def test_log_probs_of_a_truncated_distribution_have_a_key_of_their_own() -> None:
    prompts = make_prompts()
    first, second = answers(prompts)
    first = replace(first, truncated_log_probs=[-0.25])
    with pytest.raises(RolloutError, match="gave 2 tokens and 1 log-probs to request '1:b:3'"):
        responses_to_dataproto(prompts, [first, replace(second, truncated_log_probs=[-0.5])], PAD)
    # Where only some are truncated, the others' distribution is the policy's own.
    tensors = responses_to_dataproto(prompts, [first, second], PAD).batch
    assert tensors["rollout_truncated_log_probs"].tolist() == [[-0.25, 0.0], [-1.0, -1.0]]
    assert tensors["rollout_log_probs"].tolist() == [[-1.0, 0.0], [-1.0, -1.0]]


def test_a_row_that_several_policies_sampled_names_the_first_and_the_last() -> None:
    prompts = make_prompts()
    first, second = answers(prompts)
    second = replace(second, policy_version=3, policy_versions=((3, 1), (5, 1)), num_preemptions=2)
    tensors = responses_to_dataproto(prompts, [first, second], PAD).batch
    assert tensors["policy_version"].tolist() == [0, 3]
    assert tensors["last_policy_version"].tolist() == [0, 5]
    assert tensors["num_preemptions"].tolist() == [0, 2]


def test_parts_of_several_workers_join_to_what_one_worker_makes() -> None:
    prompts = make_prompts()
    whole = responses_to_dataproto(prompts, answers(prompts), PAD)
    parts = []
    for row, answer in enumerate(answers(prompts)):
        own = prompts.select_idxs([row])
        request = requests_from_dataproto(own)[0]
        parts.append(responses_to_dataproto(own, [replace(answer, request_id=request.request_id)], PAD))
    joined = DataProto.concat(parts)
    assert joined.batch["responses"].tolist() == [[3, PAD], [4, 4]]
    assert set(joined.batch.keys()) == set(whole.batch.keys())
    for key in whole.batch.keys():  # noqa: SIM118
        # Positions of padding have no meaning.
        where = whole.batch["attention_mask"] if key == "position_ids" else torch.ones_like(whole.batch[key]).bool()
        assert torch.equal(joined.batch[key][where], whole.batch[key][where]), key
