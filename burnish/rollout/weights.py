"""Checks a stream of named weights against a module, and copies it in."""

import torch
from torch import Tensor, nn

from burnish.rollout.base import WeightStream
from burnish.utils.errors import RolloutError


@torch.no_grad()
def load_weights(module: nn.Module, stream: WeightStream, *, copy: bool) -> int:
    """Consumes ``stream`` and checks that it holds exactly the module's weights.

    Every parameter must come once; of a tied group one name is enough. Persistent buffers may come. Without
    ``copy`` the stream may also be empty: there is nothing to move.

    Args:
        copy: True copies the values into the module. False is for a module that shares its storage with the trained
            one: then they must be there already.

    Returns:
        The number of tensors in the stream.

    Raises:
        RolloutError: an unknown, repeated, missing or mis-shaped name (the first one), or, without ``copy``, values
            that are not the module's. With ``copy`` the module is then partly filled.
    """
    targets = module.state_dict(keep_vars=True)
    missing = {id(parameter): name for name, parameter in module.named_parameters()}
    seen: set[str] = set()
    for name, tensor in stream:
        target = targets.get(name)
        if target is None:
            raise RolloutError(f"The weight stream holds {name!r}, which the rollout's {_name(module)} does not have.")
        if name in seen:
            raise RolloutError(f"The weight stream holds {name!r} twice.")
        if target.shape != tensor.shape:
            raise RolloutError(
                f"The weight stream's {name!r} has shape {list(tensor.shape)}, the rollout's {list(target.shape)}."
            )
        if copy:
            target.copy_(tensor)
        elif not _same_values(target, tensor):
            raise RolloutError(
                f"The rollout is said to share the trained model's storage, but its {name!r} holds other values "
                f"than the weight stream: it would sample from an old policy."
            )
        seen.add(name)
        missing.pop(id(target), None)
    if missing and (copy or seen):
        first = next(iter(missing.values()))
        raise RolloutError(
            f"The weight stream ended without {first!r} and {len(missing) - 1} other weights of the rollout's "
            f"{_name(module)}."
        )
    return len(seen)


def _same_values(target: Tensor, tensor: Tensor) -> bool:
    """Whether both are one storage, or equal after rounding to the target's dtype."""
    if target.data_ptr() == tensor.data_ptr() and target.dtype == tensor.dtype:
        return True
    return torch.equal(target, tensor.to(target.device, target.dtype))


def _name(module: nn.Module) -> str:
    return type(module).__name__
