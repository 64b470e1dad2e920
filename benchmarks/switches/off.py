"""What burnish does where a switch is off that it always has on: rows with their padding, a head that makes whole logits.

Neither exists in burnish itself. Both compute what burnish computes, with the same gradient, in the way that is plain: so
what a switch gains is measured against something that differs in nothing else.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from burnish.engine import fsdp
from burnish.engine.rows import Rows
from burnish.model import policy
from burnish.model.kernels.head import LogitTransform
from burnish.model.packing import Packed, unpack_response
from burnish.protocol import DataProto


class CountedRows(Rows):
    """As the engine packs rows, counting what it computes: (tokens, labels) of each micro-batch since the list was emptied."""

    computed: list[tuple[int, int]] = []  # noqa: RUF012  one list for all batches

    def pack(self, indices: list[int], device: torch.device) -> Packed:
        """See `Rows.pack`."""
        packed = super().pack(indices, device)
        self.computed.append((packed.num_tokens, packed.labels.numel()))
        return packed


@dataclasses.dataclass(frozen=True)
class PaddedPacked(Packed):
    """A packed row whose segments carry padding.

    Attributes:
        wanted: [batch, response] bool, where a label is one that was asked for.
    """

    wanted: Tensor | None = None


class PaddedRows(CountedRows):
    """Rows that compute their padding: each as many tokens as the longest prompt and the longest response of the batch have,
    and a label in every column of the response.

    Padding lies behind the response, where causality hides it. Where prompts are shared, responses are padded and prompts are
    not, in favour of padding.
    """

    def __init__(self, batch: DataProto, share_prompts: bool | None) -> None:
        rows = Rows(batch, share_prompts)
        self.wanted = rows.label_mask
        shares = rows._prompts is not None
        super().__init__(_padded(rows, behind_prompt=not shares), shares)

    def pack(self, indices: list[int], device: torch.device) -> Packed:
        """See `Rows.pack`."""
        packed = super().pack(indices, device)
        fields = {field.name: getattr(packed, field.name) for field in dataclasses.fields(packed)}
        return PaddedPacked(**fields, wanted=self.wanted[torch.tensor(indices, dtype=torch.int64)].to(device))


def _padded(rows: Rows, *, behind_prompt: bool) -> DataProto:
    """The batch with its padding as tokens: that of the response, and with ``behind_prompt`` that of the prompt after it."""
    width = rows.response_width
    before = rows.input_ids.shape[1] - width
    prompts = rows.attention_mask[:, :before].sum(1, keepdim=True)
    extra = before if behind_prompt else 0
    end = width + (before - prompts if behind_prompt else torch.zeros_like(prompts))
    column = torch.arange(width + extra)
    # As many labels as a response has columns; a row is computed as far as its last label.
    num_padding = (width - rows.label_mask.sum(1, keepdim=True)).maximum((end > width).long())
    labels = F.pad(rows.label_mask, (0, extra)) | ((column < end) & (column >= end - num_padding))
    return DataProto.from_dict(
        tensors={
            "input_ids": F.pad(rows.input_ids, (0, extra)),
            "attention_mask": torch.cat([rows.attention_mask[:, :before], column < end], 1).long(),
            "responses": F.pad(rows.input_ids[:, before:], (0, extra)),
            "response_mask": labels,
        }
    )


def unpack_wanted(values: Tensor, packed: Packed) -> Tensor:
    """`unpack_response`, without the labels of padding."""
    found = unpack_response(values, packed)
    if not isinstance(packed, PaddedPacked) or packed.wanted is None:
        return found
    return found[:, : packed.wanted.shape[1]].masked_fill(~packed.wanted, 0.0)


def plain_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    transform: LogitTransform = LogitTransform(),  # noqa: B008  frozen
    temperature: float = 1.0,
    outputs: Sequence[str] = ("log_probs",),
    chunk_size: int | None = None,
) -> dict[str, Tensor]:
    """`burnish.model.head.fused_head` by torch's own operations on float32 logits [tokens, vocab]; gradients through log-probs.

    Raises:
        ValueError: a family that transforms its logits, or an output that is not computed here.
    """
    known = {"log_probs", "entropy", "top1_log_probs"}
    if transform != LogitTransform() or chunk_size is not None or not set(outputs) <= known:
        raise ValueError(f"The plain head gives {sorted(known)} of plain logits; asked for {sorted(outputs)}.")
    log_softmax = (F.linear(hidden, weight, bias).float() / temperature).log_softmax(-1)
    values = {"log_probs": log_softmax.gather(1, labels[:, None])[:, 0]}
    with torch.no_grad():
        if "entropy" in outputs:
            values["entropy"] = -(log_softmax.exp() * log_softmax).sum(-1)
        if "top1_log_probs" in outputs:
            values["top1_log_probs"] = log_softmax.amax(-1)
    return {name: values[name] for name in outputs}


@contextmanager
def model_passes(*, remove_padding: bool, fused_head: bool) -> Iterator[None]:
    """Inside, the engines of this process compute their passes with these two on or off."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(fsdp, "Rows", CountedRows if remove_padding else PaddedRows))
        stack.enter_context(patch.object(policy, "unpack_response", unpack_wanted))
        if not fused_head:
            stack.enter_context(patch.object(policy, "fused_head", plain_head))
        yield
