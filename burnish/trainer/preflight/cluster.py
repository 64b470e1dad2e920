"""Whether the machines have what the run asks for, without starting a run."""

import importlib.util
import logging
import socket
from pathlib import Path
from typing import Any

from burnish.config import PPOTrainerConfig
from burnish.trainer.preflight.findings import Findings
from burnish.utils import env
from burnish.utils.machine import gpus_asked_for

_AREA = "cluster"
_PATIENCE_S = 3.0
_CURRENT = Path("/tmp/ray/ray_current_cluster")


def check_cluster(config: PPOTrainerConfig, findings: Findings) -> None:
    """Processes and GPUs that are asked for, against this machine or the Ray cluster that is named."""
    trainer = config.trainer
    if not isinstance(trainer.n_gpus_per_node, int):
        return
    critic = config.critic
    own_pool = critic.nnodes * critic.n_gpus_per_node if critic.enable else 0
    workers = trainer.nnodes * trainer.n_gpus_per_node + own_pool
    on_gpu = trainer.device == "cuda"
    findings.facts["cluster"] = {"workers": workers, "controller": trainer.controller, "device": trainer.device}
    if trainer.controller == "local":
        findings.note(_AREA, f"One worker in this process, on {'a GPU' if on_gpu else 'the CPU'}.")
        return
    if importlib.util.find_spec("ray") is None:
        findings.error(_AREA, "trainer.controller=ray needs the package ray, which is not installed: pip install ray")
        return
    address = config.ray_kwargs.ray_init.get("address") or env.get("RAY_ADDRESS")
    if address in (None, "local"):
        with gpus_asked_for() as gpus:
            have = len(gpus) if on_gpu else env.num_cpus()
        what = "GPUs" if on_gpu else "CPUs"
        if trainer.nnodes > 1:
            findings.error(
                _AREA,
                f"trainer.nnodes={trainer.nnodes}: Ray would be started on this machine alone. Start it on all nodes "
                f"(`ray start`) and set ray_kwargs.ray_init.address=auto.",
            )
        elif workers > have and (on_gpu or config.ray_kwargs.ray_init.get("num_cpus") is None):
            findings.error(
                _AREA,
                f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: {workers} workers need as many {what}, and this machine "
                f"has {have}.",
            )
        else:
            findings.note(_AREA, f"{workers} workers on this machine, which has {have} {what}.")
        return
    _check_ray(str(address), workers, on_gpu, findings)


def _check_ray(address: str, workers: int, on_gpu: bool, findings: Findings) -> None:
    key = "ray_kwargs.ray_init.address"
    place = _CURRENT.read_text().strip() if address == "auto" and _CURRENT.is_file() else address
    if place == "auto":
        findings.error(_AREA, f"{key}=auto: no Ray cluster runs here. Start one with `ray start --head`.", key)
        return
    host, _, port = place.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_PATIENCE_S):
            pass
    except (OSError, ValueError) as error:
        findings.error(_AREA, f"{key}={address}: nothing answers at {place} ({error}). Is the cluster up?", key)
        return
    totals, available = _resources(address)
    name = "GPU" if on_gpu else "CPU"
    findings.facts["cluster"] |= {"total": totals.get(name, 0), "available": available.get(name, 0)}
    if totals.get(name, 0) < workers:
        findings.error(
            _AREA,
            f"trainer.n_gpus_per_node x trainer.nnodes: {workers} workers need as many {name}s, and the cluster at {address} "
            f"has {totals.get(name, 0):g}.",
            "trainer.n_gpus_per_node",
        )
    elif available.get(name, 0) < workers:
        findings.warning(
            _AREA,
            f"The cluster at {address} has {totals.get(name, 0):g} {name}s, but {available.get(name, 0):g} are free now, and "
            f"{workers} are asked for: the run would wait.",
        )
    else:
        findings.note(
            _AREA, f"{workers} workers; the cluster at {address} has {available.get(name, 0):g} {name}s free."
        )


def _resources(address: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """All and free resources, asked for by a connection that starts nothing."""
    import ray

    was_there = ray.is_initialized()
    if not was_there:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        return ray.cluster_resources(), ray.available_resources()
    finally:
        if not was_there:
            ray.shutdown()
