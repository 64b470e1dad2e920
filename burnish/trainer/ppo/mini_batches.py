"""Mini-batches are formed here, on the driver, for all ranks at once.

Each optimizer step trains on whole groups, drawn over the whole batch and then spread over the ranks, so that one rank and
N ranks take the same steps on the same rows. (Cutting each rank's slice into mini-batches, as is common, makes the content of
a step depend on the number of ranks.)
"""

import torch

from burnish.core_algos.blocks import row_lengths
from burnish.protocol import DataProto
from burnish.trainer.ppo.balance import RowWork, spread


def plan_mini_batches(
    batch: DataProto,
    *,
    num_prompts: int,
    dp_size: int,
    loss_mask_key: str = "loss_mask",
    shuffle_seed: int | None = None,
    balance: bool = True,
    share_prompts: bool | None = None,
) -> DataProto:
    """Orders the rows of ``batch`` so that an equal split over ``dp_size`` ranks gives every rank its share of each mini-batch.

    Args:
        batch: rows with ``uid``, ``attention_mask`` [batch, seq], ``response_mask`` and the loss mask [batch, response].
        num_prompts: prompts (groups) per optimizer step; the last step may hold fewer.
        shuffle_seed: draws the order of the groups; None keeps the order of the batch.
        balance: spread each mini-batch over the ranks by cost; False: in order.
        share_prompts: whether a rank computes the prompt of its rows of a group once; see `spread`.

    Returns:
        The rows, rank by rank and within a rank step by step, with ``mini_batch_id`` [batch] added, and in
        ``meta_info["mini_batches"]`` the denominators of every step, counted over all ranks:
        ``{"batch_num_tokens": tokens in the loss, "global_batch_size": rows with a token in the loss}``; and
        ``meta_info["seqlen_metrics"]``, how evenly tokens lie on the ranks.
        Where a step's rows do not divide by ``dp_size``, copies without loss fill up. A mini-batch without a token in the
        loss stays in its place; it is no update.
    """
    mini_batches = _group_rows(batch.non_tensor_batch["uid"], num_prompts, shuffle_seed)
    work = RowWork.of(batch)
    num_trained = row_lengths(batch.tensors[loss_mask_key].bool()).tolist()
    per_rank: list[list[int]] = [[] for _ in range(dp_size)]
    ids: list[list[int]] = [[] for _ in range(dp_size)]
    fillers: list[list[bool]] = [[] for _ in range(dp_size)]
    denominators = []
    for mini_batch_id, rows in enumerate(mini_batches):
        denominators.append(_denominators([num_trained[row] for row in rows]))
        num_fill = -len(rows) % dp_size
        shortest = min(rows, key=work.lengths.__getitem__)
        padded = rows + [shortest] * num_fill
        is_filler = [False] * len(rows) + [True] * num_fill
        parts = spread(work.select(rows, num_fill), dp_size, balance=balance, share_prompts=share_prompts)
        for rank, part in enumerate(parts):
            per_rank[rank] += [padded[i] for i in part]
            fillers[rank] += [is_filler[i] for i in part]
            ids[rank] += [mini_batch_id] * len(part)
    planned = batch.select_idxs([row for rows in per_rank for row in rows])
    filler = torch.tensor([flag for flags in fillers for flag in flags])
    if filler.any():
        for key in {loss_mask_key, "response_mask"}:
            planned.tensors[key] = planned.tensors[key] & ~filler[:, None]
    planned.tensors["mini_batch_id"] = torch.tensor([i for rank_ids in ids for i in rank_ids])
    planned.meta_info = {
        **batch.meta_info,
        "mini_batches": denominators,
        "seqlen_metrics": _seqlen_metrics(work.lengths, per_rank, fillers),
    }
    return planned


def _seqlen_metrics(lengths: list[int], per_rank: list[list[int]], fillers: list[list[bool]]) -> dict[str, float]:
    """``global_seqlen/*``: tokens of the rank with the fewest and with the most, if the batch were cut up in its order
    (``min``, ``max``) and as it is spread (``balanced_min``, ``balanced_max``). Copies that fill up compute nothing and count
    nothing."""
    dp_size = len(per_rank)
    each = -(-len(lengths) // dp_size)
    in_order = [sum(lengths[rank * each : (rank + 1) * each]) for rank in range(dp_size)]
    spread_out = [
        sum(length for length, is_filler in zip(map(lengths.__getitem__, rows), flags, strict=True) if not is_filler)
        for rows, flags in zip(per_rank, fillers, strict=True)
    ]
    numbers = {
        "min": min(in_order),
        "max": max(in_order),
        "minmax_diff": max(in_order) - min(in_order),
        "balanced_min": min(spread_out),
        "balanced_max": max(spread_out),
        "mean": sum(lengths) / dp_size,
    }
    return {f"global_seqlen/{name}": float(number) for name, number in numbers.items()}


def _denominators(num_trained: list[int]) -> dict[str, int]:
    """Of a step whose rows have so many tokens in the loss."""
    return {"batch_num_tokens": sum(num_trained), "global_batch_size": sum(number > 0 for number in num_trained)}


def _group_rows(uids, num_prompts: int, shuffle_seed: int | None) -> list[list[int]]:
    """Row numbers per mini-batch: ``num_prompts`` whole groups each."""
    groups: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        groups.setdefault(uid, []).append(row)
    members = list(groups.values())
    if shuffle_seed is not None:
        generator = torch.Generator().manual_seed(shuffle_seed)
        members = [members[i] for i in torch.randperm(len(members), generator=generator).tolist()]
    return [
        [row for group in members[start : start + num_prompts] for row in group]
        for start in range(0, len(members), num_prompts)
    ]
