"""The actor that is a worker's process."""

import os
from dataclasses import dataclass

import ray
import torch.distributed as dist

from burnish.single_controller.heartbeat import Pulse
from burnish.single_controller.host import WorkerHost
from burnish.single_controller.ray.heartbeat import Channel, start_beating
from burnish.utils import stacks


@dataclass(frozen=True)
class ProcessInfo:
    """Where a worker's process runs; ``port`` is that of its rendezvous store, 0 if it has none."""

    address: str
    pid: int
    port: int = 0

    def __str__(self) -> str:
        return f"node {self.address}, pid {self.pid}"


class RayWorkerHost(WorkerHost):
    """A :class:`WorkerHost` that its peers can find.

    Args:
        name: what log lines call the process.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._store: dist.TCPStore | None = None

    def __repr__(self) -> str:
        return self._name

    def prepare(self, opens_store: bool, channel: Channel, rank: int, folder: str = "") -> ProcessInfo:
        """Tells where the process runs, and begins to give signs of life; the process of rank 0 opens the store at which its
        group will meet.

        ``folder`` is where the driver runs. A process of a cluster that was there before runs where that was started, and
        relative paths would mean something else in it.

        The operating system chooses the store's port and the process holds it open from then on, so that nobody else
        can take it between the choice and its use.
        """
        if os.path.isdir(folder):
            os.chdir(folder)
        address = ray.util.get_node_ip_address()
        self.pulse = Pulse(address)
        stacks.make_visible()
        start_beating(self.pulse, channel, rank)
        if not opens_store:
            return ProcessInfo(address, os.getpid())
        # Multi-tenant, so that the default rendezvous of torch.distributed in this process joins the open store.
        self._store = dist.TCPStore(address, 0, None, is_master=True, wait_for_workers=False, multi_tenant=True)
        return ProcessInfo(address, os.getpid(), self._store.port)
