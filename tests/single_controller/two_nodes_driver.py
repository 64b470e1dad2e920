"""Driver of a Ray cluster of two nodes on one machine: a pool ``[1, 1]``, each rank on a node of its own."""

import logging
import os

import pytest
import ray
from ray._common.utils import reset_ray_address
from ray.cluster_utils import Cluster
from workers_for_tests import Place

from burnish.single_controller import RayClassWithInitArgs
from burnish.single_controller.ray import RayResourcePool, RayWorkerGroup, ResourcePoolManager
from burnish.utils.errors import ResourceError


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    # Ray writes down where it is, and other runs on this machine would join it.
    reset_ray_address()
    cluster.add_node(num_cpus=2)
    path = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    ray.init(address=cluster.address, logging_level=logging.ERROR, runtime_env={"env_vars": path})
    manager = ResourcePoolManager({"global_pool": [1, 1]}, {"actor": "global_pool"}, use_gpu=False)
    manager.create_resource_pool()
    group = RayWorkerGroup(manager.get_resource_pool("actor"), RayClassWithInitArgs(Place))
    places = group.place()
    assert [place["env"]["LOCAL_RANK"] for place in places] == ["0", "0"]
    assert [place["env"]["LOCAL_WORLD_SIZE"] for place in places] == ["1", "1"]
    assert len({place["node"] for place in places}) == 2
    assert [future.get() for future in group.sum_of_ranks()] == [3.0, 3.0]
    with pytest.raises(ResourceError, match=r"on 3 node\(s\)"):
        RayResourcePool([1, 1, 1], use_gpu=False).reserve()
    manager.shutdown()
    ray.shutdown()
    cluster.shutdown()
    os.write(1, b"both nodes met\n")


if __name__ == "__main__":
    main()
