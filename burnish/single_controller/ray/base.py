"""`burnish.single_controller.ray` at verl's path."""

from burnish.single_controller.ray.resource_pool import RayResourcePool, ResourcePoolManager
from burnish.single_controller.ray.worker_group import RayWorkerGroup
from burnish.single_controller.worker_group import RayClassWithInitArgs, create_colocated_worker_cls

__all__ = [
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "create_colocated_worker_cls",
]
