"""Validation metrics under verl's names: ``val-core/<data source>/<variable>/mean@<n>``.

The core variable is ``acc`` where the reward function returns it, else ``reward`` (the score itself); the other numbers that it
returns go to ``val-aux/``.  Sets that have a name (``data.val_files={name: files}``) stand under it instead of the data source.
Every prompt counts once: the mean over its n samples first, then over the prompts.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from burnish.protocol import DataProto
from burnish.trainer.ppo.scoring import as_numbers


def validation_metrics(batch: DataProto) -> dict[str, float]:
    """Means per validation set that has a name, else per data source, over scored validation responses.

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
    unknown = np.array(["unknown"] * len(batch), dtype=object)
    sources = others.get("validation_set", others.get("data_source", unknown))
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


def failure_counts(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """How many responses of all validation batches were not scored as they should be, under
    ``val-aux/reward/<reason>_count``: those of errors, timeouts, numbers that are not finite, and abstentions."""
    counts: dict[str, float] = {}
    for metrics in rounds:
        for key, value in metrics.items():
            if key.startswith("reward/") and key.endswith("_count"):
                counts[f"val-aux/{key}"] = counts.get(f"val-aux/{key}", 0.0) + value
    return counts


def _mean_over_prompts(values: np.ndarray, uids: Sequence[str]) -> float:
    """Mean over prompts of the mean over samples; NaN where there is no number."""
    groups: dict[str, list[float]] = defaultdict(list)
    for value, uid in zip(values, uids, strict=True):
        if np.isfinite(value):
            groups[uid].append(float(value))
    if not groups:
        return float("nan")
    return float(np.mean([np.mean(group) for group in groups.values()]))
