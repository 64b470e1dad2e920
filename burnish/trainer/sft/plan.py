"""What a step of supervised fine-tuning is, and the memory that it takes, told before anything heavy starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from burnish.config import SFTTrainerConfig
from burnish.engine.estimate import ModelEstimate, estimate_model
from burnish.trainer.preflight.memory import MemoryReport, StageMemory, context_bytes, update_memory


def describe_step(config: SFTTrainerConfig, workers: int) -> str:
    """One step in words."""
    data, size = config.data, config.engine.ulysses_sequence_parallel_size
    groups = max(1, workers // size)
    if data.use_dynamic_bsz:
        bound = f"at most {f'{size} x ' if size > 1 else ''}{data.max_token_len_per_gpu:,} tokens"
    else:
        bound = f"{data.micro_batch_size_per_gpu:,} conversations"
    each = "worker" if size == 1 else f"{size} workers that share their tokens"
    what = (
        "the whole model"
        if not config.model.lora_rank and config.model.lora_adapter_path is None
        else "adapters (LoRA)"
    )
    return (
        f"One step: {data.train_batch_size:,} conversations of at most {data.max_length:,} tokens, one update of {what} "
        f"({-(-data.train_batch_size // groups):,} per {each}, in micro-batches of {bound}). The loss is the mean over all "
        f"learnt tokens of the step."
    )


def describe_run(config: SFTTrainerConfig, num_rows: int, num_val_rows: int, total_steps: int) -> str:
    """Rows, epochs and steps in words, with what is left over."""
    size = config.data.train_batch_size
    per_epoch = num_rows // size
    left = num_rows - per_epoch * size
    steps, whole = (f"{number:,} step{'' if number == 1 else 's'}" for number in (per_epoch, total_steps))
    text = f"{num_rows:,} conversations give {steps} an epoch; the run has {whole}"
    if left:
        text += (
            f" ({left:,} conversations, others in every epoch, are left over)"
            if config.data.shuffle
            else (f" (the last {left:,} conversations are left over)")
        )
    text += f", and {num_val_rows:,} conversations to validate on." if num_val_rows else ", without validation."
    if config.trainer.save_freq <= 0 and not config.trainer.val_only:
        text += (
            f" The model that it trains is not saved (trainer.save_freq={config.trainer.save_freq}): any number above 0 saves "
            f"that of the last step too."
        )
    return text


def micro_batch_tokens(config: SFTTrainerConfig, lengths: Sequence[int] | None = None) -> int:
    """Tokens that one worker computes at once, at most.

    Args:
        lengths: tokens of the rows, where they are known; else every row is as long as ``data.max_length``.
    """
    data = config.data
    longest = max(lengths) if lengths else data.max_length
    if data.use_dynamic_bsz:
        return min(data.max_token_len_per_gpu, longest * data.train_batch_size)
    rows = data.micro_batch_size_per_gpu or 1
    return -(-longest * rows // config.engine.ulysses_sequence_parallel_size)


def estimate_sft_memory(
    config: SFTTrainerConfig,
    *,
    workers: int,
    device: str,
    total_bytes: int | None,
    lengths: Sequence[int] | None = None,
) -> MemoryReport:
    """The plan of one worker.

    Args:
        device: "cuda" or "cpu".
        total_bytes: memory of a device; None plans as if there were plenty.
        lengths: see `micro_batch_tokens`.

    Raises:
        ModelError: the model's configuration cannot be read.
    """
    total = total_bytes if total_bytes is not None else 1 << 50
    model = estimate_model(
        config.model, config.engine, config.optim, device=device, total_memory=total, world_size=workers
    )
    beside = context_bytes(workers) if device == "cuda" else 0
    stage = _update(config, model, micro_batch_tokens(config, lengths), total - beside)
    return MemoryReport(
        pool="policy", total_bytes=total_bytes, beside_bytes=beside, stages=[stage], models={"actor": model}
    )


def _update(config: SFTTrainerConfig, model: ModelEstimate, tokens: int, free: int) -> StageMemory:
    held = dict(model.resident(in_use=True, updating=True))
    taken, how = update_memory(model, tokens, free - sum(held.values()))
    name = "max_token_len_per_gpu" if config.data.use_dynamic_bsz else "micro_batch_size_per_gpu"
    value: Any = getattr(config.data, name)
    return StageMemory(
        name="train", held=held, taken=taken, key=f"data.{name}={value}", note=f"{tokens:,} tokens at once{how}"
    )
