"""What runs inside a worker's process, under either controller."""

from typing import Any

import torch

from burnish.single_controller.heartbeat import Pulse
from burnish.single_controller.worker import Worker, WorkerContext
from burnish.single_controller.worker_group import ColocatedWorker, RayClassWithInitArgs
from burnish.utils import env


class WorkerHost:
    """Holds the worker of one process and calls its methods."""

    def __init__(self) -> None:
        self._worker: Any = None
        self.pulse = Pulse()

    def construct(self, context: WorkerContext, ray_cls_with_init: RayClassWithInitArgs) -> None:
        """Sets the environment and the threads of the process and makes its worker."""
        env.set_all(context.to_env())
        # Ray limits OpenMP by an actor's CPUs; both controllers have to give a worker the same number of threads,
        # since the order of a sum, and so its last bits, depends on it.
        torch.set_num_threads(max(1, env.num_cpus() // context.local_world_size))
        with self.pulse.stage("__init__"):
            self._worker = ray_cls_with_init()

    def invoke(self, role: str | None, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the worker, or of one of its colocated roles."""
        worker = self._worker
        if role is not None and isinstance(worker, ColocatedWorker):
            worker = worker.roles[role]
        with self.pulse.stage(method_name if role is None else f"{role}.{method_name}"):
            return getattr(worker, method_name)(*args, **kwargs)

    @property
    def closed(self) -> bool:
        """Whether there is no worker: not yet, or no more."""
        return self._worker is None

    def close(self) -> None:
        """Drops the worker, once it has ended what it started outside this process."""
        worker, self._worker = self._worker, None
        for role in worker.roles.values() if isinstance(worker, ColocatedWorker) else (worker,):
            if isinstance(role, Worker):
                role.close()
