"""``RayWorkerGroup``: a group of Ray actors, one a process."""

import copy
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np
import ray
import torch

from burnish.protocol import DataProto, DataProtoFuture
from burnish.single_controller.futures import RankFuture
from burnish.single_controller.heartbeat import Beat
from burnish.single_controller.ray.calls import PendingCall, RayFuture
from burnish.single_controller.ray.host import RayWorkerHost
from burnish.single_controller.ray.processes import Processes
from burnish.single_controller.ray.resource_pool import RayResourcePool
from burnish.single_controller.sharding import FutureShard, Shard
from burnish.single_controller.worker import WorkerContext
from burnish.single_controller.worker_group import Call, RayClassWithInitArgs, WorkerGroup
from burnish.utils.errors import WorkerError

_LARGE = (DataProto, Shard, torch.Tensor, np.ndarray, dict, list)
"""Values that go to Ray's object store once when several ranks get the same one."""


class RayWorkerGroup(WorkerGroup):
    """A worker in each process of a resource pool.

    When one worker raises or dies, or a stage takes too long, all processes of the group are ended and the error names
    the worker, the stage and the cause; the driver never waits for peers that hang because of it.

    Args:
        resource_pool: the processes; several groups may share a pool and have processes of their own in it.
        ray_cls_with_init: the workers' class and arguments. The class has to be importable, not defined in a script.
        name_prefix: what messages and log lines call the group; the class's name where it is empty.
        stage_timeout: seconds that a call may take to get further; without limit if None.
        start_timeout: seconds that the processes have to start; many that read torch from one slow disk take their time.
        stack_folder: where it is written in which code the processes stand when they get no further.
        collective_timeout: seconds after which a collective of the processes that not all of them joined fails; torch's
            default if None.

    Raises:
        ResourceError: the cluster cannot give the pool's processes.
        WorkerError: a process did not start, or its worker could not be made.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs,
        name_prefix: str = "",
        stage_timeout: float | None = None,
        start_timeout: float = 900.0,
        stack_folder: str | None = None,
        collective_timeout: float | None = None,
    ) -> None:
        super().__init__(resource_pool.world_size, ray_cls_with_init, name_prefix)
        self._stage_timeout = stage_timeout
        self._collective_timeout = collective_timeout or 0.0
        # The class travels once for all ranks; and if it cannot travel, nothing has started yet.
        class_ref = self._put_class()
        self._processes = Processes(
            [
                ray.remote(RayWorkerHost).options(**resource_pool.options(rank)).remote(f"{self.name} rank {rank}")
                for rank in range(self.world_size)
            ],
            self.name,
            stack_folder,
        )
        self._start(class_ref, resource_pool, start_timeout)

    def _put_class(self) -> ray.ObjectRef:
        try:
            return ray.put(self.ray_cls_with_init)
        except (TypeError, pickle.PicklingError) as error:
            raise WorkerError(
                f"{self.ray_cls_with_init.cls.__qualname__} and its arguments cannot be sent to the workers: {error}. "
                f"A worker class has to be defined in a module that can be imported, not in the script that is run."
            ) from error

    def _start(self, class_ref: ray.ObjectRef, resource_pool: RayResourcePool, timeout: float) -> None:
        actors = self._processes.actors

        def wait(stage: str, refs: list[ray.ObjectRef]) -> list:
            return PendingCall(self._processes, self.name, stage, refs, timeout, "start_timeout").results()

        opens_store, channel, folder = self.world_size > 1, self._processes.channel, str(Path.cwd())
        self._processes.infos = wait(
            "start",
            [
                actor.prepare.remote(opens_store and rank == 0, channel, rank, folder)
                for rank, actor in enumerate(actors)
            ],
        )
        contexts = self._contexts(resource_pool)
        wait("__init__", [actor.construct.remote(c, class_ref) for actor, c in zip(actors, contexts, strict=True)])

    def _contexts(self, resource_pool: RayResourcePool) -> list[WorkerContext]:
        first = self._processes.infos[0]
        places = zip(resource_pool.local_rank_list, resource_pool.local_world_size_list, strict=True)
        place, timeout = (first.address, first.port), self._collective_timeout
        return [
            WorkerContext(rank, self.world_size, local_rank, local_world_size, *place, timeout)
            for rank, (local_rank, local_world_size) in enumerate(places)
        ]

    def _group_of_role(self, role: str, ray_cls_with_init: RayClassWithInitArgs) -> Self:
        group = copy.copy(self)
        # The colocated class has no registered methods, so the copy carries no method of another role.
        WorkerGroup.__init__(group, self.world_size, ray_cls_with_init, role, role)
        return group

    def _submit(self, method_name: str, calls: list[Call]) -> list[RankFuture]:
        if self._processes.closed:
            failure = self._processes.failure
            why = f"was stopped by an earlier failure: {failure}" if failure else "was shut down."
            raise WorkerError(f"{method_name} cannot run, since {self.name} {why}") from failure
        calls = _put_shared(calls)
        refs = [
            self._processes.actors[rank].invoke.remote(self.role, method_name, *args, **kwargs)
            for rank, (args, kwargs) in enumerate(calls)
        ]
        upstream = _upstream(calls)
        call = PendingCall(self._processes, self.name, method_name, refs, self._stage_timeout, upstream=upstream)
        return [RayFuture(call, rank) for rank in range(len(refs))]

    def beats(self) -> dict[str, Beat]:
        """See `WorkerGroup.beats`."""
        return self._processes.beats()

    def idle_seconds(self) -> float | None:
        """See `WorkerGroup.idle_seconds`."""
        return self._processes.idle_seconds()

    def dump_stacks(self) -> dict[str, Path]:
        """See `WorkerGroup.dump_stacks`."""
        written = self._processes.dump_stacks()
        return {self._processes.process_name(rank): file for rank, (file, _) in written.items()}

    def shutdown(self) -> None:
        """Ends the processes, those of other roles in them included. May be called again."""
        self._processes.kill()


def _put_shared(calls: list[Call]) -> list[Call]:
    """Puts large values that several ranks get into the object store once; Ray resolves the references."""
    count: dict[int, int] = {}
    for value in _values(calls):
        count[id(value)] = count.get(id(value), 0) + 1
    refs: dict[int, ray.ObjectRef] = {}

    def send(value: Any) -> Any:
        if not isinstance(value, _LARGE) or count[id(value)] == 1:
            return value
        if id(value) not in refs:
            refs[id(value)] = ray.put(value)
        return refs[id(value)]

    return [
        (tuple(send(value) for value in args), {key: send(value) for key, value in kwargs.items()})
        for args, kwargs in calls
    ]


def _upstream(calls: list[Call]) -> list[PendingCall]:
    """The calls that these ones wait for, through futures among their arguments."""
    found: dict[int, PendingCall] = {}
    for value in _values(calls):
        future = value.future if isinstance(value, FutureShard) else value
        for part in future.futures if isinstance(future, DataProtoFuture) else [future]:
            if isinstance(part, RayFuture):
                found[id(part.call)] = part.call
    return list(found.values())


def _values(calls: list[Call]) -> Iterable[Any]:
    for args, kwargs in calls:
        yield from args
        yield from kwargs.values()
