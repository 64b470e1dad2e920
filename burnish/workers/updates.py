"""What actor and critic do alike with a planned batch: one optimizer step per mini-batch, metrics averaged over the steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from burnish.config import FSDPActorConfig, FSDPCriticConfig, RefConfig, RolloutConfig, SFTDataConfig
from burnish.engine import FSDPEngine, LossFn
from burnish.model.flops import device_peak_flops
from burnish.protocol import DataProto
from burnish.utils.machine import used_memory_bytes


def update_kwargs(config: FSDPActorConfig | FSDPCriticConfig) -> dict[str, int | None]:
    """How updates are cut into micro-batches."""
    return _batching(config.use_dynamic_bsz, config.ppo_micro_batch_size_per_gpu, config.ppo_max_token_len_per_gpu)


def log_prob_kwargs(config: RolloutConfig | RefConfig) -> dict[str, int | None]:
    """How log-prob passes are cut into micro-batches."""
    return _batching(
        config.log_prob_use_dynamic_bsz,
        config.log_prob_micro_batch_size_per_gpu,
        config.log_prob_max_token_len_per_gpu,
    )


def value_kwargs(config: FSDPCriticConfig) -> dict[str, int | None]:
    """How passes for values are cut into micro-batches."""
    return _batching(
        config.use_dynamic_bsz, config.forward_micro_batch_size_per_gpu, config.forward_max_token_len_per_gpu
    )


def sft_kwargs(config: SFTDataConfig) -> dict[str, int | None]:
    """How the passes of supervised fine-tuning are cut into micro-batches."""
    return _batching(config.use_dynamic_bsz, config.micro_batch_size_per_gpu, config.max_token_len_per_gpu)


def _batching(by_tokens: bool, micro_batch_size: int | None, max_token_len: int) -> dict[str, int | None]:
    """Rows per micro-batch where a number is given and not overruled, else a bound of tokens, which holds."""
    if by_tokens or micro_batch_size is None:
        return {"max_token_len": max_token_len}
    return {"micro_batch_size": micro_batch_size}


def run_mini_batches(
    engine: FSDPEngine,
    data: DataProto,
    loss_fn: LossFn,
    *,
    name: str,
    outputs: tuple[str, ...],
    temperature: float,
    loss_scale_factor: float,
    batching: dict[str, int | None],
    prepare: Callable[[DataProto], None] | None = None,
) -> dict[str, float]:
    """Trains on the mini-batches that `plan_mini_batches` has laid out, in their order.

    Args:
        data: this rank's rows, with ``mini_batch_id`` [batch]; ``meta_info`` has ``mini_batches`` (the denominators of each
            step over all ranks) and ``global_steps`` (which decides the learning rate).
        name: "actor", "critic" or "train", the first part of the metrics' names.
        prepare: called with the rows of each mini-batch before its update; see `make_preparation`.

    Returns:
        The steps' metrics joined by `merge_updates`, and ``NAME/empty_updates``: mini-batches that had no token to train on
        on any rank, or none that ``prepare`` left, and so were no update. With no update at all there is nothing but the
        counts.
    """
    per_step: list[dict[str, float]] = []
    mini_batches = data.meta_info["mini_batches"]
    for mini_batch_id, denominators in enumerate(mini_batches):
        info: dict[str, Any] = {
            **denominators,
            "dp_size": engine.dp_size,
            "loss_scale_factor": loss_scale_factor,
        }
        rows = data.select_idxs(data.tensors["mini_batch_id"] == mini_batch_id)
        if prepare is not None and info["batch_num_tokens"] > 0:
            prepare(rows)
            info = engine.global_batch_info(rows, loss_scale_factor)
        if info["batch_num_tokens"] == 0:
            continue
        metrics = engine.train_batch(
            rows, loss_fn, temperature=temperature, outputs=outputs, global_batch_info=info, **batching
        )
        step_metrics = engine.optimizer_step(data.meta_info["global_steps"])
        per_step.append(metrics | {f"{name}/{key}": value for key, value in step_metrics.items()})
    merged = merge_updates(per_step) if per_step else {f"{name}/skipped_updates": 0.0}
    return merged | {f"{name}/empty_updates": float(len(mini_batches) - len(per_step))}


def merge_updates(parts: Sequence[Mapping[str, float]], weights: Sequence[float] | None = None) -> dict[str, float]:
    """The metrics of several optimizer steps (or of several rounds of them) as one.

    Counts (``skipped_updates``, ``empty_updates``) add up, names that end in ``_max`` or ``_min`` and memory keep the extreme,
    ``training/*`` tells of the policy that the rollout sampled from and so is the first part's, everything else is the mean.
    A part that lacks a name, as one without any update lacks most, has no say in it.

    Args:
        weights: optimizer steps in each part; None counts one each.
    """
    weights = [1.0] * len(parts) if weights is None else weights
    merged: dict[str, float] = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        values = [part[key] for part in parts if key in part]
        if key.endswith(("/skipped_updates", "/empty_updates")):
            merged[key] = sum(values)
        elif key.startswith("training/"):
            merged[key] = values[0]
        elif key.endswith("_max") or key.startswith("perf/max_"):
            merged[key] = max(values)
        elif key.endswith("_min"):
            merged[key] = min(values)
        else:
            counts = [weight for part, weight in zip(parts, weights, strict=True) if key in part]
            # Rounds without any update may still have been timed.
            counts = counts if any(counts) else [1.0] * len(values)
            merged[key] = sum(v * w for v, w in zip(values, counts, strict=True)) / sum(counts)
    return merged


def perf_metrics(engine: FSDPEngine, *, name: str, seconds: float) -> dict[str, float]:
    """Model FLOPs utilisation of what ``engine`` has done since the last call, the most GPU memory that was in use and that
    PyTorch held, the computer's memory in use, and of an update the blocks that computed their activations twice.

    Args:
        name: of the stage: "actor", "old_log_prob", "ref", "critic", "values" or "train".
        seconds: that it took, data on their way to the device included.
    """
    peak = device_peak_flops(engine.device, engine.dtype)
    metrics = {f"perf/mfu/{name}": engine.take_flops() / seconds / peak}
    if engine.device.type == "cuda":
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(engine.device) / 2**30
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(engine.device) / 2**30
    if (used := used_memory_bytes()) is not None:
        metrics["perf/cpu_memory_used_gb"] = used / 2**30
    plan = engine.memory_plan
    if plan is not None and name in ("actor", "critic", "train"):
        metrics[f"perf/recomputed_blocks/{name}"] = float(plan.num_recomputed)
    return metrics
