"""Sequences to one batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from burnish.data.collate import unique_names
from burnish.protocol import DataProto
from burnish.utils.errors import DataError


def sft_collate(items: Sequence[Mapping[str, Any]], pad_token_id: int = 0) -> DataProto:
    """A batch as the engine takes it: what stands before the first learnt token is the prompt, the rest the response.

    Args:
        items: each has ``input_ids`` [tokens], ``loss_mask`` [tokens], true on the tokens to be learnt; ``attention_mask`` where
            it is padded, as classes of a user's own may have it; ``index`` and ``data_source`` where it has them.

    Returns:
        ``prompts`` [batch, prompt] (left-padded), ``responses`` ``response_mask`` (the tokens that are there) ``loss_mask`` (the
        learnt ones) [batch, response] (right-padded), ``input_ids`` ``attention_mask`` ``position_ids`` [batch, prompt +
        response]; non-tensor ``uid``, ``data_source``.

    Raises:
        DataError: an item has nothing to learn, its first token is to be learnt, its lengths differ, or its mask has other
            values than yes and no.
    """
    rows = [_row(item, number) for number, item in enumerate(items)]
    prompts, responses = [ids[:first] for ids, _, first in rows], [ids[first:] for ids, _, first in rows]
    learnt = [mask[first:] for _, mask, first in rows]
    width, length = max(map(len, prompts)), max(map(len, responses))
    prompt_ids = torch.full((len(rows), width), pad_token_id, dtype=torch.int64)
    prompt_mask = torch.zeros(len(rows), width, dtype=torch.bool)
    response_ids = torch.full((len(rows), length), pad_token_id, dtype=torch.int64)
    response_mask = torch.zeros(len(rows), length, dtype=torch.bool)
    loss_mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        # Masks come from lengths: the padding id may be the end-of-sequence token.
        prompt_ids[i, width - len(prompt) :], prompt_mask[i, width - len(prompt) :] = prompt, True
        response_ids[i, : len(response)], response_mask[i, : len(response)] = response, True
        loss_mask[i, : len(response)] = learnt[i]
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1)
    return DataProto.from_dict(
        tensors={
            "prompts": prompt_ids,
            "responses": response_ids,
            "response_mask": response_mask,
            "loss_mask": loss_mask,
            "input_ids": torch.cat([prompt_ids, response_ids], dim=1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.long().cumsum(-1) - 1).clamp(min=0),
        },
        non_tensors={
            "uid": unique_names([str(item.get("index", number)) for number, item in enumerate(items)]),
            "data_source": [str(item.get("data_source", "unknown")) for item in items],
        },
        meta_info={"pad_token_id": pad_token_id},
    )


def _row(item: Mapping[str, Any], number: int) -> tuple[Tensor, Tensor, int]:
    """Ids, mask and the place of the first learnt token."""
    name = f"Row {item.get('index', number)} of the batch"
    ids, weights = (_numbers(item, key, name) for key in ("input_ids", "loss_mask"))
    if ids.is_floating_point() and len(ids):
        raise DataError(f"{name} has numbers with a fraction as input_ids ({ids[0].item()}); these are token ids.")
    ids, mask = ids.long(), weights != 0
    if not torch.equal(weights, mask.to(weights.dtype)):
        raise DataError(
            f"{name} has a loss_mask of other values than 0 and 1: a token is learnt or not, by parts it is not."
        )
    if len(ids) != len(mask):
        raise DataError(f"{name} has {len(ids)} input_ids and a loss_mask of {len(mask)}; each token needs one.")
    if "attention_mask" in item:
        there = torch.as_tensor(item["attention_mask"]).reshape(-1) != 0
        ids, mask = ids[there], mask[there]
    if not mask.any():
        raise DataError(f"{name} has no token to learn: its loss_mask is false everywhere.")
    first = int(mask.int().argmax())
    if first == 0:
        raise DataError(f"{name} begins with a token to learn, which nothing predicts: its loss_mask begins with true.")
    return ids, mask, first


def _numbers(item: Mapping[str, Any], key: str, name: str) -> Tensor:
    try:
        return torch.as_tensor(item[key]).reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} has {key} that are no list of numbers: {error}.") from error
