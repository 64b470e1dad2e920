"""Where a run's processes are: what this machine gives, and Ray for as long as the run needs it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from burnish.config import PPOTrainerConfig
from burnish.config.checks import check_layout, check_sequence_parallel
from burnish.config.idle import idle_notices
from burnish.config.reward_model_checks import has_reward_pool
from burnish.config.rollout_checks import check_engine_workers
from burnish.trainer.ending import keeps_sigterm
from burnish.utils import env
from burnish.utils.errors import ConfigError, ResourceError
from burnish.utils.secrets import redact

logger = logging.getLogger("burnish.trainer")


def world_size(config: PPOTrainerConfig) -> int:
    """Worker processes of the actor, over all nodes."""
    return int(config.trainer.n_gpus_per_node) * config.trainer.nnodes


def resolve_machine(config: PPOTrainerConfig) -> None:
    """Replaces ``auto`` in ``trainer.{device,n_gpus_per_node,controller}`` by what this machine gives.

    Keys that have no effect with so many workers are told, as others were when the configuration was loaded.
    """
    import torch

    trainer, told = config.trainer, set(idle_notices(config))
    if trainer.device == "auto":
        trainer.device = "cuda" if torch.cuda.is_available() else "cpu"
    if trainer.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda, but torch sees no CUDA device here. Set trainer.device=cpu or auto.")
    if trainer.n_gpus_per_node == "auto":
        trainer.n_gpus_per_node = torch.cuda.device_count() if trainer.device == "cuda" else 1
    one_process = world_size(config) == 1 and not _has_pool_of_its_own(config)
    if trainer.controller == "auto":
        trainer.controller = "local" if one_process else "ray"
    if trainer.controller == "local" and not one_process:
        raise ConfigError(
            f"trainer.controller=local runs one process, but nnodes={trainer.nnodes} x n_gpus_per_node="
            f"{trainer.n_gpus_per_node} (and pools of the critic and the reward model, if any) ask for more. Set "
            f"trainer.controller=ray."
        )
    check_layout(config)
    check_sequence_parallel(config)
    check_engine_workers(config)
    for notice in idle_notices(config):
        if notice not in told:
            logger.warning("%s", notice)


def _has_pool_of_its_own(config: PPOTrainerConfig) -> bool:
    return has_reward_pool(config) or has_critic_pool(config)


def has_critic_pool(config: PPOTrainerConfig) -> bool:
    return config.critic is not None and config.critic.nnodes > 0 and config.critic.n_gpus_per_node > 0


def worker_group_cls(config: PPOTrainerConfig) -> type:
    if config.trainer.controller == "local":
        from burnish.single_controller import LocalWorkerGroup

        return LocalWorkerGroup
    from burnish.single_controller.ray import RayWorkerGroup

    return RayWorkerGroup


@contextmanager
def cluster(config: PPOTrainerConfig) -> Iterator[None]:
    """Ray for the run's time, where the controller is Ray; a cluster that was there before stays."""
    if config.trainer.controller == "local":
        yield
        return
    import ray

    if ray.is_initialized():
        yield
        return
    try:
        with keeps_sigterm():
            _start_ray(config)
        yield
    finally:
        ray.shutdown()


def _start_ray(config: PPOTrainerConfig) -> None:
    import ray

    try:
        ray.init(**ray_init_kwargs(config))
    except (RuntimeError, ValueError, TypeError, AssertionError, OSError) as error:
        given = {key: value for key, value in config.ray_kwargs.ray_init.items() if value is not None}
        asked = f" with ray_kwargs.ray_init={redact(given)}" if given else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ResourceError(f"Ray cannot be started{asked}: {reason.rstrip('.')}.") from error


def ray_init_kwargs(config: PPOTrainerConfig) -> dict[str, Any]:
    """Arguments of ``ray.init``: ``ray_kwargs.ray_init.*`` over burnish's own runtime environment."""
    given = {key: value for key, value in config.ray_kwargs.ray_init.items() if value is not None}
    runtime_env = dict(given.pop("runtime_env", None) or {})
    env_vars = {
        "TOKENIZERS_PARALLELISM": "true",
        **env.calm_threads(),
        # Workers import burnish and the user's modules as this process does.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    runtime_env["env_vars"] = env_vars | dict(runtime_env.get("env_vars", {}))
    defaults = {"include_dashboard": False, "log_to_driver": True, "logging_level": logging.ERROR}
    return defaults | {"runtime_env": runtime_env} | given
