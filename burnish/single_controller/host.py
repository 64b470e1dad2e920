"""What runs inside a worker's process, under either controller."""

import os
import socket
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from burnish.single_controller.worker import WorkerContext
from burnish.single_controller.worker_group import ColocatedWorker, RayClassWithInitArgs
from burnish.utils import env


@dataclass(frozen=True)
class ProcessInfo:
    """Where a worker's process runs; ``port`` is that of its rendezvous store, 0 if it has none."""

    address: str
    pid: int
    port: int = 0

    def __str__(self) -> str:
        return f"node {self.address}, pid {self.pid}"


class WorkerHost:
    """Holds the worker of one process and calls its methods.

    Args:
        name: what log lines call the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._store: dist.TCPStore | None = None
        self._worker: Any = None

    def __repr__(self) -> str:
        return self._name

    def prepare(self, opens_store: bool, address: str | None = None) -> ProcessInfo:
        """Tells where the process runs; the process of rank 0 opens the store at which its group will meet.

        The operating system chooses the store's port and the process holds it open from then on, so that nobody else
        can take it between the choice and its use.
        """
        address = address or socket.gethostname()
        if not opens_store:
            return ProcessInfo(address, os.getpid())
        # Multi-tenant, so that the default rendezvous of torch.distributed in this process joins the open store.
        self._store = dist.TCPStore(address, 0, None, is_master=True, wait_for_workers=False, multi_tenant=True)
        return ProcessInfo(address, os.getpid(), self._store.port)

    def construct(self, context: WorkerContext, ray_cls_with_init: RayClassWithInitArgs) -> None:
        """Sets the environment and the threads of the process and makes its worker."""
        env.set_all(context.to_env())
        # Ray limits OpenMP by an actor's CPUs; both controllers have to give a worker the same number of threads,
        # since the order of a sum, and so its last bits, depends on it.
        torch.set_num_threads(max(1, env.num_cpus() // context.local_world_size))
        self._worker = ray_cls_with_init()

    def invoke(self, role: str | None, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the worker, or of one of its colocated roles."""
        worker = self._worker
        if role is not None and isinstance(worker, ColocatedWorker):
            worker = worker.roles[role]
        return getattr(worker, method_name)(*args, **kwargs)
