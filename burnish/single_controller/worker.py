"""``Worker``: what one process of a group knows about itself and its peers."""

import datetime
import random
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from burnish.single_controller.network import check_network
from burnish.utils import env
from burnish.utils.errors import WorkerError

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True)
class WorkerContext:
    """A process's place in its group; travels as the environment variables that torch.distributed reads.

    Attributes:
        rank: number of this process in the group, ``0 <= rank < world_size``.
        local_rank: its number among the ``local_world_size`` processes of the group on this node.
        master_addr: address of rank 0's rendezvous store.
        master_port: port of that store, which rank 0 holds open; 0 in a group of one.
        collective_timeout: seconds after which a collective that not every rank joined fails; 0: torch's default.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    collective_timeout: float = 0.0

    def to_env(self) -> dict[str, str]:
        """As environment variables: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as
        torch.distributed knows them, and COLLECTIVE_TIMEOUT."""
        return {name.upper(): str(getattr(self, name)) for name in self.__dataclass_fields__}

    @classmethod
    def from_env(cls) -> Self:
        """The context that the controller set; a group of one where it set none."""
        default = cls()
        values = {
            name: type(getattr(default, name))(env.get(name.upper(), str(getattr(default, name))))
            for name in cls.__dataclass_fields__
        }
        return cls(**values)


class Worker:
    """Base class of workers. A subclass need not call ``super().__init__()``."""

    context: WorkerContext

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        worker = super().__new__(cls)
        worker.context = WorkerContext.from_env()
        worker._mesh_places = {}
        return worker

    _mesh_places: dict[str, tuple[int, bool]]

    @property
    def rank(self) -> int:
        """Number of this process in its group."""
        return self.context.rank

    @property
    def world_size(self) -> int:
        """Number of processes in the group."""
        return self.context.world_size

    @property
    def local_rank(self) -> int:
        """Number of this process among those of its group on this node."""
        return self.context.local_rank

    @property
    def master_addr(self) -> str:
        """Address of rank 0's rendezvous store."""
        return self.context.master_addr

    @property
    def master_port(self) -> int:
        """Port of rank 0's rendezvous store."""
        return self.context.master_port

    @property
    def device_index(self) -> int:
        """Index of this process's GPU among those it can see; Ray shows a worker only its own."""
        return 0 if torch.cuda.device_count() <= 1 else self.local_rank

    def ensure_process_group(self, device_type: str = "cpu", timeout_s: float | None = None) -> None:
        """Starts the default process group when it is first needed; all ranks call it. A group of one has none.

        Args:
            device_type: ``cpu`` (gloo) or ``cuda`` (NCCL, and gloo for CPU tensors).
            timeout_s: seconds after which a collective that not every rank joined fails; the context's if None.
        """
        if device_type not in _BACKENDS:
            raise WorkerError(
                f"There is no process group for the device {device_type!r}. Known: {', '.join(_BACKENDS)}."
            )
        if device_type == "cuda":
            torch.cuda.set_device(self.device_index)
        self.init_process_group(_BACKENDS[device_type], timeout_s)

    def init_process_group(self, backend: str, timeout_s: float | None = None) -> None:
        """Starts the default process group with ``backend``, unless there is one or the group has one process.

        The ranks meet at the store that rank 0's process opened on a port chosen by its operating system and has held
        open since, so no two groups can race for a port.
        """
        if self.world_size == 1 or dist.is_initialized():
            return
        check_network(self.context, uses_nccl="nccl" in backend)
        if env.get("GLOO_SOCKET_IFNAME") is None and (interface := env.interface_towards(self.master_addr)):
            # Gloo's own choice is the address of the host's name, which many machines resolve to their loopback, where
            # other nodes cannot reach them, or not at all.
            env.set_all({"GLOO_SOCKET_IFNAME": interface})
        seconds = timeout_s or self.context.collective_timeout
        timeout = datetime.timedelta(seconds=seconds) if seconds else None
        dist.init_process_group(backend, init_method="env://", timeout=timeout)

    def seed_generators(self, seed: int) -> None:
        """Seeds this process's global generators (Python, numpy, torch with all devices), differently on each rank."""
        own = seed * 1_000_003 + self.rank
        random.seed(own)
        np.random.seed(own % 2**32)
        torch.manual_seed(own)

    def close(self) -> None:
        """Ends what this worker has started outside its process. Called when the run ends in the driver's process; where the
        worker is a process of its own it is killed, and what it started has to notice."""

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Places this rank on a mesh: which rows it gets, and whether its result is the one for them."""
        self._mesh_places[mesh_name] = (dp_rank, is_collect)

    def _query_dispatch_collect_info(self, mesh_name: str) -> tuple[int, bool]:
        if mesh_name not in self._mesh_places:
            known = ", ".join(self._mesh_places) or "none"
            raise WorkerError(
                f"{type(self).__name__} has no place on a mesh {mesh_name!r} (known: {known}). Call "
                f"_register_dispatch_collect_info({mesh_name!r}, dp_rank, is_collect) before the first call on it."
            )
        return self._mesh_places[mesh_name]
