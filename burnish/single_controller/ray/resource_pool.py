"""Pools of processes on a Ray cluster: reserved by placement groups, or refused at once."""

import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from burnish.single_controller.resource_pool import PoolManager, ResourcePool
from burnish.utils.errors import ResourceError

# Processes that were ended a moment ago still hold their resources for a while.
_SECONDS_UNTIL_FREED = 5.0
# A node that lost its power counts as alive until the cluster's health check has failed several times.
_SECONDS_TO_RESERVE = 90.0
_SECONDS_BETWEEN_LOOKS = 2.0


class _NodeGoneError(ResourceError):
    """A node that was chosen is not part of the cluster any more."""


class RayResourcePool(ResourcePool):
    """Processes on the nodes of a Ray cluster; each entry of ``process_on_nodes`` is a node of its own.

    Args:
        process_on_nodes: number of processes on each node.
        use_gpu: whether each process gets a GPU.
        name_prefix: what messages call the pool.
        max_colocate_count: how many worker groups may share the pool, each with processes of its own.
        num_cpus_per_worker: CPUs that are reserved for each process; 1 with a GPU.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = True,
        name_prefix: str = "pool",
        max_colocate_count: int = 10,
        num_cpus_per_worker: int = 1,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix
        self.num_cpus_per_worker = 1 if use_gpu else num_cpus_per_worker
        self._placement_group: PlacementGroup | None = None
        self.nodes: tuple[str, ...] = ()
        """Id of the node of each entry of ``process_on_nodes``, once the resources are reserved."""

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one process."""
        gpu = {"GPU": 1.0} if self.use_gpu else {}
        return {"CPU": float(self.num_cpus_per_worker), **gpu}

    def options(self, rank: int) -> dict[str, Any]:
        """Options of the actor of ``rank``: its bundle, and a share of it that leaves room for other groups."""
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self.reserve(), placement_group_bundle_index=rank
        )
        cpus = self.num_cpus_per_worker / self.max_colocate_count
        # Ray takes whole numbers, or fractions below one.
        share = {"num_cpus": float(int(cpus)) if cpus >= 1 else cpus}
        if self.use_gpu:
            share["num_gpus"] = 1 / self.max_colocate_count
        return {"scheduling_strategy": strategy, **share}

    def reserve(self) -> PlacementGroup:
        """Reserves the resources, once; bundle i is for rank i.

        Raises:
            ResourceError: the cluster cannot give them.
        """
        if self._placement_group is None:
            reserve_all({self.name_prefix: self})
        assert self._placement_group is not None
        return self._placement_group

    def reserve_on(self, nodes: Sequence[str]) -> None:
        """Reserves the resources on the nodes with these ids, one for each entry of ``process_on_nodes``."""
        bundles = [self.bundle] * self.world_size
        selectors = [
            {"ray.io/node-id": node}
            for node, size in zip(nodes, self.process_on_nodes, strict=True)
            for _ in range(size)
        ]
        group = placement_group(bundles, strategy="PACK", bundle_label_selector=selectors)
        deadline = time.monotonic() + _SECONDS_TO_RESERVE
        while not group.wait(_SECONDS_BETWEEN_LOOKS):
            is_gone = not set(nodes) <= _nodes().keys()
            if not is_gone and time.monotonic() < deadline:
                continue
            remove_placement_group(group)
            if is_gone:
                raise _NodeGoneError(
                    f"A node was lost while the resource pool {self.name_prefix!r} was reserved on it."
                )
            raise ResourceError(
                f"Ray did not reserve {bundles} for the resource pool {self.name_prefix!r} within "
                f"{_SECONDS_TO_RESERVE:.0f} s, though they seemed free. Is another job starting on the cluster?"
            )
        self._placement_group, self.nodes = group, tuple(nodes)

    def release(self) -> None:
        """Gives the resources back and ends what runs on them. May be called again."""
        if self._placement_group is not None and ray.is_initialized():
            remove_placement_group(self._placement_group)
        self._placement_group, self.nodes = None, ()


class ResourcePoolManager(PoolManager[RayResourcePool]):
    """Makes the pools of a run and knows which role runs in which.

    Args:
        resource_pool_spec: name of each pool and its processes on each node, as ``{"global_pool": [8, 8]}``.
        mapping: name of the pool of each role.
        use_gpu: whether each process gets a GPU; whether the cluster has any, if None.
        num_cpus_per_worker: CPUs that are reserved for each process where it gets no GPU.
        max_colocate_count: how many worker groups may share a pool.
    """

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[Hashable, str],
        use_gpu: bool | None = None,
        num_cpus_per_worker: int = 1,
        max_colocate_count: int = 10,
    ) -> None:
        super().__init__(resource_pool_spec, mapping)
        self._use_gpu = use_gpu
        self._num_cpus_per_worker = num_cpus_per_worker
        self._max_colocate_count = max_colocate_count

    @property
    def use_gpu(self) -> bool:
        """Whether each process gets a GPU."""
        return ray.cluster_resources().get("GPU", 0) > 0 if self._use_gpu is None else self._use_gpu

    def create_resource_pool(self) -> None:
        """Makes all pools and reserves their resources.

        Raises:
            ResourceError: the cluster cannot give them; nothing stays reserved.
        """
        use_gpu = self.use_gpu
        pools = {
            name: RayResourcePool(processes, use_gpu, name, self._max_colocate_count, self._num_cpus_per_worker)
            for name, processes in self.resource_pool_spec.items()
        }
        reserve_all(pools)
        self.resource_pool_dict = pools

    def get_n_gpus(self) -> int:
        """GPUs of all pools together; the number of processes where they have none."""
        return self.num_processes

    def shutdown(self) -> None:
        """Gives all resources back and ends what runs on them. May be called again."""
        for pool in self.resource_pool_dict.values():
            pool.release()
        self.resource_pool_dict = {}


@dataclass
class _Node:
    address: str
    total: dict[str, float]
    available: dict[str, float]


def reserve_all(pools: Mapping[str, RayResourcePool]) -> None:
    """Reserves the resources of several pools, or of none of them.

    Raises:
        ResourceError: says what was asked for and what is available.
    """
    while True:
        plan = _find_room(pools)
        try:
            for pool, chosen in zip(pools.values(), plan, strict=True):
                pool.reserve_on(chosen)
            return
        except ResourceError as error:
            for pool in pools.values():
                pool.release()
            # Each time there is a node less, so this ends.
            if not isinstance(error, _NodeGoneError):
                raise


def _find_room(pools: Mapping[str, RayResourcePool]) -> list[list[str]]:
    """Nodes for all pools that have room now, or in a few seconds."""
    deadline = time.monotonic() + _SECONDS_UNTIL_FREED
    nodes = _nodes()
    if _plan(pools.values(), {name: node.total for name, node in nodes.items()}) is None:
        raise ResourceError(_refusal(pools, nodes))
    while (plan := _plan(pools.values(), {name: node.available for name, node in nodes.items()})) is None:
        if time.monotonic() > deadline:
            raise ResourceError(_refusal(pools, nodes))
        time.sleep(0.2)
        nodes = _nodes()
    return plan


def what_lacks(pools: Mapping[str, RayResourcePool], *, now: bool) -> str | None:
    """Why the cluster cannot give the pools, in a sentence; None where it can. Nothing is reserved.

    Args:
        now: counts what is free at the moment; otherwise all that the nodes have.
    """
    nodes = _nodes()
    resources = {name: node.available if now else node.total for name, node in nodes.items()}
    return _refusal(pools, nodes) if _plan(pools.values(), resources) is None else None


def addresses() -> dict[str, str]:
    """Address of each living node by its id, in the order in which pools are placed."""
    return {name: node.address for name, node in _nodes().items()}


def resources_of_nodes(name: str) -> list[tuple[str, float, float]]:
    """Address of each living node, how much it has of a resource (CPU, GPU), and how much of that is free."""
    return [(n.address, n.total.get(name, 0.0), n.available.get(name, 0.0)) for n in _nodes().values()]


def _nodes() -> dict[str, _Node]:
    """The living nodes by id, in the order of their addresses, so that ranks are placed alike in every run."""
    available = ray._private.state.available_resources_per_node()
    alive = sorted(
        (node for node in ray.nodes() if node["Alive"]), key=lambda node: (node["NodeManagerAddress"], node["NodeID"])
    )
    return {
        node["NodeID"]: _Node(node["NodeManagerAddress"], node["Resources"], available.get(node["NodeID"], {}))
        for node in alive
    }


def _plan(pools: Iterable[RayResourcePool], free_by_node: Mapping[str, Mapping[str, float]]) -> list[list[str]] | None:
    """Node ids for each pool, one an entry and all different within a pool; None if they do not fit."""
    free = {node: dict(resources) for node, resources in free_by_node.items()}
    plan = []
    for pool in pools:
        chosen: list[str] = []
        for size in pool.process_on_nodes:
            need = {name: amount * size for name, amount in pool.bundle.items()}
            fitting = (
                node
                for node, rest in free.items()
                if node not in chosen and all(rest.get(name, 0.0) >= amount for name, amount in need.items())
            )
            node = next(fitting, None)
            if node is None:
                return None
            chosen.append(node)
            for name, amount in need.items():
                free[node][name] -= amount
        plan.append(chosen)
    return plan


def _refusal(pools: Mapping[str, RayResourcePool], nodes: Mapping[str, _Node]) -> str:
    asked: Counter[str] = Counter()
    for pool in pools.values():
        asked.update({name: int(amount * pool.world_size) for name, amount in pool.bundle.items()})
    described = ", ".join(f"{name}={pool.process_on_nodes}" for name, pool in pools.items())
    total = ", ".join(f"{amount} {name}" for name, amount in asked.items())
    num_nodes = max(len(pool.process_on_nodes) for pool in pools.values())
    available = "; ".join(
        f"node {node.address} "
        + ", ".join(f"{node.available.get(name, 0):g} {name} (of {node.total.get(name, 0):g})" for name in asked)
        for node in nodes.values()
    )
    return (
        f"The Ray cluster lacks resources. Asked: {total} on {num_nodes} node(s), for pools with these processes on "
        f"each node: {described}. Available: {available}. Lower trainer.nnodes or trainer.n_gpus_per_node, or add "
        f"nodes with `ray start --address=...`."
    )
