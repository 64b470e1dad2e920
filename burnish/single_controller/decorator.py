"""``@register``: a method of a worker becomes a method of its group, by dispatch -> execute -> collect.

A dispatch function ``dispatch_fn(worker_group, *args, **kwargs)`` returns ``(args, kwargs)`` in which every argument is
a list with one value for each rank. A collect function ``collect_fn(worker_group, outputs)`` makes one value of the
list of the ranks' results; for a call that is not waited for, the list holds a future for each rank.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from burnish.protocol import DataProto, DataProtoFuture
from burnish.single_controller.futures import RankFuture, fetch
from burnish.single_controller.sharding import FutureShard, drop_padding, receive, split_rows
from burnish.utils.errors import WorkerError

if TYPE_CHECKING:
    from burnish.single_controller.worker_group import WorkerGroup

Function = TypeVar("Function", bound=Callable[..., Any])
Lists = tuple[tuple[list, ...], dict[str, list]]
DispatchFn = Callable[..., Lists]
CollectFn = Callable[["WorkerGroup", list], Any]

_SPEC_ATTRIBUTE = "_burnish_method_spec"


class Dispatch(StrEnum):
    """How the arguments of a call reach the ranks, and what becomes of their results."""

    RANK_ZERO = "RANK_ZERO"
    """Rank 0 alone gets the arguments; its result is the call's."""
    ONE_TO_ALL = "ONE_TO_ALL"
    """Every rank gets the same arguments; the results are a list by rank."""
    ALL_TO_ALL = "ALL_TO_ALL"
    """Every argument is a list with one value for each rank; the results are a list by rank."""
    DP_COMPUTE = "DP_COMPUTE"
    """As ALL_TO_ALL, for methods whose ranks are data parallel."""
    DP_COMPUTE_PROTO = "DP_COMPUTE_PROTO"
    """Batches are cut by rows, anything else goes to every rank; the ranks' batches are joined again."""
    DP_COMPUTE_PROTO_WITH_FUNC = "DP_COMPUTE_PROTO_WITH_FUNC"
    """As DP_COMPUTE_PROTO; the first argument is a function, which goes to every rank."""
    DP_COMPUTE_METRIC = "DP_COMPUTE_METRIC"
    """As DP_COMPUTE_PROTO, but the results are a list by rank."""


class Execute(StrEnum):
    """Which ranks run a call."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


@dataclass(frozen=True)
class MethodSpec:
    """What ``@register`` was told about a method."""

    dispatch_mode: Dispatch | str | dict[str, Callable]
    execute_mode: Execute
    blocking: bool

    @property
    def only_rank_zero(self) -> bool:
        """Whether rank 0 alone runs the method."""
        return Execute.RANK_ZERO in (self.execute_mode, self.dispatch_mode)


def register(
    dispatch_mode: Dispatch | str | dict[str, Callable] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[Function], Function]:
    """Makes a method of a worker callable on its group.

    Args:
        dispatch_mode: a :class:`Dispatch`, the name of a registered mode, or a dict of ``dispatch_fn`` and
            ``collect_fn``.
        execute_mode: ``Execute.RANK_ZERO`` runs the method on rank 0 alone and returns its result.
        blocking: whether the group's method waits; if not, it returns a future (``get()``), which may be an argument of
            another call.
        materialize_futures: whether the method gets batches in place of futures of batches.

    Raises:
        WorkerError: the modes contradict each other or are incomplete.
    """
    if isinstance(dispatch_mode, dict) and set(dispatch_mode) != {"dispatch_fn", "collect_fn"}:
        raise WorkerError(
            f"A dispatch_mode of functions has the keys 'dispatch_fn' and 'collect_fn', not {list(dispatch_mode)}."
        )
    whole_arguments = (Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO)
    if execute_mode == Execute.RANK_ZERO and dispatch_mode not in whole_arguments:
        raise WorkerError(
            f"execute_mode=RANK_ZERO with dispatch_mode={dispatch_mode} would run the first rank's share only. "
            f"Use dispatch_mode=ONE_TO_ALL, or execute_mode=ALL."
        )
    spec = MethodSpec(dispatch_mode, Execute(execute_mode), blocking)

    def decorator(function: Function) -> Function:
        @wraps(function)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            plain_args, plain_kwargs, shard = receive(args, kwargs, materialize_futures)
            return drop_padding(function(self, *plain_args, **plain_kwargs), shard)

        setattr(method, _SPEC_ATTRIBUTE, spec)
        return cast(Function, method)

    return decorator


def registered_methods(cls: type) -> dict[str, MethodSpec]:
    """The methods of ``cls`` that were decorated with :func:`register`, inherited ones included."""
    members = ((name, getattr(cls, name, None)) for name in dir(cls))
    return {name: getattr(member, _SPEC_ATTRIBUTE) for name, member in members if hasattr(member, _SPEC_ATTRIBUTE)}


def _to_every_rank(num_ranks: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Lists:
    return tuple([value] * num_ranks for value in args), {key: [value] * num_ranks for key, value in kwargs.items()}


def dispatch_one_to_all(worker_group: "WorkerGroup", *args: Any, **kwargs: Any) -> Lists:
    """The same arguments for every rank."""
    return _to_every_rank(worker_group.world_size, args, kwargs)


def dispatch_all_to_all(worker_group: "WorkerGroup", *args: Any, **kwargs: Any) -> Lists:
    """Arguments that are lists by rank already."""
    for value in (*args, *kwargs.values()):
        if not isinstance(value, (list, tuple)) or len(value) != worker_group.world_size:
            size = f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
            raise WorkerError(
                f"This method takes lists with one value for each of the {worker_group.world_size} ranks, but got a "
                f"value of type {type(value).__name__}{size}. For the same value on every rank register it with ONE_TO_ALL."
            )
    return tuple(list(value) for value in args), {key: list(value) for key, value in kwargs.items()}


def dispatch_dp_compute_data_proto(worker_group: "WorkerGroup", *args: Any, **kwargs: Any) -> Lists:
    """Batches cut by rows, anything else for every rank."""
    return _cut_batches(worker_group.world_size, args, kwargs)


def dispatch_dp_compute_data_proto_with_func(
    worker_group: "WorkerGroup", function: Callable, *args: Any, **kwargs: Any
) -> Lists:
    """As :func:`dispatch_dp_compute_data_proto`, after a function that goes to every rank."""
    if not callable(function):
        raise WorkerError(f"The first argument of this method is a function, not a {type(function).__name__}.")
    lists, keyword_lists = _cut_batches(worker_group.world_size, args, kwargs)
    return ([function] * worker_group.world_size, *lists), keyword_lists


def _cut_batches(num_shards: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Lists:
    """Every argument as a list of ``num_shards`` values: shards of a batch, or the same value again and again."""
    values = (*args, *kwargs.values())
    sizes = [len(value) for value in values if isinstance(value, DataProto)]
    if len(set(sizes)) > 1:
        raise WorkerError(f"The batches of one call have different numbers of rows: {sizes}.")
    if not any(isinstance(value, (DataProto, DataProtoFuture)) for value in values):
        raise WorkerError("This method cuts a DataProto by rows, but none is among its arguments.")

    def cut(value: Any) -> list:
        if isinstance(value, DataProtoFuture):
            return [FutureShard(value, index, num_shards) for index in range(num_shards)]
        if isinstance(value, DataProto):
            return list(split_rows(value, num_shards))
        return [value] * num_shards

    return tuple(cut(value) for value in args), {key: cut(value) for key, value in kwargs.items()}


def collect_all(worker_group: "WorkerGroup", outputs: list) -> list:
    """The results, a list by rank."""
    return outputs


def collect_data_proto(worker_group: "WorkerGroup", outputs: list) -> DataProto | DataProtoFuture:
    """The ranks' batches, joined in the order of the ranks."""
    if all(isinstance(output, RankFuture) for output in outputs):
        return DataProtoFuture(collect_fn=join_rows, futures=outputs, fetch_fn=fetch)
    return join_rows(outputs)


def join_rows(parts: Sequence[DataProto]) -> DataProto:
    """Joins what the ranks returned; ranks that had nothing but padding have no part in it.

    Raises:
        WorkerError: a rank returned something that is not a DataProto.
    """
    for rank, part in enumerate(parts):
        if not isinstance(part, DataProto):
            raise WorkerError(
                f"Rank {rank} returned a value of type {type(part).__name__} from a method whose results are joined to one "
                f"DataProto. Return a DataProto, or register the method with Dispatch.DP_COMPUTE_METRIC."
            )
    filled = [part for part in parts if len(part)] or list(parts)
    if len(filled) == 1:
        # Without a copy of the rows; what concat does to meta_info must not depend on the number of ranks.
        joined = copy.copy(filled[0])
        joined.meta_info = DataProto.concat([DataProto(meta_info=joined.meta_info)]).meta_info
        return joined
    return DataProto.concat(filled)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Callable]:
    """Functions for ranks that lie on a mesh, such as data x tensor parallel.

    Ranks with the same data-parallel index get the same rows; the one of them that collects gives the result. Workers
    tell both with ``_register_dispatch_collect_info(mesh_name, dp_rank, is_collect)`` before the first call.
    """
    return {
        "dispatch_fn": partial(_dispatch_mesh, mesh_name),
        "collect_fn": partial(_collect_mesh, mesh_name),
    }


def make_nd_compute_metric_dispatch_fn(mesh_name: str) -> dict[str, Callable]:
    """As :func:`make_nd_compute_dataproto_dispatch_fn`, but the results are a list by rank, of all ranks."""
    return {"dispatch_fn": partial(_dispatch_mesh, mesh_name), "collect_fn": collect_all}


def _dispatch_mesh(mesh_name: str, worker_group: "WorkerGroup", *args: Any, **kwargs: Any) -> Lists:
    dp_ranks = [dp_rank for dp_rank, _ in worker_group.mesh(mesh_name)]
    lists, keyword_lists = _cut_batches(worker_group.dp_size(mesh_name), args, kwargs)

    def by_rank(shards: list) -> list:
        return [shards[dp_rank] for dp_rank in dp_ranks]

    return tuple(by_rank(shards) for shards in lists), {key: by_rank(shards) for key, shards in keyword_lists.items()}


def _collect_mesh(mesh_name: str, worker_group: "WorkerGroup", outputs: list) -> DataProto | DataProtoFuture:
    chosen = {
        dp_rank: output
        for (dp_rank, is_collect), output in zip(worker_group.mesh(mesh_name), outputs, strict=True)
        if is_collect
    }
    return collect_data_proto(worker_group, [chosen[dp_rank] for dp_rank in sorted(chosen)])


_DISPATCH_MODES: dict[str, dict[str, Callable]] = {}


def register_dispatch_mode(name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn) -> str:
    """Adds a dispatch mode; ``register(dispatch_mode=name)`` uses it. Returns ``name``.

    Raises:
        WorkerError: the name is taken.
    """
    if name in _DISPATCH_MODES:
        raise WorkerError(f"The dispatch mode {name!r} exists already.")
    _DISPATCH_MODES[name] = {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}
    return name


def get_predefined_dispatch_fn(dispatch_mode: Dispatch | str) -> dict[str, Callable]:
    """The ``dispatch_fn`` and ``collect_fn`` of a mode.

    Raises:
        WorkerError: there is no such mode.
    """
    if dispatch_mode not in _DISPATCH_MODES:
        raise WorkerError(f"There is no dispatch mode {dispatch_mode!r}. Known: {', '.join(_DISPATCH_MODES)}.")
    return _DISPATCH_MODES[dispatch_mode]


register_dispatch_mode(Dispatch.RANK_ZERO, dispatch_one_to_all, collect_all)
register_dispatch_mode(Dispatch.ONE_TO_ALL, dispatch_one_to_all, collect_all)
register_dispatch_mode(Dispatch.ALL_TO_ALL, dispatch_all_to_all, collect_all)
register_dispatch_mode(Dispatch.DP_COMPUTE, dispatch_all_to_all, collect_all)
register_dispatch_mode(Dispatch.DP_COMPUTE_PROTO, dispatch_dp_compute_data_proto, collect_data_proto)
register_dispatch_mode(
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, dispatch_dp_compute_data_proto_with_func, collect_data_proto
)
register_dispatch_mode(Dispatch.DP_COMPUTE_METRIC, dispatch_dp_compute_data_proto, collect_all)
