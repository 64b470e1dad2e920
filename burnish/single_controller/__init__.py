"""A driver calls groups of processes as if each were one object. Importing this package does not import Ray."""

from burnish.single_controller.decorator import (
    Dispatch,
    Execute,
    get_predefined_dispatch_fn,
    make_nd_compute_dataproto_dispatch_fn,
    make_nd_compute_metric_dispatch_fn,
    register,
    register_dispatch_mode,
)
from burnish.single_controller.local import LocalWorkerGroup
from burnish.single_controller.resource_pool import LocalResourcePoolManager, ResourcePool
from burnish.single_controller.sharding import NUM_PADDING
from burnish.single_controller.worker import Worker, WorkerContext
from burnish.single_controller.worker_group import RayClassWithInitArgs, WorkerGroup, create_colocated_worker_cls

__all__ = [
    "NUM_PADDING",
    "Dispatch",
    "Execute",
    "LocalResourcePoolManager",
    "LocalWorkerGroup",
    "RayClassWithInitArgs",
    "ResourcePool",
    "Worker",
    "WorkerContext",
    "WorkerGroup",
    "create_colocated_worker_cls",
    "get_predefined_dispatch_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "make_nd_compute_metric_dispatch_fn",
    "register",
    "register_dispatch_mode",
]
