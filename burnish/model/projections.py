"""Projections of one input that lie behind each other in memory, so that one matrix product computes them together.

The query, key and value projections of a layer read the same states, and so do the gate and the up projection of its MLP.
In a packed model the weights of such a group are consecutive rows of one tensor: the Hugging Face parameters are views of
it, so training, checkpoints and weight streams see what they saw before, and a rollout reads the whole as one weight.

Whoever moves or casts a parameter on its own (``.to``, ``deepcopy``, `burnish.model.policy.set_dtype`) takes it out of its
group; `pack_projections` puts it back.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from burnish.model.dense import FAMILIES
from burnish.model.lora import base_layer, is_plain_adapter, low_rank

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")

_GROUPS: dict[type[nn.Module], tuple[str, ...]] = {
    **dict.fromkeys((family.attention for family in FAMILIES), QKV),
    **dict.fromkeys((family.mlp for family in FAMILIES), GATE_UP),
}


@torch.no_grad()
def pack_projections(model: nn.Module) -> None:
    """Moves the weights, and the biases, of each group behind each other: ``parameter.data`` becomes a view.

    Values, names and parameters stay; addresses change, so whoever keeps ``parameter.data`` packs before. Families
    that are not known, and groups that are packed already or cannot be, stay as they are. Beside the model one group at a
    time is held twice.
    """
    moved = False
    for parameters in _groups(model):
        if not _can_share(parameters) or packed_weight(parameters) is not None:
            continue
        joint = torch.cat([parameter.data for parameter in parameters])
        for parameter, rows in zip(parameters, joint.split([len(p) for p in parameters]), strict=True):
            parameter.data = rows
        moved = True
        del joint, rows
    if moved and next(model.parameters()).is_cuda:
        # What the groups left behind are blocks that are too small for the next group, so torch would keep them all.
        torch.cuda.empty_cache()


def packed_weight(weights: Sequence[Tensor]) -> Tensor | None:
    """The tensor whose consecutive rows ``weights`` are, without a copy; None where they are not that.

    Args:
        weights: [rows_i, ...] each, in the order in which they should lie.

    Returns:
        [sum of rows_i, ...], detached.
    """
    first = weights[0]
    rows, end = 0, first.data_ptr()
    storage = first.untyped_storage().data_ptr()
    for weight in weights:
        # Two storages may touch by chance, and only the storage keeps the memory alive.
        if (
            weight.data_ptr() != end
            or weight.untyped_storage().data_ptr() != storage
            or weight.dtype != first.dtype
            or weight.shape[1:] != first.shape[1:]
            or not weight.is_contiguous()
        ):
            return None
        rows += weight.shape[0]
        end += weight.nbytes
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def joint(parts: Sequence[Tensor | None]) -> Any:
    """Weights or biases behind each other: the memory in which they lie so, else a copy; None where there are none."""
    present = [part for part in parts if part is not None]
    if not present:
        return None
    whole = packed_weight(present)
    return torch.cat(present) if whole is None else whole


def _groups(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The parameters of each group: its weights, and its biases if it has them."""
    for module in model.modules():
        names = _GROUPS.get(type(module))
        if names is None:
            continue
        found = [getattr(module, name) for name in names]
        projections = [base_layer(projection) for projection in found]
        if any(type(projection) is not nn.Linear for projection in projections):
            continue
        if all(is_plain_adapter(projection) for projection in found):
            # The adapters' first products have one input as well.
            yield [cast(nn.Parameter, low_rank(projection)[0]) for projection in found]
        yield [projection.weight for projection in projections]
        if all(projection.bias is not None for projection in projections):
            yield [cast(nn.Parameter, projection.bias) for projection in projections]


def _can_share(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether one tensor can hold them all: different parameters of one dtype on one device, none of them sharded."""
    kinds = {(parameter.dtype, parameter.device, parameter.shape[1:]) for parameter in parameters}
    distinct = len({id(parameter) for parameter in parameters}) == len(parameters)
    sharded = any(isinstance(parameter, DTensor) or parameter.is_meta for parameter in parameters)
    return len(kinds) == 1 and distinct and not sharded
