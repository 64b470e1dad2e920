"""Checks a stream of named weights against a module, copies it in, and tells what the module holds."""

import torch
from torch import Tensor, nn

from burnish.model.lora import hf_name, is_adapter_name
from burnish.rollout.base import WeightStream
from burnish.utils.errors import RolloutError
from burnish.utils.fingerprint import Fingerprints


@torch.no_grad()
def load_weights(module: nn.Module, stream: WeightStream, *, copy: bool, has_base: bool = False) -> int:
    """Consumes ``stream`` and checks that it holds exactly the module's weights.

    Every parameter must come once; of a tied group one name is enough. Persistent buffers may come. A module with adapters
    must get them after the base. Without ``copy`` the stream may also be empty: there is nothing to move.

    Args:
        copy: True copies the values into the module. False is for a module that shares its storage with the trained
            one: then they must be there already.
        has_base: the module has the frozen base of its adapters from an earlier stream, so the adapters alone will do.

    Returns:
        The number of tensors in the stream.

    Raises:
        RolloutError: an unknown, repeated, missing or mis-shaped name (the first one), adapters before their base, or,
            without ``copy``, values that are not the module's. With ``copy`` the module is then partly filled.
    """
    targets = {hf_name(name): target for name, target in module.state_dict(keep_vars=True).items()}
    missing = {id(parameter): hf_name(name) for name, parameter in module.named_parameters()}
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
        if is_adapter_name(name) and copy and not has_base and (first := _base_name(missing)) is not None:
            raise RolloutError(
                f"The weight stream brings the adapter {name!r} before {first!r} of its base, which this rollout does not "
                f"have yet: send the base first."
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
    needed = [name for name in missing.values() if not has_base or is_adapter_name(name)]
    if needed and (copy or seen):
        raise RolloutError(
            f"The weight stream ended without {needed[0]!r} and {len(needed) - 1} other weights of the rollout's "
            f"{_name(module)}."
        )
    return len(seen)


def weights_checksum(module: nn.Module) -> dict[str, int]:
    """Fingerprint of every parameter of ``module`` as it is now, by the names of a weight stream."""
    held = Fingerprints()
    for name, parameter in module.named_parameters():
        held.add(hf_name(name), parameter)
    return held.read()


def _base_name(missing: dict[int, str]) -> str | None:
    return next((name for name in missing.values() if not is_adapter_name(name)), None)


def _same_values(target: Tensor, tensor: Tensor) -> bool:
    """Whether both are one storage, or equal after rounding to the target's dtype."""
    if target.data_ptr() == tensor.data_ptr() and target.dtype == tensor.dtype:
        return True
    return torch.equal(target, tensor.to(target.device, target.dtype))


def _name(module: nn.Module) -> str:
    return type(module).__name__
