"""What ``burnish check --sft`` looks at: everything that can be known of a run of supervised fine-tuning before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from burnish.config import SFTTrainerConfig, check_hub_models, check_paths, load_sft_with_notices
from burnish.config.profiler_checks import check_profiled_device
from burnish.render import check_template, tokenizer_of
from burnish.trainer.cluster import resolve_machine, world_size
from burnish.trainer.preflight.cluster import check_cluster
from burnish.trainer.preflight.compose import composed, tell_of_validation
from burnish.trainer.preflight.disk import check_disk
from burnish.trainer.preflight.findings import Findings
from burnish.trainer.preflight.memory import MemoryReport
from burnish.trainer.preflight.memory_check import tell_memory, visible_device
from burnish.trainer.preflight.run import tokenizer_key
from burnish.trainer.preflight.sft_rows import check_sft_rows
from burnish.trainer.sft.plan import describe_run, describe_step, estimate_sft_memory
from burnish.utils.device_table import DeviceCeilings
from burnish.utils.errors import BurnishError, ModelError

_GIB = 2**30


def preflight_sft(
    overrides: Sequence[str],
    config_name: str | None = None,
    config_path: str | None = None,
    *,
    device: DeviceCeilings | None = None,
    findings: Findings | None = None,
) -> tuple[Findings, SFTTrainerConfig | None]:
    """Looks at everything that the arguments of ``burnish sft`` name.

    Args:
        device: plans memory for this GPU instead of the machine's own.
        findings: to go on from.

    Returns:
        what was found, and the configuration, where there is one.
    """
    found = Findings() if findings is None else findings
    config = composed(lambda words: load_sft_with_notices(words, config_name, config_path), overrides, found)
    if config is None:
        return found, None
    with found.attempt("config"):
        check_paths(config)
    with found.attempt("config"):
        check_hub_models(config)
    try:
        resolve_machine(config)
    except BurnishError as error:
        found.error("config", str(error))
        if not isinstance(config.trainer.n_gpus_per_node, int):
            return found, config
    tell_of_validation(config, found)
    found.note("config", describe_step(config, world_size(config)))
    with found.attempt("config"):
        from burnish.utils.tracking import check_loggers

        check_loggers(config.trainer.logger)
        check_profiled_device(config)
    train = _check_data(config, found)
    report = None
    if config.model.path is not None and not found.of("error"):
        report = check_sft_memory(config, train, found, device=device)
    if report is not None:
        check_disk(config, report.models, _num_steps(config, train), found)
    check_cluster(config, found)
    return found, config


def _check_data(config: SFTTrainerConfig, found: Findings) -> Any:
    """The template and every row; the training set, or None."""
    from burnish.trainer.sft.datasets import collate, create_sft_dataset

    model, tokenizer = config.model, None
    if model.path is None or found.tells_error_of(tokenizer_key(model, "model")):
        return None
    with found.attempt("template"):
        tokenizer = tokenizer_of(model)
    if tokenizer is None:
        return None
    for problem in check_template(tokenizer, config.data.apply_chat_template_kwargs).problems:
        found.warning("template", f"The chat template of {model.tokenizer_path or model.path}: {problem}")
    num_errors = len(found.of("error"))
    sets: dict[str, Any] = dict(check_sft_rows(config, tokenizer, found))
    if len(found.of("error")) > num_errors:
        return None
    if config.data.custom_cls.path is not None:
        for split in ("train", "val"):
            with found.attempt("data"):
                own = create_sft_dataset(config, tokenizer, split=split)  # type: ignore[arg-type]
                if own is not None:
                    collate([own[0]], tokenizer.pad_token_id, len(tokenizer))
                sets[split] = own
    train, val = sets.get("train"), sets.get("val")
    if train is None:
        return None
    size, steps = config.data.train_batch_size, _num_steps(config, train)
    if size > len(train):
        found.error(
            "data",
            f"data.train_batch_size={size}: the training data have {len(train)} conversations, which do not fill one step. Set "
            f"data.train_batch_size={len(train)}, or give more.",
            "data.train_batch_size",
        )
    elif steps is not None:
        found.note("data", describe_run(config, len(train), 0 if val is None else len(val), steps))
    return train


def _num_steps(config: SFTTrainerConfig, train: Any) -> int | None:
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    return None if train is None else len(train) // config.data.train_batch_size * config.trainer.total_epochs


def check_sft_memory(
    config: SFTTrainerConfig, train: Any, findings: Findings, *, device: DeviceCeilings | None = None
) -> MemoryReport | None:
    """Notes the memory that a step takes, and as an error where it does not fit.

    Args:
        train: the training rows, whose real lengths are planned for; None: as long as they may be.
        device: plans for this one instead of the machine's own.
    """
    if device is None:
        known, total = visible_device(config)
        kind, name = config.trainer.device, known.name if known else config.trainer.device
    else:
        total, kind, name = int(device.memory_gib * _GIB), "cuda", device.name
    lengths = getattr(train, "lengths", None)
    try:
        report = estimate_sft_memory(
            config, workers=world_size(config), device=kind, total_bytes=total, lengths=lengths
        )
    except ModelError as error:
        findings.warning("memory", f"Memory cannot be estimated: {error}")
        return None
    tell_memory(report, name, findings, fsdp="engine", model="model")
    return report
