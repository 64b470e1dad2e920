"""Rows spread over ranks so that all have a like amount of work, for updates and for passes without gradient."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch

from burnish.core_algos.blocks import row_lengths
from burnish.protocol import DataProto
from burnish.trainer.ppo.stages import FORWARD_KEYS
from burnish.utils.seqlen_balancing import get_seqlen_balanced_partitions, sequence_cost, sharing_pays


@dataclass(frozen=True)
class RowWork:
    """What each row asks of its rank.

    Attributes:
        lengths, prompt_lengths: tokens, and how many of them are the prompt's.
        groups: the same for rows with the same prompt.
    """

    lengths: list[int]
    prompt_lengths: list[int]
    groups: list[Hashable]

    @classmethod
    def of(cls, batch: DataProto) -> "RowWork":
        """Of rows with ``uid``, ``attention_mask`` [batch, seq] and ``response_mask`` [batch, response]."""
        mask = batch.tensors["attention_mask"].bool()
        prompts = mask[:, : mask.shape[1] - batch.tensors["response_mask"].shape[1]]
        # Lists: to look into a tensor row by row takes longer than all else here.
        lengths, prompt_lengths = row_lengths(mask).tolist(), row_lengths(prompts).tolist()
        return cls(lengths, prompt_lengths, list(batch.non_tensor_batch["uid"]))

    def select(self, rows: Sequence[int], num_fillers: int = 0) -> "RowWork":
        """Of ``rows`` in this order, and of rows after them that only fill up and compute nothing."""
        nothing = [0] * num_fillers
        return RowWork(
            [self.lengths[row] for row in rows] + nothing,
            [self.prompt_lengths[row] for row in rows] + nothing,
            [self.groups[row] for row in rows] + [("filler", number) for number in range(num_fillers)],
        )

    def shares(self, share_prompts: bool | None) -> bool:
        """Whether a rank computes the prompt of its rows of a group once; None: where it saves enough."""
        if share_prompts is None:
            shared = sum(self.lengths) - sum(self.prompt_lengths)
            shared += sum(dict(zip(self.groups, self.prompt_lengths, strict=True)).values())
            return sharing_pays(sum(self.lengths), shared)
        return share_prompts

    def cost(self, rows: Iterable[int]) -> int:
        """Of ``rows`` on one rank, prompts shared."""
        total, prompts = 0, {}
        for row in rows:
            prompt = self.prompt_lengths[row]
            prompts[self.groups[row]] = prompt
            total += sequence_cost(self.lengths[row] - prompt, prompt)
        return total + sum(sequence_cost(prompt) for prompt in prompts.values())


def spread(work: RowWork, dp_size: int, *, balance: bool, share_prompts: bool | None) -> list[list[int]]:
    """Positions for each rank, equally many and ascending; their number divides by ``dp_size``.

    Args:
        balance: by cost; False: in order.
        share_prompts: whether rows of a group on one rank share their prompt. Groups then stay whole where that leaves the
            rank with the most work less of it than single rows, which are easier to balance, would.
    """
    num = len(work.lengths)
    if dp_size == 1 or not balance:
        per_rank = num // dp_size
        return [list(range(rank * per_rank, (rank + 1) * per_rank)) for rank in range(dp_size)]
    by_rows = get_seqlen_balanced_partitions(
        [sequence_cost(length) for length in work.lengths], dp_size, equal_size=True
    )
    if not work.shares(share_prompts):
        return by_rows
    return min(_by_groups(work, dp_size), by_rows, key=lambda parts: max(map(work.cost, parts)))


def _by_groups(work: RowWork, dp_size: int) -> list[list[int]]:
    """Whole groups as far as all ranks get equally many of each size, the others in pieces of one size."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for row, group in enumerate(work.groups):
        members[group].append(row)
    of_size: dict[int, list[list[int]]] = defaultdict(list)
    for rows in members.values():
        of_size[len(rows)].append(rows)
    # Pieces of one size are shared out together: each rank gets equally many.
    deals: list[list[list[int]]] = []
    left: list[list[int]] = []
    for groups in of_size.values():
        groups.sort(key=lambda rows: (-work.cost(rows), rows[0]))
        num_whole = len(groups) // dp_size * dp_size
        deals.append(groups[:num_whole])
        left += groups[num_whole:]
    if left:
        size = math.gcd(sum(map(len, left)) // dp_size, *map(len, left))
        deals.append([rows[start : start + size] for rows in left for start in range(0, len(rows), size)])
    ranks: list[list[int]] = [[] for _ in range(dp_size)]
    for pieces in filter(None, deals):
        parts = get_seqlen_balanced_partitions([work.cost(rows) for rows in pieces], dp_size, equal_size=True)
        rows_of = [[row for piece in part for row in pieces[piece]] for part in parts]
        # The part with the most work to the rank that has the least so far.
        rows_of.sort(key=work.cost, reverse=True)
        ranks.sort(key=work.cost)
        for rank, rows in zip(ranks, rows_of, strict=True):
            rank += rows
    return sorted(sorted(rows) for rows in ranks)


def on_balanced_ranks(
    call: Callable[[DataProto], DataProto],
    batch: DataProto,
    dp_size: int,
    *,
    balance: bool,
    share_prompts: bool | None,
) -> DataProto:
    """What ``call`` gives for the rows of ``batch``, in their order, the work spread over the ranks.

    Args:
        call: a worker group's method that cuts a batch into equal parts, one for each rank: a pass without gradient. It gets
            what such a pass reads.
    """
    rows = batch.select(**FORWARD_KEYS)
    if dp_size == 1 or not balance:
        return call(rows)
    num, num_fillers = len(rows), -len(rows) % dp_size
    work = RowWork.of(batch)
    shortest = min(range(num), key=work.lengths.__getitem__)
    parts = spread(work.select(range(num), num_fillers), dp_size, balance=True, share_prompts=share_prompts)
    order = [position for part in parts for position in part]
    planned = rows.select_idxs([position if position < num else shortest for position in order])
    if num_fillers:
        is_row = torch.tensor([position < num for position in order])
        planned.tensors["response_mask"] = planned.tensors["response_mask"].bool() & is_row[:, None]
    place = {position: place for place, position in enumerate(order)}
    return call(planned).select_idxs([place[row] for row in range(num)])
