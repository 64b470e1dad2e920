"""Where a run's processes are: what this machine gives, and Ray for as long as the run needs it."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from burnish.config import PPOTrainerConfig, SFTTrainerConfig
from burnish.config.checks import check_layout, check_sequence_parallel
from burnish.config.idle import idle_notices
from burnish.config.reward_model_checks import has_reward_pool
from burnish.config.rollout_checks import check_engine_workers
from burnish.config.sft_checks import check_sft_workers, sft_notices
from burnish.trainer.ending import ended_by, keeps_sigterm
from burnish.trainer.own_ray import OwnRay, silence_of
from burnish.utils import env, hub, local_paths
from burnish.utils.errors import ConfigError, ResourceError
from burnish.utils.secrets import redact

logger = logging.getLogger("burnish.trainer")

_PASSED_ON = (
    *("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_GLOO_"),
    *("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "BURNISH_CPU_KERNELS", "BURNISH_CACHE"),
)
"""How variables begin that a worker needs as the driver has them: of networks, and of what is downloaded or compiled where. No
secrets: Ray shows variables to everybody who may look at the cluster."""

AnyConfig = PPOTrainerConfig | SFTTrainerConfig


def world_size(config: AnyConfig) -> int:
    """Worker processes of the policy, over all nodes."""
    return int(config.trainer.n_gpus_per_node) * config.trainer.nnodes


def resolve_machine(config: AnyConfig) -> None:
    """Replaces ``auto`` in ``trainer.{device,n_gpus_per_node,controller}`` by what this machine gives.

    Keys that have no effect with so many workers are told, as others were when the configuration was loaded.
    """
    import torch

    trainer, told = config.trainer, set(_idle_notices(config))
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
    if isinstance(config, SFTTrainerConfig):
        check_sft_workers(config)
    else:
        check_layout(config)
        check_sequence_parallel(config)
        check_engine_workers(config)
    for notice in _idle_notices(config):
        if notice not in told:
            logger.warning("%s", notice)


def _idle_notices(config: AnyConfig) -> list[str]:
    return sft_notices(config) if isinstance(config, SFTTrainerConfig) else list(idle_notices(config))


def _has_pool_of_its_own(config: AnyConfig) -> bool:
    if isinstance(config, SFTTrainerConfig):
        return False
    return has_reward_pool(config) or has_critic_pool(config)


def has_critic_pool(config: PPOTrainerConfig) -> bool:
    """Whether the critic has workers of its own."""
    return config.critic is not None and config.critic.nnodes > 0 and config.critic.n_gpus_per_node > 0


def pool_spec(config: AnyConfig) -> dict[str, list[int]]:
    """Processes on each node of every pool: that of the policy, and those that critic and reward model have of their own."""
    spec = {"global_pool": [int(config.trainer.n_gpus_per_node)] * config.trainer.nnodes}
    if isinstance(config, SFTTrainerConfig):
        return spec
    if config.critic.enable and has_critic_pool(config):
        spec["critic_pool"] = [int(config.critic.n_gpus_per_node)] * config.critic.nnodes
    if has_reward_pool(config):
        spec["reward_pool"] = [config.reward.reward_model.n_gpus_per_node] * config.reward.reward_model.nnodes
    return spec


def pool_manager(config: AnyConfig, mapping: Mapping[Any, str]) -> Any:
    """What makes the processes of the pools.

    Args:
        mapping: the pool of each role.
    """
    used = {"global_pool", *mapping.values()}
    spec = {name: processes for name, processes in pool_spec(config).items() if name in used}
    if config.trainer.controller == "local":
        from burnish.single_controller import LocalResourcePoolManager

        return LocalResourcePoolManager(resource_pool_spec=spec, mapping=dict(mapping))
    from burnish.single_controller.ray import ResourcePoolManager

    return ResourcePoolManager(resource_pool_spec=spec, mapping=dict(mapping), use_gpu=config.trainer.device == "cuda")


def worker_group_cls(config: AnyConfig) -> type:
    if config.trainer.controller == "local":
        from burnish.single_controller import LocalWorkerGroup

        return LocalWorkerGroup
    from burnish.single_controller.ray import RayWorkerGroup

    return RayWorkerGroup


@contextmanager
def cluster(config: AnyConfig) -> Iterator[OwnRay]:
    """Ray for the run's time, where the controller is Ray; a cluster that was there before stays.

    The folder of a session that is the run's own is removed, unless an error ends the block: then the error has a note that names
    the logs.

    Returns:
        those of its processes that are the run's own.
    """
    own = OwnRay()
    if config.trainer.controller == "local":
        yield own
        return
    import ray

    if ray.is_initialized():
        yield own
        return
    failed = False

    def end() -> None:
        own.ending()
        try:
            ray.shutdown()
        finally:
            own.close()
            if not failed:
                own.remove_session()

    with ended_by(end, "Ray's processes"):
        try:
            with keeps_sigterm(), own.starting():
                _start_ray(config, own)
            yield own
        except Exception as error:
            failed = True
            if own.logs is not None:
                error.add_note(own.logs)
            raise


def _start_ray(config: AnyConfig, own: OwnRay) -> None:
    import ray

    check_ray_init(config)
    if (address := ray_address(config)) is not None:
        logger.info("The run joins the Ray cluster at %s.", address)
        own.join(address)
    try:
        context: Any = ray.init(**ray_init_kwargs(config))
    except (RuntimeError, ValueError, TypeError, AssertionError, OSError) as error:
        given = {key: value for key, value in config.ray_kwargs.ray_init.items() if value is not None}
        asked = f" with ray_kwargs.ray_init={redact(given)}" if given else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ResourceError(f"Ray cannot be started{asked}: {reason.rstrip('.')}.") from error
    own.has_session(context.address_info["session_dir"])


def ray_address(config: AnyConfig) -> str | None:
    """The cluster that the run joins, found as `ray.init` finds it; None: it starts Ray on this machine.

    That is ``ray_kwargs.ray_init.address``, else RAY_ADDRESS, else the cluster that `ray start` has started here last.
    """
    address = config.ray_kwargs.ray_init.get("address")
    if address in (None, "", "auto"):
        address = env.get("RAY_ADDRESS") or address
    if address == "local":
        return None
    if address in (None, "", "auto"):
        started = env.ray_cluster_file(_temp_dir(config))
        address = (started.read_text(encoding="utf-8").strip() if started.is_file() else "") or address
    return str(address) if address else None


def _temp_dir(config: AnyConfig) -> str | None:
    chosen = config.ray_kwargs.ray_init.get("_temp_dir")
    return None if chosen is None else str(local_paths.named("ray_kwargs.ray_init._temp_dir", str(chosen)))


def check_ray_init(config: AnyConfig) -> None:
    """What `ray.init` would refuse in words of its own, or take and then not do what is meant.

    Raises:
        ResourceError: says which address or argument, and what to do.
    """
    address = ray_address(config)
    if address is None:
        return
    if address == "auto":
        # Ray itself would join whatever Ray it finds among the processes, such as that of another run.
        raise ResourceError(
            f"ray_kwargs.ray_init.address=auto: no Ray cluster runs here, since `ray start` has left no address in "
            f"{env.ray_cluster_file(_temp_dir(config))}. Start one with `ray start --head`, or name "
            f"the address of one that was started with a --temp-dir of its own."
        )
    named = f"The Ray cluster at {address}"
    if address.startswith("ray://"):
        raise ResourceError(
            f"{named} is named as one for Ray's client, through which no run can be driven. Start the run on a node of the "
            f"cluster (ray_kwargs.ray_init.address=auto), or submit it: `ray job submit -- burnish train ...`."
        )
    if address.startswith(("http://", "https://")):
        raise ResourceError(
            f"{address} is the address to which jobs are submitted. Submit the run (`ray job submit --address {address} -- "
            f"burnish train ...`), or start it on a node of the cluster without RAY_ADDRESS."
        )
    if (silence := silence_of(address)) is not None:
        raise ResourceError(
            f"{named} does not answer ({silence}). Is it up? `ray stop` makes this computer forget a cluster that is gone; "
            f"ray_kwargs.ray_init.address=local starts a Ray of the run's own."
        )
    given = config.ray_kwargs.ray_init
    owned = [key for key in ("num_cpus", "num_gpus", "resources", "object_store_memory") if given.get(key) is not None]
    if owned:
        raise ResourceError(
            f"{named} is there already, so ray_kwargs.ray_init.{owned[0]}={given[owned[0]]} cannot be chosen any more: `ray "
            f"start` decided it on each node. Leave it out, or set ray_kwargs.ray_init.address=local to start a Ray of the "
            f"run's own."
        )


def ray_init_kwargs(config: AnyConfig) -> dict[str, Any]:
    """Arguments of ``ray.init``: ``ray_kwargs.ray_init.*`` over burnish's own runtime environment."""
    given = {key: value for key, value in config.ray_kwargs.ray_init.items() if value is not None}
    runtime_env = dict(given.pop("runtime_env", None) or {})
    settled_here = hub.variables_of_this_machine()
    passed_on = {
        name: value
        for name, value in env.everything().items()
        if name.startswith(_PASSED_ON) and name not in settled_here
    }
    env_vars = {
        "TOKENIZERS_PARALLELISM": "true",
        **env.calm_threads(),
        # The processes of a cluster that was there before have the variables of the shell in which it was started.
        **passed_on,
        # Workers import burnish and the user's modules as this process does.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    # Of a submitted job Ray takes no variable twice, and these have been passed on already.
    of_job = _variables_of_job()
    own = {name: value for name, value in env_vars.items() if name not in of_job}
    runtime_env["env_vars"] = own | dict(runtime_env.get("env_vars", {}))
    if (temp_dir := _temp_dir(config)) is not None:
        given["_temp_dir"] = temp_dir
    defaults = {"include_dashboard": False, "log_to_driver": True, "logging_level": logging.ERROR}
    return defaults | {"runtime_env": runtime_env} | given


def _variables_of_job() -> frozenset[str]:
    """Names of the environment variables that `ray job submit` was given."""
    text = env.get("RAY_JOB_CONFIG_JSON_ENV_VAR")
    if text is None:
        return frozenset()
    return frozenset(json.loads(text).get("runtime_env", {}).get("env_vars", {}))
