"""Brings tensors of several batches to common widths, by the batch-key table."""

from collections.abc import Mapping, Sequence

import torch

from burnish._protocol.keys import PAD_TOKEN, BatchKey
from burnish.utils.errors import BatchError

Tensors = dict[str, torch.Tensor]


def align(batches: Sequence[Tensors], table: Mapping[str, BatchKey], pad_token_id: int) -> list[Tensors]:
    """Pads the tensors of ``batches`` so that keys of one kind have one width in all of them.

    Left-padded keys grow to the widest prompt, right-padded ones to the widest response. ``prompt_response`` keys grow
    on both sides, so two batches of equal total width but different split are re-padded too. Keys that the table does
    not know, or that have one dimension, are left alone; so is everything when no width differs.

    Args:
        batches: tensors ``[batch, width, ...]`` of each batch; the numbers of rows may differ.
        table: the batch-key table.
        pad_token_id: stands in for :data:`PAD_TOKEN`.

    Raises:
        BatchError: a ``prompt_response`` key comes without anything that tells how much of it is response.
    """
    padded = [{key: t for key, t in batch.items() if _pad_side(key, t, table)} for batch in batches]
    splits = _splits(padded, table)
    if len({_signature(batch, split) for batch, split in zip(padded, splits, strict=True) if batch}) <= 1:
        return [dict(batch) for batch in batches]
    prompt = max(split[0] for split in splits)
    response = max(split[1] for split in splits)
    aligned = []
    for batch, known, (_, own_response) in zip(batches, padded, splits, strict=True):
        result = dict(batch)
        for key, tensor in known.items():
            width, entry = tensor.shape[1], table[key]
            value = pad_token_id if entry.pad_value == PAD_TOKEN else entry.pad_value
            if entry.pad == "left":
                result[key] = _pad(tensor, prompt - width, 0, value)
            elif entry.pad == "right":
                result[key] = _pad(tensor, 0, response - width, value)
            else:
                result[key] = _pad(tensor, prompt - (width - own_response), response - own_response, value)
        aligned.append(result)
    return aligned


def _pad_side(key: str, tensor: torch.Tensor, table: Mapping[str, BatchKey]) -> str | None:
    return table[key].pad if key in table and tensor.ndim >= 2 else None


def _signature(batch: Tensors, split: tuple[int, int]) -> tuple:
    return split, tuple(sorted((key, t.shape[1]) for key, t in batch.items()))


def _splits(batches: Sequence[Tensors], table: Mapping[str, BatchKey]) -> list[tuple[int, int]]:
    """The widths (prompt, response) of each batch, of which its ``prompt_response`` keys are the sum."""
    responses = [_response_width(batch, table) for batch in batches]
    totals = [{t.shape[1] for key, t in batch.items() if table[key].pad == "prompt_response"} for batch in batches]
    split_of_total = {
        total: response
        for response, own in zip(responses, totals, strict=True)
        if response is not None
        for total in own
    }
    splits = []
    for batch, response, own in zip(batches, responses, totals, strict=True):
        if response is None and own and split_of_total:
            unknown = own - split_of_total.keys()
            if unknown:
                raise BatchError(
                    f"A batch holds {sorted(batch)} of width {sorted(unknown)[0]} without 'responses', so how much of "
                    f"it is response is unknown, and it cannot be joined with a batch of width "
                    f"{sorted(split_of_total)[0]}. Keep 'responses' beside it."
                )
            response = split_of_total[min(own)]
        right = [t.shape[1] for key, t in batch.items() if table[key].pad == "right"]
        left = [t.shape[1] for key, t in batch.items() if table[key].pad == "left"]
        prompt = max([*left, *(total - (response or 0) for total in own)], default=0)
        splits.append((prompt, max([*right, response or 0])))
    return splits


def _response_width(batch: Tensors, table: Mapping[str, BatchKey]) -> int | None:
    if "responses" in batch:
        return batch["responses"].shape[1]
    return max((t.shape[1] for key, t in batch.items() if table[key].pad == "right"), default=None)


def _pad(tensor: torch.Tensor, left: int, right: int, value: bool | int | float | str) -> torch.Tensor:
    if not left and not right:
        return tensor
    rows, width, *rest = tensor.shape
    wider = tensor.new_full((rows, left + width + right, *rest), value)  # type: ignore[arg-type]
    wider[:, left : left + width] = tensor
    return wider


def check_same_shapes(batches: Sequence[Tensors]) -> None:
    """Raises ``BatchError`` naming the first key whose shapes differ in more than the rows."""
    for key, first in batches[0].items():
        for other in batches[1:]:
            if other[key].shape[1:] != first.shape[1:]:
                raise BatchError(
                    f"The key {key!r} has shape {list(first.shape)} in one batch and {list(other[key].shape)} in "
                    f"another, and the batch-key table does not say how to pad it. Pad it before joining them."
                )
