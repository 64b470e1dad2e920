"""Checks of a configuration of supervised fine-tuning, across its keys; they need no model, no device and no file."""

from collections.abc import Iterator

from burnish.config.build import shown
from burnish.config.checkpoint_checks import check_checkpoints, unused_of_checkpoints
from burnish.config.checks import check_fsdp_size, check_named_together, check_optimizer, check_sharing_size
from burnish.config.idle_sections import (
    idle_sentences,
    unused_of_adapters,
    unused_of_layout,
    unused_of_optimizer,
    unused_of_run,
    without_size,
)
from burnish.config.profiler_checks import check_profilers, settle_profilers, unused_of_profilers
from burnish.config.sft import SFTTrainerConfig
from burnish.config.validation_checks import unused_of_validation
from burnish.utils.errors import ConfigError


def check_sft(config: SFTTrainerConfig, *, train_rows_given: bool = False) -> None:
    """Decides what was left open, and runs every check.

    Raises:
        ConfigError: keys contradict each other.
    """
    if config.data.micro_batch_size_per_gpu is None:
        config.data.use_dynamic_bsz = True
    settle_profilers(config)
    check_optimizer(config, "optim")
    _check_columns(config)
    _check_batches(config)
    check_sft_workers(config)
    check_checkpoints(config)
    check_profilers(config)
    check_named_together(config, "data.custom_cls.path", "data.custom_cls.name")
    if not config.data.train_files and not train_rows_given:
        raise ConfigError("data.train_files is not set: name at least one file to train on.")


def _check_columns(config: SFTTrainerConfig) -> None:
    prompt, response = config.data.prompt_key, config.data.response_key
    if (prompt is None) != (response is None):
        given, missing = (
            ("data.prompt_key", "data.response_key")
            if response is None
            else (
                "data.response_key",
                "data.prompt_key",
            )
        )
        raise ConfigError(
            f"{shown(config, given)} needs {missing}: a row with one answer has a column for each. Conversations are in the "
            f"column {shown(config, 'data.messages_key')}."
        )


def _check_batches(config: SFTTrainerConfig) -> None:
    """A micro-batch is no larger than an optimizer step, and takes the longest conversation."""
    data, size = config.data, config.engine.ulysses_sequence_parallel_size
    if data.use_dynamic_bsz:
        if data.max_token_len_per_gpu * size < data.max_length:
            each = f" for each of the {size} workers that share a conversation's tokens" if size > 1 else ""
            raise ConfigError(
                f"{shown(config, 'data.max_token_len_per_gpu')} is a bound that holds{each}, but a conversation has up to "
                f"{data.max_length} tokens (data.max_length). The nearest value is "
                f"data.max_token_len_per_gpu={-(-data.max_length // size)}."
            )
    elif data.micro_batch_size_per_gpu is not None and data.micro_batch_size_per_gpu > data.train_batch_size:
        raise ConfigError(
            f"{shown(config, 'data.micro_batch_size_per_gpu')} is more than an optimizer step has: "
            f"{shown(config, 'data.train_batch_size')} conversations. The nearest value is "
            f"data.micro_batch_size_per_gpu={data.train_batch_size}."
        )


def check_sft_workers(config: SFTTrainerConfig) -> None:
    """Workers divide into the groups that are asked for; nothing is known while their number is auto."""
    trainer = config.trainer
    if trainer.n_gpus_per_node == "auto":
        return
    workers = int(trainer.n_gpus_per_node) * trainer.nnodes
    if trainer.controller == "local" and workers > 1:
        raise ConfigError(
            f"{shown(config, 'trainer.controller')} runs one worker in the driver's process, but "
            f"{shown(config, 'trainer.n_gpus_per_node')} and {shown(config, 'trainer.nnodes')} ask for more. Set "
            f"trainer.controller=ray."
        )
    check_sharing_size(config, "engine.ulysses_sequence_parallel_size", workers)
    check_fsdp_size(config, "engine.fsdp_size", workers)


def sft_idle_keys(config: SFTTrainerConfig) -> dict[str, str]:
    """Keys that were set and that others leave without effect, each with the reason."""
    return {key: reason for key, reason in _unused(config) if key in config.set_keys}


def sft_notices(config: SFTTrainerConfig) -> list[str]:
    """The same as sentences, one for each reason."""
    cut = without_size(config, "data.use_dynamic_bsz", "data.micro_batch_size_per_gpu")
    return [*idle_sentences(config, sft_idle_keys(config)), *cut, *_older_schedule(config)]


def _older_schedule(config: SFTTrainerConfig) -> Iterator[str]:
    """What was the default of the trainer that a script was written for, as the name of its model tells."""
    defaults = {"lr_scheduler_type": "cosine", "lr_warmup_steps_ratio": "0.1", "betas": "[0.9,0.95]"}
    missing = {f"optim.{name}": value for name, value in defaults.items() if f"optim.{name}" not in config.set_keys}
    if missing and config.set_keys.get("model.path", "").startswith("model.partial_pretrain="):
        there = " ".join(f"{key}={value}" for key, value in missing.items())
        here = ", ".join(shown(config, key) for key in missing)
        yield f"A script with model.partial_pretrain counts on defaults that are none here ({here}): set {there}."


def _unused(config: SFTTrainerConfig) -> Iterator[tuple[str, str]]:
    data, trainer = config.data, config.trainer
    if data.use_dynamic_bsz:
        yield (
            "data.micro_batch_size_per_gpu",
            f"micro-batches are cut by tokens ({shown(config, 'data.use_dynamic_bsz')})",
        )
    else:
        yield "data.max_token_len_per_gpu", f"micro-batches are cut by {shown(config, 'data.micro_batch_size_per_gpu')}"
    if data.custom_cls.path is None:
        yield "data.custom", "there is no dataset class of your own (data.custom_cls.path)"
    if data.response_key is not None:
        yield "data.messages_key", f"rows have one answer ({shown(config, 'data.response_key')})"
    if not data.shuffle and not data.num_workers:
        yield "data.seed", f"rows come in the order of the files ({shown(config, 'data.shuffle')})"
    yield from unused_of_run(config)
    yield from unused_of_validation(config)
    yield from unused_of_checkpoints(config)
    yield from unused_of_profilers(config)
    yield from unused_of_optimizer(config, "optim")
    yield from unused_of_adapters(config, "model")
    one_worker = trainer.n_gpus_per_node != "auto" and int(trainer.n_gpus_per_node) * trainer.nnodes == 1
    why = "one worker" if one_worker else shown(config, "engine.fsdp_size")
    yield from unused_of_layout(config, "engine", is_sharded=config.engine.fsdp_size != 1 and not one_worker, why=why)
