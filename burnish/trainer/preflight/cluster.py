"""Whether the machines have what the run asks for, without starting a run."""

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from burnish.trainer.cluster import AnyConfig, check_ray_init, pool_spec, ray_address, ray_init_kwargs
from burnish.trainer.cluster_nodes import look_at_nodes, needs_of
from burnish.trainer.preflight.findings import Findings
from burnish.utils import env
from burnish.utils.errors import ResourceError
from burnish.utils.machine import gpus_asked_for

_AREA = "cluster"
_ADDRESS = "ray_kwargs.ray_init.address"
_NNODES = {"global_pool": "trainer.nnodes", "critic_pool": "critic.nnodes", "reward_pool": "reward.reward_model.nnodes"}


def check_cluster(config: AnyConfig, findings: Findings) -> None:
    """Processes and GPUs that are asked for, against this machine or the nodes of the Ray cluster that the run would join."""
    trainer = config.trainer
    if not isinstance(trainer.n_gpus_per_node, int):
        return
    pools = pool_spec(config)
    workers = sum(sum(processes) for processes in pools.values())
    on_gpu = trainer.device == "cuda"
    findings.facts["cluster"] = {"workers": workers, "controller": trainer.controller, "device": trainer.device}
    if trainer.controller == "local":
        findings.note(_AREA, f"One worker in this process, on {'a GPU' if on_gpu else 'the CPU'}.")
        return
    if importlib.util.find_spec("ray") is None:
        findings.error(_AREA, "trainer.controller=ray needs the package ray, which is not installed: pip install ray")
        return
    address = ray_address(config)
    if address is None:
        _check_this_machine(config, workers, on_gpu, findings)
    else:
        try:
            check_ray_init(config)
            _check_nodes(config, address, findings)
        except ResourceError as error:
            findings.error(_AREA, str(error), _ADDRESS)


def _check_this_machine(config: AnyConfig, workers: int, on_gpu: bool, findings: Findings) -> None:
    trainer = config.trainer
    with gpus_asked_for() as gpus:
        have = len(gpus) if on_gpu else env.num_cpus()
    what = "GPUs" if on_gpu else "CPUs"
    several = [f"{_NNODES[pool]}={len(nodes)}" for pool, nodes in pool_spec(config).items() if len(nodes) > 1]
    if several:
        findings.error(
            _AREA,
            f"{' '.join(several)}: Ray would be started on this machine alone. Start it on all nodes (`ray start`) and set "
            f"{_ADDRESS}=auto.",
        )
    elif workers > have and (on_gpu or config.ray_kwargs.ray_init.get("num_cpus") is None):
        findings.error(
            _AREA,
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: {workers} workers need as many {what}, and this machine has "
            f"{have}.",
        )
    else:
        findings.note(_AREA, f"{workers} workers on this machine, which has {have} {what}.")


def _check_nodes(config: AnyConfig, address: str, findings: Findings) -> None:
    """The cluster node by node: what it has, what is free, whether it has the run's code and files."""
    from burnish.single_controller.ray.resource_pool import RayResourcePool, addresses, resources_of_nodes, what_lacks

    on_gpu = config.trainer.device == "cuda"
    name = "GPU" if on_gpu else "CPU"
    with _connected(config):
        pools = {pool: RayResourcePool(sizes, on_gpu, pool) for pool, sizes in pool_spec(config).items()}
        nodes = resources_of_nodes(name)
        total, free = sum(node[1] for node in nodes), sum(node[2] for node in nodes)
        findings.facts["cluster"] |= {
            "total": total,
            "available": free,
            "nodes": [dict(zip(("address", "total", "available"), node, strict=True)) for node in nodes],
        }
        if (lacking := what_lacks(pools, now=False)) is not None:
            findings.error(_AREA, lacking, "trainer.n_gpus_per_node")
            return
        if (lacking := what_lacks(pools, now=True)) is not None:
            findings.warning(_AREA, f"{lacking} (The nodes have it, but others use it now.)", "trainer.n_gpus_per_node")
        problems = look_at_nodes(addresses(), needs_of(config))
    for error in problems.errors:
        findings.error(_AREA, error)
    for warning in problems.warnings:
        findings.warning(_AREA, warning)
    asked = ", ".join(f"{pool} {processes}" for pool, processes in pool_spec(config).items())
    each = "; ".join(f"{where}: {has_now:g} of {has:g} {name}s free" for where, has, has_now in nodes)
    findings.note(_AREA, f"Asked, workers on each node: {asked}. The cluster at {address} has {each}.")


@contextmanager
def _connected(config: AnyConfig) -> Iterator[None]:
    """Inside, Ray is connected to the cluster as the run would connect it."""
    import ray

    if ray.is_initialized():
        yield
        return
    try:
        ray.init(**ray_init_kwargs(config) | {"log_to_driver": False, "logging_level": logging.ERROR})
    except (RuntimeError, ValueError, TypeError, AssertionError, OSError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ResourceError(f"Ray cannot be reached as the run would do it: {reason}") from error
    try:
        yield
    finally:
        ray.shutdown()
