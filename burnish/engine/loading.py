"""Weights that one rank reads and all ranks get.

Rank 0 loads the model whole on the CPU. The others build it without memory (on torch's meta device) and receive what they hold,
parameter by parameter, so that a model lies in a computer's memory once and not once for each of its GPUs.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from burnish.engine import ranks
from burnish.utils.errors import BurnishError, WorkerError

M = TypeVar("M", bound=nn.Module)


def on_rank_zero(make: Callable[[], M]) -> M | None:
    """``make()`` on rank 0, None on the others; what it raises is raised on every rank, so that nobody waits for ever."""
    result: M | None = None
    error: Exception | None = None
    if ranks.rank() == 0:
        try:
            result = make()
        except Exception as caught:  # noqa: BLE001  Whatever it is, the others must hear of it before it is raised.
            error = caught
    said: list[Any] = [None if error is None else _to_tell(error)]
    dist.broadcast_object_list(said, src=0)
    if error is not None:
        raise error
    if said[0] is not None:
        raise said[0]
    return result


def _to_tell(error: Exception) -> BurnishError:
    """What the other ranks raise: an error of ours as it is; any other by its text, since it may not travel."""
    if isinstance(error, BurnishError):
        return type(error)(str(error))
    return WorkerError(f"Rank 0 could not load the model: {type(error).__name__}: {error}")


def build_from_rank_zero(make: Callable[[], M], make_skeleton: Callable[[], M]) -> tuple[M, bool]:
    """A module that is whole on rank 0 and has no memory on the others, or is whole everywhere where that is impossible.

    Args:
        make: reads the model.
        make_skeleton: builds the same modules on the meta device.

    Returns:
        the module, and whether its weights are still to be received from rank 0.
    """
    whole = on_rank_zero(make)
    shapes: list[Any] = [None if whole is None else _shapes(whole)]
    dist.broadcast_object_list(shapes, src=0)
    module = whole if whole is not None else _skeleton(make_skeleton, shapes[0])
    fits = [None] * ranks.world_size()
    dist.all_gather_object(fits, module is not None)
    if all(fits):
        assert module is not None
        return module, True
    # Code of a model's own may make tensors that are no buffers, and count on their values.
    return (make() if whole is None else whole), False


def _shapes(module: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every parameter and buffer by name, shared ones under each of their names."""
    state = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


def _skeleton(make_skeleton: Callable[[], M], shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> M | None:
    """The module on the meta device; None where it cannot be built there, or is not what rank 0 has."""
    try:
        module = make_skeleton()
    except Exception:  # noqa: BLE001  A model's own code may do anything; rank 0 has shown that the model loads.
        return None
    if any(isinstance(value, Tensor) and value.is_meta for each in module.modules() for value in vars(each).values()):
        return None
    mine = _shapes(module)
    if {name: shape for name, (shape, _) in mine.items()} != {name: shape for name, (shape, _) in shapes.items()}:
        return None
    # Some models keep a few parameters in float32 when they are loaded.
    for name, parameter in module.named_parameters():
        parameter.data = parameter.data.to(shapes[name][1])
    for name, buffer in module.named_buffers():
        buffer.data = buffer.data.to(shapes[name][1])
    return module


@torch.no_grad()
def receive_parameters(root: nn.Module, part: nn.Module, device: torch.device) -> None:
    """Gives every rank the parameters of ``part``, a module inside ``root``, that rank 0 has; sharded ones are left alone.

    A parameter without memory is replaced wherever it stands in ``root``, so tied ones stay tied.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    for parameter in list(part.parameters()):
        if hasattr(parameter, "placements"):
            continue
        mine = None if parameter.is_meta else parameter.detach()
        data = from_rank_zero(mine, parameter.shape, parameter.dtype, device)
        if not parameter.is_meta:
            parameter.data = data
            continue
        real = nn.Parameter(data, requires_grad=parameter.requires_grad)
        for module, name in places[id(parameter)]:
            module._parameters[name] = real


@torch.no_grad()
def receive_buffers(root: nn.Module, device: torch.device) -> None:
    """Gives every rank all buffers of rank 0, also those that no checkpoint holds, such as rotary frequencies."""
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                mine = None if buffer.is_meta else buffer
                module._buffers[name] = from_rank_zero(mine, buffer.shape, buffer.dtype, device)


def from_rank_zero(tensor: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rank 0's ``tensor`` as ``dtype`` on ``device``, on every rank; with one rank just that."""
    if ranks.rank() == 0:
        assert tensor is not None
        data = tensor.to(device, dtype).contiguous()
    else:
        data = torch.empty(shape, dtype=dtype, device=device)
    if ranks.world_size() > 1:
        dist.broadcast(data, src=0)
    return data
