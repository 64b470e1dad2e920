"""`burnish.single_controller` at verl's path."""

from burnish.single_controller.resource_pool import ResourcePool
from burnish.single_controller.worker import Worker
from burnish.single_controller.worker_group import WorkerGroup

__all__ = ["ResourcePool", "Worker", "WorkerGroup"]
