"""Validation metrics under verl's names: ``val-core/<data source>/<variable>/mean@<n>``.

The core variable is ``acc`` where the reward function returns it, else ``reward`` (the score itself); the other numbers that it
returns go to ``val-aux/``.  Every prompt counts once: the mean over its n samples first, then over the prompts.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from burnish.protocol import DataProto
from burnish.trainer.ppo.scoring import as_numbers


def validation_metrics(batch: DataProto) -> dict[str, float]:
    """Means per data source over scored validation responses.

    Rows without a score (the reward function abstained or failed) are left out and counted in
    ``val-aux/<source>/num_invalid``.
    """
    others = batch.non_tensor_batch
    valid = batch.tensors["valid"].numpy()
    variables: dict[str, np.ndarray] = {"reward": batch.tensors["token_level_scores"].sum(-1).double().numpy()}
    for key in batch.meta_info.get("reward_extra_keys", []):
        numbers = as_numbers(others[key])
        if numbers is not None:
            variables[key] = numbers
    core = "acc" if "acc" in variables else "reward"
    sources = others.get("data_source", np.array(["unknown"] * len(batch), dtype=object))
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(sources):
        rows = np.flatnonzero([s == source for s in sources])
        scored = rows[valid[rows]]
        # Of all rows: a row without a score must not give the metric another name.
        n = max(Counter(others["uid"][rows]).values())
        metrics[f"val-aux/{source}/num_prompts"] = float(len(set(others["uid"][rows])))
        metrics[f"val-aux/{source}/num_invalid"] = float(len(rows) - len(scored))
        if len(scored) == 0:
            continue
        for name, values in variables.items():
            section = "val-core" if name == core else "val-aux"
            mean = _mean_over_prompts(values[scored], others["uid"][scored])
            metrics[f"{section}/{source}/{name}/mean@{n}"] = mean
    return metrics


def _mean_over_prompts(values: np.ndarray, uids: Sequence[str]) -> float:
    """Mean over prompts of the mean over samples; NaN where there is no number."""
    groups: dict[str, list[float]] = defaultdict(list)
    for value, uid in zip(values, uids, strict=True):
        if np.isfinite(value):
            groups[uid].append(float(value))
    if not groups:
        return float("nan")
    return float(np.mean([np.mean(group) for group in groups.values()]))
