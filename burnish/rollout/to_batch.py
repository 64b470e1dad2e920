"""Between the driver's batches and an engine's requests and responses."""

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict

from burnish.protocol import DataProto
from burnish.rollout.base import RolloutRequest, RolloutResponse
from burnish.utils.errors import RolloutError


def requests_from_dataproto(prompts: DataProto) -> list[RolloutRequest]:
    """One request a row, in the order of the rows.

    Args:
        prompts: ``input_ids`` and ``attention_mask`` [batch, prompt] (padding on any side), non-tensor ``uid`` and
            ``sample_index``. The number is not counted here: a batch may be one worker's part of a group, and two
            workers that count would draw the same samples.

    Request ids are unique even where rows are copies of each other, as those that pad a dispatch are.

    Raises:
        RolloutError: ``uid`` or ``sample_index`` is missing.
    """
    ids = _request_ids(prompts)
    tensors = _tensors(prompts)
    mask = tensors["attention_mask"].bool().cpu()
    # All valid tokens behind each other, cut at the rows' lengths: no loop over tokens.
    parts = tensors["input_ids"].cpu()[mask].split(mask.sum(-1).tolist())
    uids, indices = prompts.non_tensor_batch["uid"], prompts.non_tensor_batch["sample_index"]
    return [
        RolloutRequest(request_id, tuple(part.tolist()), str(uid), int(index))
        for request_id, part, uid, index in zip(ids, parts, uids, indices, strict=True)
    ]


def responses_to_dataproto(prompts: DataProto, responses: Sequence[RolloutResponse], pad_token_id: int) -> DataProto:
    """The keys that the rollout adds, right-padded to the longest response (one column at least).

    Args:
        prompts: the rows that were given to :func:`requests_from_dataproto`.
        responses: the engine's answers to those requests, in their order.

    Returns:
        ``prompts`` [batch, prompt], ``responses`` ``response_mask`` ``rollout_log_probs`` [batch, response],
        ``input_ids`` ``attention_mask`` ``position_ids`` [batch, prompt + response], ``policy_version`` [batch],
        ``finish_reason``.
        The mask comes from the lengths, never from the padding id, which may be the end-of-sequence token.

    Raises:
        RolloutError: the responses are not those to the rows, one each and in their order, or lack log-probs.
    """
    prompt_ids, prompt_mask = _tensors(prompts)["input_ids"], _tensors(prompts)["attention_mask"].bool()
    _check_responses(_request_ids(prompts), responses)
    device = prompt_ids.device
    lengths = torch.tensor([len(response.token_ids) for response in responses], dtype=torch.int64, device=device)
    width = max(1, int(lengths.max()) if len(responses) else 1)
    response_mask = torch.arange(width, device=device) < lengths[:, None]
    response_ids = torch.full(response_mask.shape, pad_token_id, dtype=torch.int64, device=device)
    log_probs = torch.zeros(response_mask.shape, dtype=torch.float32, device=device)
    response_ids[response_mask] = _flat([response.token_ids for response in responses], torch.int64).to(device)
    log_probs[response_mask] = _flat([response.log_probs for response in responses], torch.float32).to(device)
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1)
    return DataProto.from_dict(
        tensors={
            "prompts": prompt_ids,
            "responses": response_ids,
            "response_mask": response_mask,
            "rollout_log_probs": log_probs,
            "policy_version": torch.tensor([r.policy_version for r in responses], dtype=torch.int64, device=device),
            "input_ids": torch.cat([prompt_ids, response_ids], dim=1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
        },
        non_tensors={"finish_reason": np.array([response.finish_reason for response in responses], dtype=object)},
        # What batches of several workers are padded with when they are joined.
        meta_info={"pad_token_id": pad_token_id},
    )


def _request_ids(prompts: DataProto) -> list[str]:
    """A name for each row, unique in the batch."""
    for key in ("uid", "sample_index"):
        if key not in prompts.non_tensor_batch:
            raise RolloutError(f"The prompts have no {key!r}; uid and sample_index name each response's random stream.")
    names = zip(prompts.non_tensor_batch["uid"], prompts.non_tensor_batch["sample_index"], strict=True)
    return [f"{row}:{uid}:{index}" for row, (uid, index) in enumerate(names)]


def _check_responses(request_ids: Sequence[str], responses: Sequence[RolloutResponse]) -> None:
    """An engine that answers in the order of finishing would have every row scored for another row's prompt."""
    if len(responses) != len(request_ids):
        raise RolloutError(f"The rollout engine gave {len(responses)} responses to {len(request_ids)} requests.")
    for request_id, response in zip(request_ids, responses, strict=True):
        if response.request_id != request_id:
            raise RolloutError(
                f"The rollout engine answered request {response.request_id!r} where the answer to {request_id!r} "
                f"belongs. BaseRollout.generate returns responses in the order of the requests."
            )
        if len(response.token_ids) != len(response.log_probs):
            raise RolloutError(
                f"The rollout engine gave {len(response.token_ids)} tokens and {len(response.log_probs)} log-probs to "
                f"request {request_id!r}; every token needs one."
            )


def _tensors(prompts: DataProto) -> TensorDict:
    if prompts.batch is None:
        raise RolloutError("The prompts have no tensors; input_ids and attention_mask are needed to generate.")
    return prompts.batch


def _flat(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=dtype)
