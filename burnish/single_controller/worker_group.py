"""``WorkerGroup``: processes that are called as one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, Self

from burnish.single_controller.decorator import MethodSpec, get_predefined_dispatch_fn, registered_methods
from burnish.single_controller.futures import RankFuture, fetch
from burnish.single_controller.heartbeat import Beat
from burnish.single_controller.worker import Worker
from burnish.utils.errors import WorkerError

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one rank."""


class RayClassWithInitArgs:
    """A worker class and the arguments it is made with, in whichever process that happens.

    Args:
        cls: a subclass of :class:`Worker`; one that ``ray.remote`` wrapped is unwrapped.
    """

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        metadata = getattr(cls, "__ray_metadata__", None)
        self.cls: type = metadata.modified_class.__ray_actor_class__ if metadata is not None else cls
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Any:
        """Makes the worker, in this process."""
        return self.cls(*self.args, **self.kwargs)


class ColocatedWorker(Worker):
    """Several roles in one process. Their groups come from :meth:`WorkerGroup.spawn`."""

    def __init__(self, class_dict: dict[str, RayClassWithInitArgs]) -> None:
        self.roles = {role: class_with_args() for role, class_with_args in class_dict.items()}


def create_colocated_worker_cls(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """One worker class that holds a worker of each role of ``class_dict``.

    Raises:
        WorkerError: there is no role.
    """
    if not class_dict:
        raise WorkerError("create_colocated_worker_cls needs at least one role.")
    return RayClassWithInitArgs(ColocatedWorker, class_dict)


class WorkerGroup(ABC):
    """Processes of one worker class; its registered methods are methods of the group.

    Args:
        world_size: number of processes.
        ray_cls_with_init: the class they run.
        name: what messages call the group; the class's name where it is empty.
        role: which of the colocated roles this group stands for.
    """

    def __init__(
        self, world_size: int, ray_cls_with_init: RayClassWithInitArgs, name: str = "", role: str | None = None
    ) -> None:
        self.world_size = world_size
        self.ray_cls_with_init = ray_cls_with_init
        self.role = role
        self.name = name or role or ray_cls_with_init.cls.__name__
        self._meshes: dict[str, list[tuple[int, bool]]] = {}
        self._bind_worker_method(ray_cls_with_init.cls)

    @abstractmethod
    def _submit(self, method_name: str, calls: list[Call]) -> list[RankFuture]:
        """Starts ``method_name`` on the ranks 0, 1, ... with the arguments ``calls[rank]``."""

    @abstractmethod
    def _group_of_role(self, role: str, ray_cls_with_init: RayClassWithInitArgs) -> Self:
        """The same processes, as the group of one of their colocated roles."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the processes, those of other roles in them included. May be called again."""

    def beats(self) -> dict[str, Beat]:
        """The last sign of life of each process, by its name; processes that were not heard yet are missing."""
        return {}

    def idle_seconds(self) -> float | None:
        """Seconds since any process of the group got further; None where nothing is known. From any thread."""
        return None

    def dump_stacks(self) -> dict[str, Path]:
        """Writes where the threads of each process stand into the group's folder for that.

        Returns:
            the files by the names of the processes; empty without such a folder. A process that does not answer is missing.
        """
        return {}

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[RankFuture]:
        """Starts a method, with the same arguments, on every rank."""
        return self._submit(method_name, [(args, kwargs)] * self.world_size)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list:
        """Runs a method, with the same arguments, on every rank; the results are a list by rank."""
        return fetch(self.execute_all_async(method_name, *args, **kwargs))

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> RankFuture:
        """Starts a method on rank 0."""
        return self._submit(method_name, [(args, kwargs)])[0]

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a method on rank 0."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs).get()

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, Self]:
        """A group for each colocated role, all in the same processes.

        Raises:
            WorkerError: the processes do not hold such a role.
        """
        if not issubclass(self.ray_cls_with_init.cls, ColocatedWorker):
            raise WorkerError(f"{self.name} runs one role. Make its class with create_colocated_worker_cls to spawn.")
        class_dict: dict[str, RayClassWithInitArgs] = self.ray_cls_with_init.args[0]
        unknown = sorted(set(prefix_set) - class_dict.keys())
        if unknown:
            raise WorkerError(f"{self.name} holds the roles {', '.join(class_dict)}, not {', '.join(unknown)}.")
        return {role: self._group_of_role(role, class_dict[role]) for role in class_dict if role in set(prefix_set)}

    def mesh(self, mesh_name: str) -> list[tuple[int, bool]]:
        """For each rank its data-parallel index on the mesh and whether it collects; asked once and remembered.

        Raises:
            WorkerError: an index is missing, or does not have exactly one rank that collects.
        """
        if mesh_name not in self._meshes:
            places = self.execute_all_sync("_query_dispatch_collect_info", mesh_name)
            collecting = sorted(dp_rank for dp_rank, is_collect in places if is_collect)
            if collecting != list(range(1 + max(dp_rank for dp_rank, _ in places))):
                raise WorkerError(
                    f"On the mesh {mesh_name!r} of {self.name} each data-parallel index from 0 up needs exactly one "
                    f"rank that collects; (dp_rank, is_collect) by rank are {places}."
                )
            self._meshes[mesh_name] = places
        return self._meshes[mesh_name]

    def dp_size(self, mesh_name: str) -> int:
        """Into how many shards a batch is cut on the mesh."""
        return 1 + max(dp_rank for dp_rank, _ in self.mesh(mesh_name))

    def _bind_worker_method(self, user_defined_cls: type) -> None:
        """Gives the group a method for each registered method of the class.

        Raises:
            WorkerError: a method has a name that the group needs itself.
        """
        for method_name, spec in registered_methods(user_defined_cls).items():
            if hasattr(self, method_name):
                raise WorkerError(
                    f"{user_defined_cls.__name__}.{method_name} cannot be registered, since a worker group has "
                    f"something of that name itself. Rename it."
                )
            setattr(self, method_name, self._group_method(method_name, spec, getattr(user_defined_cls, method_name)))

    def _group_method(self, method_name: str, spec: MethodSpec, method: Callable) -> Callable:
        mode = spec.dispatch_mode
        functions = mode if isinstance(mode, dict) else get_predefined_dispatch_fn(mode)
        num_ranks = 1 if spec.only_rank_zero else self.world_size

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            lists, keyword_lists = functions["dispatch_fn"](self, *args, **kwargs)
            futures = self._submit(method_name, _calls(lists, keyword_lists, num_ranks))
            outputs: list = fetch(futures) if spec.blocking else list(futures)
            return outputs[0] if spec.only_rank_zero else functions["collect_fn"](self, outputs)

        return call


def _calls(lists: tuple[list, ...], keyword_lists: dict[str, list], num_ranks: int) -> list[Call]:
    """Turns a list of values for each argument into the arguments of each rank."""
    return [
        (tuple(values[rank] for values in lists), {key: values[rank] for key, values in keyword_lists.items()})
        for rank in range(num_ranks)
    ]
