"""Padded rows to one packed row of real tokens, and per-token results back to [batch, response]."""

from dataclasses import dataclass

import torch
from torch import Tensor

from burnish.model.attention import PackedContext


@dataclass(frozen=True)
class Packed:
    """One packed row: what the model is called with, and which of its positions predict which response tokens.

    Attributes:
        input_ids: [1, tokens] int64.
        position_ids: [1, tokens] int64, counted from 0 in each segment.
        context: attention inside each segment.
        label_positions: [labels] int64, packed index of the state that predicts each label.
        labels: [labels] int64, response tokens.
        rows, columns: [labels] int64, where each label sits in [batch, response].
        shape: (batch, response).
    """

    input_ids: Tensor
    position_ids: Tensor
    context: PackedContext
    label_positions: Tensor
    labels: Tensor
    rows: Tensor
    columns: Tensor
    shape: tuple[int, int]

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes."""
        return self.input_ids.shape[1]


def pack(input_ids: Tensor, attention_mask: Tensor, label_mask: Tensor, device: torch.device | str = "cpu") -> Packed:
    """Drops padding, wherever it is, and everything that no label depends on.

    Causal states behind the last label's predecessor predict nothing, so a segment ends there; a row without labels is
    not computed at all.

    Args:
        input_ids: [batch, sequence]; the last ``label_mask.shape[1]`` columns are the response.
        attention_mask: [batch, sequence], true on real tokens.
        label_mask: [batch, response], true on the tokens whose log-probs or values are wanted.
        device: where the packed tensors go; indices are made on the CPU, so this is one copy and no synchronisation.

    Raises:
        ValueError: a label is padding or has no token before it.
    """
    input_ids, attention_mask, label_mask = input_ids.cpu(), attention_mask.cpu().bool(), label_mask.cpu().bool()
    batch, width = input_ids.shape
    response = label_mask.shape[1]
    wanted = torch.zeros(batch, width, dtype=torch.bool)
    wanted[:, width - response :] = label_mask
    if bool((wanted & ~attention_mask).any()):
        raise ValueError("A response token is wanted where attention_mask says padding.")
    # Position of each token among the real tokens of its row, and of the row's last wanted one.
    position = attention_mask.long().cumsum(1) - 1
    last_wanted = torch.where(wanted, position, -1).amax(1, keepdim=True)
    if bool((wanted & (position == 0)).any()):
        raise ValueError(
            "A response token is wanted of a row that has no token before it: prompts need one token at least."
        )
    kept = attention_mask & (position < last_wanted)
    lengths = kept.sum(1)
    if not bool(kept.any()):
        return _nothing_to_predict(batch, response, device)
    starts = (lengths.cumsum(0) - lengths)[:, None]
    rows, columns = label_mask.nonzero(as_tuple=True)
    label_positions = (starts + position - 1)[wanted]
    return Packed(
        input_ids=input_ids[kept][None].to(device),
        position_ids=position[kept][None].to(device),
        context=PackedContext([n for n in lengths.tolist() if n], device),
        label_positions=label_positions.to(device),
        labels=input_ids[wanted].to(device),
        rows=rows.to(device),
        columns=columns.to(device),
        shape=(batch, response),
    )


def _nothing_to_predict(batch: int, response: int, device: torch.device | str) -> Packed:
    """One token and no label: a rank without work still runs the model, or the others would wait for it for ever."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    one = torch.zeros(1, 1, dtype=torch.int64, device=device)
    return Packed(one, one.clone(), PackedContext([1], device), none, none, none, none, (batch, response))


def unpack_response(values: Tensor, packed: Packed) -> Tensor:
    """[labels] -> [batch, response], zero where there is no label; differentiable."""
    # No view: FSDP2 hooks the tensors that a module returns, and a view would lose its hook to an in-place operation.
    return values.new_zeros(packed.shape).index_put((packed.rows, packed.columns), values)
