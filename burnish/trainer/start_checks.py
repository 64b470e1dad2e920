"""What `burnish train` looks at before it starts anything and the configuration alone cannot tell: the model's shape, vLLM and
servers, folders."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from typing import TYPE_CHECKING

from burnish.config import PPOTrainerConfig
from burnish.config.idle_sections import AnyConfig, idle_sentences
from burnish.config.usage import mark_read
from burnish.config.validation_checks import check_validation_data, idle_without_validation_data
from burnish.trainer.restarts import HEARTBEAT
from burnish.utils import local_paths
from burnish.utils.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from burnish.config import CriticModelConfig, HFModelConfig

logger = logging.getLogger("burnish.trainer")

_SECONDS_A_HEARTBEAT_COUNTS = 20.0
"""One comes every two seconds, later on a busy machine; and a number of a process may be given again."""


def run_without_validation_data(config: AnyConfig) -> None:
    """Refuses a run that needs validation data, and tells the keys that have no effect without any."""
    check_validation_data(config)
    idle = idle_without_validation_data(config)
    # What is told here is not told again at the end.
    mark_read(idle)
    for notice in idle_sentences(config, idle):
        logger.warning("%s", notice)


def check_loss_is_importable(config: PPOTrainerConfig) -> None:
    """A loss of the script that calls `burnish.train` is not known in the processes of other workers."""
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if loss.startswith("__main__:") and config.trainer.controller != "local":
        raise ConfigError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}: workers in processes of their own cannot import what a "
            f"script or notebook defines. Move the loss into a module, or set trainer.controller=local (one worker)."
        )


def check_sharing(config: PPOTrainerConfig) -> None:
    """Each model can be shared by so many workers, as its heads allow it; its weights are not read for that."""
    policy, critic = config.actor_rollout_ref, config.critic
    sizes: list[tuple[HFModelConfig | CriticModelConfig, int]] = [
        (policy.model, policy.actor.fsdp_config.ulysses_sequence_parallel_size),
        (policy.model, policy.ref.fsdp_config.ulysses_sequence_parallel_size),
    ]
    if critic.enable:
        sizes.append((critic.model, critic.model.fsdp_config.ulysses_sequence_parallel_size))
    for model, size in sizes:
        check_model_sharing(model, size)


def check_model_sharing(model: HFModelConfig | CriticModelConfig, size: int) -> None:
    """``size`` workers can share the tokens of a sample, as the model's heads allow it."""
    from burnish.model import load
    from burnish.model.sequence_parallel import check_can_share

    if size > 1:
        trusted = bool(model.trust_remote_code)
        check_can_share(
            load.load_config(str(model.path), trust_remote_code=trusted, override_config=model.override_config), size
        )


def check_vllm(config: PPOTrainerConfig) -> None:
    """What would keep vLLM from starting and can be known without it: its version, its own arguments, the model's heads; of
    servers whether they are there and have the model.
    """
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    if rollout.name != "vllm":
        return
    if rollout.mode == "server":
        from burnish.rollout.vllm.server import api_key
        from burnish.rollout.vllm.server_facts import check_served

        try:
            check_served(rollout.server, model.path, api_key(rollout))
        except RolloutError as error:
            raise ConfigError(str(error)) from error
        return
    from burnish.model.load import load_config as load_model_config
    from burnish.rollout.vllm.arguments import check_capture_sizes, check_parallel, own_arguments
    from burnish.rollout.vllm.installed import check_installed

    check_installed()
    own_arguments(rollout.engine_kwargs.vllm)
    check_capture_sizes(rollout)
    if rollout.tensor_model_parallel_size > 1:
        trusted = bool(model.trust_remote_code)
        check_parallel(
            load_model_config(model.path, trust_remote_code=trusted, override_config=model.override_config),
            rollout.tensor_model_parallel_size,
        )


def check_folder(key: str, path: str | None) -> None:
    """The folder is made where it is missing, and takes a file."""
    if path is None:
        return
    if not path.strip():
        raise ConfigError(f"{key}=: no folder is named.")
    try:
        folder = local_paths.expanded(path)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        why = "there is a file in its place" if is_file else error.strerror
        raise ConfigError(f"{key}={path}: this folder cannot be written to: {why}. Name another one.") from error


def check_nobody_runs_in(run_dir: str) -> None:
    """No other run writes into the folder at this moment: each would remove what the other one is saving.

    Raises:
        ConfigError: the heartbeat of a living process is there.
    """
    file = local_paths.expanded(run_dir) / HEARTBEAT
    try:
        beat = json.loads(file.read_text(encoding="utf-8"))
        pid, age = int(beat["pid"]), time.time() - beat["time"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if beat.get("stage") == "ended" or pid == os.getpid() or age > _SECONDS_A_HEARTBEAT_COUNTS or not _is_there(pid):
        return
    raise ConfigError(
        f"trainer.default_local_dir={run_dir}: another run is writing there (process {pid}, {age:.0f} s ago, by {HEARTBEAT}). "
        f"Name another folder or trainer.experiment_name, or wait until that run has ended."
    )


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
