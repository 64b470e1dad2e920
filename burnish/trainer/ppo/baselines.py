"""ReMax's baseline (arXiv:2310.10505): the score of one greedy response to each prompt."""

import numpy as np
import torch

from burnish.protocol import DataProto, object_array


def one_row_per_prompt(batch: DataProto, *, sample_index: int) -> DataProto:
    """The first row of each prompt, as sample number ``sample_index``: one that none of its other rows has."""
    _, first = np.unique(batch.non_tensor_batch["uid"].astype(str), return_index=True)
    rows = batch.select_idxs(np.sort(first))
    rows.non_tensor_batch["sample_index"] = object_array([sample_index] * len(rows))
    return rows


def add_reward_baselines(batch: DataProto, greedy: DataProto) -> DataProto:
    """Adds ``reward_baselines`` [batch]: on every row the score of its prompt's row of ``greedy``, NaN where that has none.

    Args:
        greedy: scored, one row per prompt.
    """
    scores = greedy.tensors["token_level_scores"].sum(-1).masked_fill(~greedy.tensors["valid"], torch.nan)
    of_prompt = dict(zip(greedy.non_tensor_batch["uid"], scores.tolist(), strict=True))
    batch.tensors["reward_baselines"] = torch.tensor([of_prompt[uid] for uid in batch.non_tensor_batch["uid"]])
    return batch


def drop_rows_without_baseline(batch: DataProto) -> dict[str, float]:
    """Rows of a scored batch with nothing to compare their score with are not valid.

    Returns:
        the metrics ``reward/baseline_mean``, over the prompts that have one, and ``reward/baseline_abstain_count``: prompts
        whose greedy response could not be scored.
    """
    baselines = batch.tensors["reward_baselines"]
    known = ~baselines.isnan()
    batch.tensors["valid"] = batch.tensors["valid"] & known
    lost = {uid for uid, has_one in zip(batch.non_tensor_batch["uid"], known.tolist(), strict=True) if not has_one}
    metrics = {"reward/baseline_abstain_count": float(len(lost))}
    if known.any():
        metrics["reward/baseline_mean"] = baselines.nanmean().item()
    return metrics
