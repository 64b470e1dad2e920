"""Starts the worker processes of a run: pool by pool, several roles in one process where they share a pool."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from burnish.config import PPOTrainerConfig, SFTTrainerConfig
from burnish.reward.travel import pack
from burnish.single_controller import RayClassWithInitArgs, WorkerGroup, create_colocated_worker_cls
from burnish.trainer.cluster_nodes import refuse_unfit_nodes
from burnish.trainer.ppo.replay import without_engine
from burnish.trainer.ppo.roles import Role
from burnish.utils import local_paths


def spawn_workers(
    config: PPOTrainerConfig,
    role_worker_mapping: Mapping[Role, type],
    resource_pool_manager: Any,
    worker_group_cls: Callable[..., WorkerGroup] | None,
    *,
    device: str,
    total_training_steps: int,
    pad_token_id: int,
    eos_token_id: int | None,
    reward_manager: Any = None,
    samples: bool = True,
) -> dict[Role, Any]:
    """The worker group of every role; no model is loaded yet.

    Args:
        reward_manager: what the policy's workers score responses with while they sample; None: they do not.
        samples: whether the run asks for responses; without that no rollout engine is started.

    Raises:
        ResourceError: the cluster cannot give what the pools ask for.
        WorkerError: a worker cannot be made.
    """
    if reward_manager is not None and config.trainer.controller != "local":
        reward_manager = pack(reward_manager, "reward.launch_reward_fn_async=false")
    resource_pool_manager.create_resource_pool()
    refuse_unfit_nodes(config, resource_pool_manager)
    policy = config.actor_rollout_ref if samples else without_engine(config.actor_rollout_ref)
    pools: dict[Any, dict[Role, RayClassWithInitArgs]] = {}
    for role, worker_cls in role_worker_mapping.items():
        pool = resource_pool_manager.get_resource_pool(role)
        common = {"device": device, "total_training_steps": total_training_steps}
        if role is Role.Critic:
            with_args = RayClassWithInitArgs(worker_cls, config=config.critic, **common)
        elif role is Role.RewardModel:
            model = config.actor_rollout_ref.model
            with_args = RayClassWithInitArgs(
                worker_cls,
                config=config.reward.reward_model,
                device=device,
                policy_tokenizer=model.tokenizer_path or model.path,
                trust_policy_tokenizer=bool(model.trust_remote_code),
            )
        else:
            # A worker of somebody's own may know nothing of rewards.
            scoring = (
                {} if reward_manager is None else {"reward_manager": reward_manager, "num_nodes": config.trainer.nnodes}
            )
            tokens = {"pad_token_id": pad_token_id, "eos_token_id": eos_token_id}
            with_args = RayClassWithInitArgs(worker_cls, config=policy, role=str(role), **common, **tokens, **scoring)
        pools.setdefault(pool, {})[role] = with_args
    make_group = worker_group_cls or _ray_worker_group_cls()
    groups: dict[Role, Any] = {}
    for pool, classes in pools.items():
        colocated = create_colocated_worker_cls({str(role): with_args for role, with_args in classes.items()})
        group = make_group(
            resource_pool=pool,
            ray_cls_with_init=colocated,
            name_prefix="+".join(map(str, classes)),
            stage_timeout=config.trainer.stage_timeout,
            stack_folder=str(stack_folder(config)),
            # Of every role's ranks: those of a critic or a reward model wait for each other too.
            collective_timeout=config.actor_rollout_ref.nccl_timeout,
        )
        if config.trainer.controller != "local":
            # A loss or a model of somebody's own may draw from them; the driver's are seeded as the run begins.
            group.execute_all_sync("seed_generators", config.trainer.seed)
        spawned = group.spawn({str(role) for role in classes})
        groups |= {role: spawned[str(role)] for role in classes}
    return groups


def stack_folder(config: PPOTrainerConfig | SFTTrainerConfig) -> Path:
    """Where it is written in which code processes stand that get no further."""
    return local_paths.expanded(config.trainer.default_local_dir).absolute() / "stacks"


def _ray_worker_group_cls() -> Callable[..., WorkerGroup]:
    from burnish.single_controller.ray import RayWorkerGroup

    return RayWorkerGroup
