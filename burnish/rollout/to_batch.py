"""Between the driver's batches and an engine's requests and responses."""

from collections.abc import Sequence
from itertools import chain

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
        ``input_ids`` ``attention_mask`` ``position_ids`` [batch, prompt + response], ``policy_version``
        ``last_policy_version`` ``num_preemptions`` [batch], ``finish_reason``.
        The mask comes from the lengths, never from the padding id, which may be the end-of-sequence token.
        Where a response was drawn from another distribution than the policy's, ``rollout_truncated_log_probs`` too.

    Raises:
        RolloutError: the responses are not those to the rows, one each and in their order, or lack log-probs.
    """
    prompt_ids, prompt_mask = _tensors(prompts)["input_ids"], _tensors(prompts)["attention_mask"].bool()
    _check_responses(_request_ids(prompts), responses)
    device = prompt_ids.device
    lengths = np.array([len(response.token_ids) for response in responses], dtype=np.int64)
    mask = np.arange(max(1, lengths.max(initial=0))) < lengths[:, None]
    response_mask = torch.from_numpy(mask).to(device)
    response_ids = _padded([r.token_ids for r in responses], mask, np.int64, pad_token_id).to(device)
    log_probs = {"rollout_log_probs": [r.log_probs for r in responses]}
    if any(r.truncated_log_probs is not None for r in responses):
        # A response that was drawn from the policy's own distribution has no others.
        log_probs["rollout_truncated_log_probs"] = [
            r.log_probs if r.truncated_log_probs is None else r.truncated_log_probs for r in responses
        ]
    of_rows = {
        "policy_version": [r.policy_version for r in responses],
        "last_policy_version": [r.policy_versions[-1][0] if r.policy_versions else r.policy_version for r in responses],
        "num_preemptions": [r.num_preemptions for r in responses],
    }
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1)
    return DataProto.from_dict(
        tensors={
            "prompts": prompt_ids,
            "responses": response_ids,
            "response_mask": response_mask,
            **{key: _padded(values, mask, np.float32, 0.0).to(device) for key, values in log_probs.items()},
            **{key: torch.tensor(values, dtype=torch.int64, device=device) for key, values in of_rows.items()},
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
        for log_probs in (response.log_probs, response.truncated_log_probs):
            if log_probs is not None and len(log_probs) != len(response.token_ids):
                raise RolloutError(
                    f"The rollout engine gave {len(response.token_ids)} tokens and {len(log_probs)} log-probs to request "
                    f"{request_id!r}; every token needs one."
                )


def _tensors(prompts: DataProto) -> TensorDict:
    if prompts.batch is None:
        raise RolloutError("The prompts have no tensors; input_ids and attention_mask are needed to generate.")
    return prompts.batch


def _padded(
    rows: Sequence[Sequence[float]], mask: np.ndarray, dtype: type[np.generic], pad_value: float
) -> torch.Tensor:
    """The rows' values where ``mask`` [batch, response] is true, in their order, and ``pad_value`` elsewhere."""
    values = np.full(mask.shape, pad_value, dtype=dtype)
    values[mask] = np.fromiter(chain.from_iterable(rows), dtype=dtype, count=int(mask.sum()))
    return torch.from_numpy(values)
