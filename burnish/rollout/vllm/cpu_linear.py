"""Linear layers of vLLM on a CPU: they compute with a packed copy of their weight, which must follow it and be proven to.

vLLM packs each weight when the model is loaded, throws the weight away, and never packs a tied head again. Here the weight
stays, each update packs it anew, and columns of what a layer computes are compared with the weight.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Columns of each weight that are looked at in one check: all of a small one. They cost what so many tokens cost.
_NUM_COLUMNS = 64


def keep_weights_readable() -> None:
    """From now on vLLM leaves the weight beside the packed copy; call it before a model is loaded."""
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or getattr(utils.dispatch_cpu_unquantized_gemm, "keeps_weight", False):
        return
    dispatch = utils.dispatch_cpu_unquantized_gemm

    def dispatch_and_keep(layer: nn.Module, remove_weight: bool) -> None:
        # Packed experts and the like are not two-dimensional and have an owner of their own.
        dispatch(layer, remove_weight=remove_weight and layer.weight.ndim != 2)

    dispatch_and_keep.keeps_weight = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch_and_keep


@torch.no_grad()
def pack_again(model: nn.Module) -> None:
    """Makes all layers of ``model`` compute with the weights that they hold now.

    In place, since a compiled model holds the packed copies themselves.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for _, layer in _layers(model):
        linear = layer.cpu_linear
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        if linear is not layer.cpu_linear and _move(_packed(layer.cpu_linear), _packed(linear)):
            layer.cpu_linear = linear


@torch.no_grad()
def stale_layer(model: nn.Module, version: int) -> str | None:
    """The first layer that computes with another weight than it holds, by the module's name; None: there is none.

    A product with a row of zeros and one 1 is a column of the weight, exactly. Of a large weight ``version`` chooses the columns.
    """
    for name, layer in _layers(model):
        weight = layer.weight
        num_columns = weight.shape[1]
        columns = torch.arange(num_columns)
        if num_columns > _NUM_COLUMNS:
            generator = torch.Generator().manual_seed(version)
            columns = torch.randperm(num_columns, generator=generator)[:_NUM_COLUMNS]
        rows = torch.zeros(len(columns), num_columns, dtype=weight.dtype)
        rows[torch.arange(len(columns)), columns] = 1
        if not torch.equal(layer.cpu_linear(rows, weight, None), weight[:, columns].T):
            return name
    return None


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, layer in model.named_modules():
        if hasattr(layer, "cpu_linear") and getattr(getattr(layer, "weight", None), "ndim", 0) == 2:
            yield name.replace(".base_layer", ""), layer


def _packed(linear: Any) -> dict[str, Any]:
    """What a layer's function keeps: the packed copy, as a tensor or behind the address that a tensor holds."""
    if not inspect.isfunction(linear):
        return {}
    return {
        name: getattr(value, "handler_tensor", value)
        for name, value in inspect.getclosurevars(linear).nonlocals.items()
    }


def _move(source: dict[str, Any], target: dict[str, Any]) -> bool:
    """Puts what ``source`` packed in the place of what ``target`` did; False: they are not alike."""
    if source.keys() != target.keys() or not source:
        return False
    for name, value in source.items():
        if isinstance(value, Tensor):
            # Exchanged, not copied: whoever frees the new address must free the old one.
            old = target[name].clone()
            target[name].copy_(value)
            value.copy_(old)
    return True
