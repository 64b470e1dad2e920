"""Optimizers by name, from torch, torchao, bitsandbytes or the user's own module, and what is particular to each.

A library is imported only when its optimizer is in use. What the rest of the engine needs of it is small: its rate is set, it
takes a step over plain tensors, and its state is taken out and put back.
"""

import importlib
import inspect
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from burnish.config import FSDPOptimizerConfig
from burnish.config.names import IMPOSSIBLE_OPTIMIZERS, OPTIMIZERS
from burnish.config.values import near
from burnish.utils.errors import CheckpointError, ConfigError

# Their fused kernels exist for CPU and CUDA: one pass over a parameter, its gradient and its moments.
_FUSED = ("AdamW", "Adam", "SGD")
_OWN_KEYS = ("params", "lr", "betas", "weight_decay")
_QUANTIZED_MODULES = "torchao.optim."
# On a CPU torchao's compiled step is some ten times faster than the plain one, and takes some ten seconds for every shape to
# build: from this many weights on it pays.
_COMPILED_ELEMENTS = 1 << 24


def build_optimizer(parameters: Sequence[nn.Parameter], config: FSDPOptimizerConfig) -> Optimizer:
    """The optimizer that ``config`` names, over ``parameters``, with its arguments.

    Raises:
        ConfigError: there is no such optimizer, it is not installed, or it takes no such argument.
    """
    cls = _find(config)
    takes = inspect.signature(cls).parameters
    arguments: dict[str, Any] = {"lr": config.lr, "betas": tuple(config.betas), "weight_decay": config.weight_decay}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    arguments = {name: value for name, value in arguments.items() if name in takes or takes_any}
    if cls.__module__.startswith("torch.optim") and cls.__name__ in _FUSED:
        arguments["fused"] = True
    override = config.override_optimizer_config or {}
    unknown = [name for name in override if name not in takes and not takes_any]
    if unknown:
        others = [name for name in takes if name not in _OWN_KEYS]
        close = near(unknown[0], others)
        raise ConfigError(
            f"optim.override_optimizer_config.{unknown[0]}={override[unknown[0]]}: {cls.__name__} takes no such argument."
            f"{f' Did you mean {close[0]}?' if close else ''} It takes: {', '.join(others)}."
        )
    if override.get("foreach") or override.get("differentiable"):
        arguments.pop("fused", None)
    return cls(parameters, **(arguments | override))


def _find(config: FSDPOptimizerConfig) -> type[Optimizer]:
    module_name, _, name = config.optimizer.rpartition(":")
    module_name = module_name or config.optimizer_impl
    shown = (
        f"optim.optimizer_impl={module_name}" if ":" not in config.optimizer else f"optim.optimizer={config.optimizer}"
    )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        known = module_name in OPTIMIZERS
        close = near(module_name, OPTIMIZERS)
        hint = "Install it: `pip install 'burnish[optimizers]'`." if known else f"There is: {', '.join(OPTIMIZERS)}."
        guess = f" Did you mean {close[0]}?" if close and not known else ""
        raise ConfigError(f"{shown}: this module cannot be imported ({error}).{guess} {hint}") from error
    found = getattr(module, name, None)
    if module_name == "torch.optim" and name in IMPOSSIBLE_OPTIMIZERS:
        raise ConfigError(f"optim.optimizer={name} is refused: {IMPOSSIBLE_OPTIMIZERS[name]}.")
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        there = OPTIMIZERS.get(module_name) or sorted(
            other for other, cls in vars(module).items() if isinstance(cls, type) and issubclass(cls, Optimizer)
        )
        close = near(name, there)
        guess = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"optim.optimizer={config.optimizer}: {module_name} has no such optimizer.{guess} It has: "
            f"{', '.join(there) or 'none'}."
        )
    return found


def library_of(optimizer: Optimizer) -> str:
    """The package that an optimizer comes from: "torch", "torchao", "bitsandbytes" or the user's."""
    return type(optimizer).__module__.partition(".")[0]


def set_rate(optimizer: Optimizer, lr: float) -> None:
    """Sets the learning rate of the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            # torchao's compiled step has the tensor as its input.
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def take_step(optimizer: Optimizer) -> None:
    """One step with the gradients that the parameters hold."""
    with _how_to_step(optimizer):
        optimizer.step()


def _how_to_step(optimizer: Optimizer) -> AbstractContextManager[Any]:
    if library_of(optimizer) != "torchao":
        return nullcontext()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
    if on_cpu and (sum(parameter.numel() for parameter in parameters) < _COMPILED_ELEMENTS or not _has_cpp_compiler()):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


@cache
def _has_cpp_compiler() -> bool:
    return any(shutil.which(name) for name in ("c++", "g++", "clang++"))


def is_elementwise(entry: dict[str, Any], parameter: Tensor) -> bool:
    """Whether a parameter's state is made of floating-point tensors of its shape, and numbers: what can be sharded anew."""
    tensors = [value for value in entry.values() if isinstance(value, Tensor) and value.ndim > 0]
    return bool(entry) and all(
        type(tensor) is Tensor and tensor.shape == parameter.shape and tensor.is_floating_point() for tensor in tensors
    )


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """The plain tensors that a state is made of: itself, or the codes, scales and tables of a quantised one."""
    if not isinstance(value, Tensor):
        return
    if type(value) is not Tensor and hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        for name in names:
            yield from plain_tensors(getattr(value, name))
    else:
        yield value


def take_out(entry: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state as plain tensors on the CPU, numbers and names, which `torch.load(weights_only=True)` reads."""
    return {key: _plain(key, value) for key, value in entry.items()}


def _plain(key: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if type(value) is Tensor:
        return value.detach().to("cpu", copy=True)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if not kind.startswith(_QUANTIZED_MODULES):
        raise CheckpointError(
            f"The optimizer's state {key!r} is a {kind}, which burnish cannot save. Take 'optimizer' out of "
            "checkpoint.save_contents."
        )
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: _plain(key, getattr(value, name)) for name in names}
    return {"kind": kind, "parts": parts, "context": [list(x) if isinstance(x, tuple) else x for x in context]}


def put_back(optimizer: Optimizer, parameter: nn.Parameter, state: dict[str, Any]) -> None:
    """Makes what `take_out` gave the state of ``parameter``."""
    if not state:
        optimizer.state.pop(parameter, None)
        return
    entry = {
        key: on_its_device(optimizer, parameter, value)
        if isinstance(value, Tensor) and value.ndim == 0
        else _restored(value, parameter.device)
        for key, value in state.items()
    }
    if library_of(optimizer) == "bitsandbytes":
        # Its own buffers may be paged: the values go into them.
        (group,) = optimizer.param_groups
        (index,) = (index for index, other in enumerate(group["params"]) if other is parameter)
        optimizer.state.pop(parameter, None)
        optimizer.init_state(group, parameter, 0, index)  # type: ignore[attr-defined]
        for key, buffer in optimizer.state[parameter].items():
            # What other ranks held in too small parts to be quantised stays as it is.
            if isinstance(buffer, Tensor) and key in entry and entry[key].dtype == buffer.dtype:
                entry[key] = buffer.copy_(entry[key])
    optimizer.state[parameter] = entry


def _restored(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if not isinstance(value, dict) or "kind" not in value:
        return value
    module, _, name = value["kind"].rpartition(".")
    if not module.startswith(_QUANTIZED_MODULES):
        raise CheckpointError(f"The optimizer state holds a {value['kind']}, which burnish does not read.")
    cls = getattr(importlib.import_module(module), name)
    parts = {key: _restored(part, device) for key, part in value["parts"].items()}
    context = [tuple(x) if isinstance(x, list) else x for x in value["context"]]
    return cls.__tensor_unflatten__(parts, context)


def on_its_device(optimizer: Optimizer, parameter: nn.Parameter, number: Tensor) -> Tensor:
    """A count of steps where the optimizer keeps it: beside the parameter for fused updates, else on the CPU."""
    group = optimizer.param_groups[0]
    beside = group.get("fused") or group.get("capturable")
    return number.to(parameter.device if beside else "cpu", copy=True)
