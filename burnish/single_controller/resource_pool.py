"""How many processes run on which nodes, and which role runs in which pool."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from burnish.utils.errors import ResourceError


class ResourcePool:
    """Processes on nodes.

    Args:
        process_on_nodes: number of processes on each node; ``[8, 8]`` are two nodes with eight each.
        max_colocate_count: how many worker groups may share the pool, each with processes of its own.

    Raises:
        ResourceError: a number is not positive.
    """

    def __init__(self, process_on_nodes: Sequence[int], max_colocate_count: int = 10) -> None:
        if not process_on_nodes or min(process_on_nodes) < 1 or max_colocate_count < 1:
            raise ResourceError(
                f"A resource pool needs at least one process on each node, not {list(process_on_nodes)} "
                f"(max_colocate_count={max_colocate_count})."
            )
        self.process_on_nodes = list(process_on_nodes)
        self.max_colocate_count = max_colocate_count

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return sum(self.process_on_nodes)

    @property
    def local_world_size_list(self) -> list[int]:
        """For each rank the number of processes on its node."""
        return [size for size in self.process_on_nodes for _ in range(size)]

    @property
    def local_rank_list(self) -> list[int]:
        """For each rank its number on its node."""
        return [local_rank for size in self.process_on_nodes for local_rank in range(size)]


Pool = TypeVar("Pool", bound=ResourcePool)


class PoolManager(Generic[Pool]):
    """Pools by name, and the pool of each role.

    Args:
        resource_pool_spec: name of each pool and its processes on each node.
        mapping: name of the pool of each role.

    Raises:
        ResourceError: a role is mapped to a pool that there is none of.
    """

    def __init__(self, resource_pool_spec: Mapping[str, Sequence[int]], mapping: Mapping[Hashable, str]) -> None:
        for role, name in mapping.items():
            if name not in resource_pool_spec:
                raise ResourceError(
                    f"The role {role} is to run in the resource pool {name!r}, but the pools are "
                    f"{', '.join(resource_pool_spec)}."
                )
        self.resource_pool_spec = {name: list(processes) for name, processes in resource_pool_spec.items()}
        self.mapping = dict(mapping)
        self.resource_pool_dict: dict[str, Pool] = {}

    def get_resource_pool(self, role: Hashable) -> Pool:
        """The pool in which ``role`` runs.

        Raises:
            ResourceError: no pool for the role, or pools were not created yet.
        """
        if role not in self.mapping:
            raise ResourceError(f"The role {role} has no resource pool; these have: {list(self.mapping)}.")
        if self.mapping[role] not in self.resource_pool_dict:
            raise ResourceError("The resource pools do not exist yet. Call create_resource_pool() first.")
        return self.resource_pool_dict[self.mapping[role]]

    @property
    def num_processes(self) -> int:
        """Processes of all pools."""
        return sum(sum(processes) for processes in self.resource_pool_spec.values())


class LocalResourcePoolManager(PoolManager[ResourcePool]):
    """Pools of the local controller: one process each, the driver's own."""

    def create_resource_pool(self) -> None:
        """Makes the pools.

        Raises:
            ResourceError: a pool of more than one process.
        """
        for name, processes in self.resource_pool_spec.items():
            if sum(processes) != 1:
                raise ResourceError(
                    f"The resource pool {name!r} asks for {processes} processes, and the local controller has one, its "
                    f"own. Set trainer.controller=ray, or trainer.nnodes=1 trainer.n_gpus_per_node=1."
                )
            self.resource_pool_dict[name] = ResourcePool(processes)

    def get_n_gpus(self) -> int:
        """Processes of all pools; each has a GPU where there are GPUs."""
        return self.num_processes

    def shutdown(self) -> None:
        """Nothing to give back."""
