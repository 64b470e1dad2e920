"""``trainer_state.json``: what the trainer itself goes on with, and what it was saved under.

The workers' parts of a checkpoint hold weights, moments and their generators; this one holds the place in the data, a
curriculum's scores, the KL coefficient and the driver's generators. Beside that it says which model, data and configuration it
belongs to, so that a run that differs is told, or refused where going on would go wrong.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from burnish.config import PPOTrainerConfig, SFTTrainerConfig, policy_of, to_dict
from burnish.engine.checkpoint.extra_files import rng_state, set_rng_state
from burnish.trainer.ppo.checkpoints.manifest import STATE, read_state_file
from burnish.trainer.ppo.checkpoints.values import from_json, to_json
from burnish.utils.durable import write_durably
from burnish.utils.errors import CheckpointError, DataError
from burnish.utils.secrets import redact

if TYPE_CHECKING:
    from burnish.trainer.loop import TrainingLoop

logger = logging.getLogger("burnish.trainer")

FORMAT = 2
_CPU = torch.device("cpu")
_SECTIONS = (
    "algorithm.",
    "actor_rollout_ref.",
    "critic.",
    "data.",
    "reward.",
    "trainer.seed",
    "model.",
    "optim.",
    "engine.",
)
# Where, how fast and with what memory a run computes, and what it writes: none of that changes what it learns.
_OF_NO_MATTER = (
    ".checkpoint.",
    ".profiler.",
    "num_workers",
    "micro_batch",
    "max_token_len",
    "offload",
    "gpu_memory_utilization",
    "nccl_timeout",
    "fsdp_size",
    "n_gpus_per_node",
    "cache_dir",
)
# Of a model's configuration: what its weights' shapes follow from.
_MODEL_KEYS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
_ROWS_LOOKED_AT = 64


def state_of(trainer: TrainingLoop) -> dict[str, Any]:
    """The trainer's state at the end of a step, in JSON's types; a copy, which later steps do not change.

    Raises:
        CheckpointError: a dataset's or sampler's state holds what a checkpoint cannot.
    """
    state = {
        "format": FORMAT,
        "global_steps": trainer.global_steps,
        **trainer.prompts.state_dict(),
        **trainer.own_state(),
        "skipped_in_a_row": dict(trainer.skipped_updates.in_a_row),
        "rng": rng_state(_CPU),
    }
    try:
        return to_json(state)
    except TypeError as error:
        raise CheckpointError(
            f"The state of the run cannot be saved: {error}. A sampler's or dataset's state_dict may hold numbers, texts, lists, "
            f"dicts, tensors and arrays."
        ) from error


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Writes what `state_of` gave, and what `belongings` did, into a checkpoint's folder."""
    write_durably(folder / STATE, json.dumps(state))


def read_state(folder: Path) -> dict[str, Any]:
    """The state in a checkpoint's folder.

    Raises:
        CheckpointError: it is missing, unreadable, or of a newer burnish.
    """
    state = read_state_file(folder)
    if state.get("format", 1) > FORMAT:
        raise CheckpointError(f"{folder / STATE} has the format {state['format']}, of a newer burnish. Install that.")
    try:
        return from_json(state)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / STATE} cannot be read: {type(error).__name__}: {error}.") from error


def restore(trainer: TrainingLoop, state: dict[str, Any]) -> None:
    """Puts the trainer where ``state`` was taken; the generators come last, by `restore_generators`."""
    trainer.global_steps = state["global_steps"]
    trainer.prompts.load_state_dict(state)
    trainer.restore_own_state(state)
    trainer.skipped_updates.in_a_row = dict(state.get("skipped_in_a_row", {}))


def seed_generators(seed: int) -> None:
    """Has what draws from the global generators of this process, as a reward function may, draw the same in every run."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def restore_generators(config: PPOTrainerConfig | SFTTrainerConfig, state: dict[str, Any]) -> None:
    """Puts the generators of this process where they were; after the workers, of which one may share it."""
    if "rng" in state and "extra" in policy_of(config).checkpoint.load_contents:
        set_rng_state(state["rng"], _CPU)


# ---------------------------------------------------------------------------------------------- belongings


def belongings(trainer: TrainingLoop) -> dict[str, Any]:
    """Trainer, model, data and configuration that a state is of."""
    return {
        "trainer": "sft" if isinstance(trainer.config, SFTTrainerConfig) else "ppo",
        "model": _model_shape(trainer.config),
        "data": _data_facts(trainer.train_dataset),
        "config": dict(_learning_keys(trainer.config)),
    }


def other_trainer(state: dict[str, Any], own: dict[str, Any]) -> str | None:
    """That another kind of run has written ``state``, as a clause; None where it has not."""
    written_by = state.get("trainer", "ppo")
    if written_by == own["trainer"]:
        return None
    kind, key = {
        "ppo": ("reinforcement learning", "model.path"),
        "sft": ("supervised fine-tuning", "actor_rollout_ref.model.path"),
    }[written_by]
    return (
        f"it is of a run of {kind}, whose place in the data means nothing here (its model is trained further by "
        f"{key}=<checkpoint>/actor)"
    )


def other_model(state: dict[str, Any], own: dict[str, Any]) -> str | None:
    """Why the weights beside ``state`` do not fit the run's model, as a clause; None where they do.

    Args:
        own: the run's own `belongings`.
    """
    saved, now = state.get("model"), own["model"]
    if not saved or not now:
        return None
    changed = [
        f"{name} {saved.get(name)}, now {now.get(name)}" for name in _MODEL_KEYS if saved.get(name) != now.get(name)
    ]
    return f"it is of another model ({', '.join(changed)})" if changed else None


def check_data(state: dict[str, Any], own: dict[str, Any]) -> None:
    """Refuses to go on in other data, where a place means nothing.

    Raises:
        DataError: the number of rows is another one.
    """
    saved, now = state.get("data") or {}, own["data"]
    if "num_rows" in saved and saved["num_rows"] != now["num_rows"]:
        raise DataError(
            f"The data changed since the checkpoint was saved (num_rows {saved['num_rows']} -> {now['num_rows']}), so its place "
            f"in them means nothing now. Restore the data, or start a new run (trainer.resume_mode=disable)."
        )


def differences(state: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """What is not as it was when ``state`` was saved, as ``key: old -> new``."""
    saved, now = state.get("config") or {}, own["config"]
    changed = [
        f"{key}: {saved.get(key)} -> {now.get(key)}" for key in sorted({*saved, *now}) if saved.get(key) != now.get(key)
    ]
    before, after = (facts.get("rows") for facts in (state.get("data") or {}, own["data"]))
    if before and after and before != after:
        changed.append("the training rows: other prompts at the same places")
    return changed if saved else []


def _learning_keys(config: PPOTrainerConfig | SFTTrainerConfig) -> Iterator[tuple[str, Any]]:
    for key, value in _flat(redact(to_dict(config)), ""):
        if key.startswith(_SECTIONS) and not any(part in key for part in _OF_NO_MATTER):
            yield key, json.loads(json.dumps(value, default=str))


def _flat(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _model_shape(config: PPOTrainerConfig | SFTTrainerConfig) -> dict[str, Any]:
    from burnish.model.load import load_config

    model = policy_of(config).model
    read = load_config(
        str(model.path), trust_remote_code=bool(model.trust_remote_code), override_config=model.override_config
    )
    return {name: getattr(read, name, None) for name in _MODEL_KEYS}


def _data_facts(dataset: Any) -> dict[str, Any]:
    num_rows = len(dataset)
    if not type(dataset).__module__.startswith("burnish.data."):
        # The rows of one of the user's own may be anything, and another thing each time.
        return {"num_rows": num_rows}
    digest = hashlib.sha256()
    for position in range(0, num_rows, max(1, num_rows // _ROWS_LOOKED_AT)):
        row = dataset[position]
        digest.update(np.asarray(row["input_ids"], dtype=np.int64).tobytes())
        if "loss_mask" in row:
            digest.update(np.asarray(row["loss_mask"], dtype=bool).tobytes())
    return {"num_rows": num_rows, "rows": digest.hexdigest()[:16]}
