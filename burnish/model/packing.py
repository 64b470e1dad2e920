"""Padded rows to one packed row of real tokens, and per-token results back to [batch, response]."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from burnish.model.attention import PackedContext
from burnish.model.gathering import Gathering, to_device


@dataclass(frozen=True)
class Packed:
    """One packed row: what the model is called with, and which of its positions predict which response tokens.

    Attributes:
        input_ids: [1, tokens] int64.
        position_ids: [1, tokens] int64, counted from 0 in each row; a response goes on where its prompt ends.
        context: attention inside each row.
        label_positions: [labels] int64, packed index of the state that predicts each label. The last state of a shared
            prompt predicts the first token of each of its responses.
        labels: [labels] int64, response tokens.
        rows, columns: [labels] int64, where each label sits in [batch, response].
        shape: (batch, response).
        label_gathering: reads the states at ``label_positions``; made anew where it is of other positions or missing.
    """

    input_ids: Tensor
    position_ids: Tensor
    context: PackedContext
    label_positions: Tensor
    labels: Tensor
    rows: Tensor
    columns: Tensor
    shape: tuple[int, int]
    label_gathering: Gathering | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes."""
        return self.input_ids.shape[1]

    def label_states(self, hidden: Tensor) -> Tensor:
        """The states that predict the labels: [tokens, hidden] -> [labels, hidden]."""
        gathering = self.label_gathering
        if gathering is None or gathering.index is not self.label_positions:
            gathering = Gathering(self.label_positions.cpu(), self.num_tokens, device=self.label_positions.device)
        return gathering(hidden)


@dataclass(frozen=True)
class RowSizes:
    """What each row of a batch asks of the model.

    Attributes:
        lengths: tokens that the row computes by itself: those that a label depends on, prompt included.
        prompt_lengths: how many of them are the prompt's.
        prompts: a number for each row, the same for rows with the same prompt.
    """

    lengths: list[int]
    prompt_lengths: list[int]
    prompts: list[int]

    @property
    def shared_tokens(self) -> int:
        """Tokens of all rows together where every prompt is computed once."""
        return self.num_tokens(range(len(self.lengths)), shared=True)

    def num_tokens(self, rows: Iterable[int], *, shared: bool) -> int:
        """Tokens that these rows compute together, each its own prompt or the same prompts once."""
        if not shared:
            return sum(self.lengths[row] for row in rows)
        own, prompts = 0, {}
        for row in rows:
            own += self.lengths[row] - self.prompt_lengths[row]
            if self.lengths[row]:
                prompts[self.prompts[row]] = self.prompt_lengths[row]
        return own + sum(prompts.values())


def row_sizes(input_ids: Tensor, attention_mask: Tensor, label_mask: Tensor) -> RowSizes:
    """The sizes of rows as `pack` packs them; the arguments are its, on the CPU.

    The prompt is what lies before the response's columns. Where a row computes nothing, its prompt has no length either.
    """
    mask = attention_mask.bool()
    position = mask.cumsum(1, dtype=torch.int32) - 1
    wanted = label_mask.bool()
    width = mask.shape[1] - wanted.shape[1]
    # A row computes as many tokens as lie before the last one that is wanted.
    lengths = torch.where(wanted, position[:, width:], 0).amax(1) if wanted.shape[1] else torch.zeros(len(mask))
    prompt_lengths = mask[:, :width].sum(1).minimum(lengths)
    ids, real = input_ids[:, :width].numpy(), mask[:, :width].numpy()
    # The real tokens of one row lie behind those of the row before it.
    tokens, ends = ids[real].tobytes(), (real.sum(1) * ids.itemsize).cumsum().tolist()
    seen: dict[bytes, int] = {}
    prompts = [seen.setdefault(tokens[begin:end], len(seen)) for begin, end in pairwise([0, *ends])]
    return RowSizes(lengths.int().tolist(), prompt_lengths.int().tolist(), prompts)


def pack(
    input_ids: Tensor,
    attention_mask: Tensor,
    label_mask: Tensor,
    device: torch.device | str = "cpu",
    *,
    prompts: Sequence[int] | None = None,
) -> Packed:
    """Drops padding, wherever it is, and everything that no label depends on.

    Causal states behind the last label's predecessor predict nothing, so a segment ends there; a row without labels is
    not computed at all. Rows that share a prompt stand next to each other: the prompt, then the response of each of them,
    which sees the prompt and itself.

    Args:
        input_ids: [batch, sequence]; the last ``label_mask.shape[1]`` columns are the response.
        attention_mask: [batch, sequence], true on real tokens.
        label_mask: [batch, response], true on the tokens whose log-probs or values are wanted.
        device: where the packed tensors go; all is made on the CPU, and the host does not wait for the copy.
        prompts: a number for each row. Rows with the same number have the same tokens before the response, and these are
            computed once. None: every row computes its own.

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
    position = attention_mask.cumsum(1, dtype=torch.int32) - 1
    last_wanted = torch.where(wanted, position, -1).amax(1, keepdim=True)
    if bool((wanted & (position == 0)).any()):
        raise ValueError(
            "A response token is wanted of a row that has no token before it: prompts need one token at least."
        )
    kept = attention_mask & (position < last_wanted)
    if not bool(kept.any()):
        return _nothing_to_predict(batch, response, device)
    lengths = kept.sum(1)
    prompt_lengths = kept[:, : width - response].sum(1)
    order = np.arange(batch)
    leaders = np.full(batch, -1)
    if prompts is not None:
        order, leaders = _grouped(np.asarray(prompts), lengths.numpy(), prompt_lengths.numpy())
    layout = _Layout(lengths.numpy()[order], prompt_lengths.numpy()[order], leaders)
    if prompts is not None:
        if (order[1:] < order[:-1]).any():
            rearranged = torch.from_numpy(order)
            input_ids, position, kept, wanted = (x[rearranged] for x in (input_ids, position, kept, wanted))
        kept[torch.from_numpy(leaders >= 0), : width - response] = False
    label_row, column = wanted.nonzero(as_tuple=True)
    tokens, positions, labels, rows, columns = to_device(
        [
            input_ids[kept][None],
            position[kept][None].long(),
            input_ids[wanted],
            torch.from_numpy(order)[label_row],
            column - (width - response),
        ],
        device,
    )
    label_places = layout.place(label_row, position[wanted].long() - 1)
    label_gathering = Gathering(label_places, tokens.shape[1], device=device)
    return Packed(
        input_ids=tokens,
        position_ids=positions,
        context=PackedContext(layout.segments, device, layout.prefixes if prompts is not None else None),
        label_positions=label_gathering.index,
        labels=labels,
        rows=rows,
        columns=columns,
        shape=(batch, response),
        label_gathering=label_gathering,
    )


def _grouped(prompts: np.ndarray, lengths: np.ndarray, prompt_lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows in an order in which those of one prompt are neighbours, and for each row in that order the place of the row
    that computes its prompt, -1 where it does so itself."""
    computing = lengths > 0
    _, first, group = np.unique(prompts, return_index=True, return_inverse=True)
    # By the first row of the prompt; a row that computes nothing cannot be the one that computes the prompt.
    order = np.lexsort((~computing, first[group]))
    can_share = (computing & (prompt_lengths > 0))[order]
    places = can_share.nonzero()[0]
    # The first of those of each prompt leads.
    leader_of = np.full(len(order), -1)
    leader_of[group[order[places]][::-1]] = places[::-1]
    leaders = np.where(can_share, leader_of[group[order]], -1)
    leaders[leaders == np.arange(len(order))] = -1
    return order, leaders


class _Layout:
    """Where the tokens of the rows come to lie in the packed row.

    Args:
        lengths: tokens that each row would compute alone.
        prompt_lengths: how many of them are the prompt's.
        leaders: the row whose prompt each row takes, -1 where it has its own.

    Attributes:
        segments: tokens of each segment.
        prefixes: see `PackedContext`.
    """

    def __init__(self, lengths: np.ndarray, prompt_lengths: np.ndarray, leaders: np.ndarray) -> None:
        own = np.where(leaders >= 0, lengths - prompt_lengths, lengths)
        starts = own.cumsum() - own
        # Place of token x of a row: before + x, and for the shared prompt that of the leader.
        self._before = torch.from_numpy(np.where(leaders >= 0, starts - prompt_lengths, starts))
        self._leader_before = torch.from_numpy(np.where(leaders >= 0, starts[leaders], starts))
        self._prompt_lengths = torch.from_numpy(np.where(leaders >= 0, prompt_lengths, 0))
        leads = np.zeros(len(leaders), dtype=bool)
        leads[leaders[leaders >= 0]] = True
        # A row that others take the prompt of is two segments: the prompt, and a response like theirs.
        before = np.where(leads, prompt_lengths, 0)
        continues = leads | (leaders >= 0)
        first = np.where(leads, starts, starts[leaders])
        nothing = np.zeros_like(starts)
        segments = np.stack([before, own - before], 1).reshape(-1)
        firsts, prompts = (
            np.stack([nothing, np.where(continues, x, 0)], 1).reshape(-1) for x in (first, prompt_lengths)
        )
        real = segments > 0
        self.segments: list[int] = segments[real].tolist()
        self.prefixes: list[tuple[int, int]] = list(zip(firsts[real].tolist(), prompts[real].tolist(), strict=True))

    def place(self, rows: Tensor, positions: Tensor) -> Tensor:
        """The packed index of the tokens at ``positions`` of ``rows``."""
        before = torch.where(positions < self._prompt_lengths[rows], self._leader_before[rows], self._before[rows])
        return before + positions


def _nothing_to_predict(batch: int, response: int, device: torch.device | str) -> Packed:
    """One token and no label: a rank without work still runs the model, or the others would wait for it for ever."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    one = torch.zeros(1, 1, dtype=torch.int64, device=device)
    return Packed(one, one.clone(), PackedContext([1], device), none, none, none, none, (batch, response))


def unpack_response(values: Tensor, packed: Packed) -> Tensor:
    """[labels] -> [batch, response], zero where there is no label; differentiable."""
    # No view: FSDP2 hooks the tensors that a module returns, and a view would lose its hook to an in-place operation.
    return values.new_zeros(packed.shape).index_put((packed.rows, packed.columns), values)
