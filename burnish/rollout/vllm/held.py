"""What a vLLM model holds, by Hugging Face names: reads back what the engine's own loader wrote, packed and split as it is.

vLLM joins some weights (q, k and v; gate and up) in one parameter and splits parameters over tensor-parallel ranks. Its loader is
told neither by this file nor does it tell it: the two know the layout independently, so that equal fingerprints prove something.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from burnish.utils.errors import RolloutError
from burnish.utils.fingerprint import Fingerprints

Gather = Callable[[Tensor], list[Tensor]]
"""A tensor of this rank -> those of all tensor-parallel ranks, which have the same shape."""

# What is joined where a model does not say so itself.
_PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_WRAPPED = ".base_layer"


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a parameter, and how the ranks' ones make a whole."""

    module: nn.Module
    attribute: str
    rows: slice
    """Of this rank's parameter."""
    shape: tuple[int, ...]
    """Of the whole."""
    axis: int | None
    """The one that is split over the ranks; None: every rank has the whole."""
    replicas: int = 1
    """So many neighbouring ranks have the same (key and value heads, of which there are fewer than ranks)."""

    def local(self) -> Tensor:
        """What this rank has, a view."""
        tensor: Tensor = getattr(self.module, self.attribute).detach()
        return tensor[self.rows] if tensor.ndim else tensor

    def read(self, gather: Gather, rank: int) -> Tensor:
        """The whole, a view where one rank has it; all ranks call it."""
        if self.axis is None:
            return self.local()
        return join(gather(self.local()), self.axis, self.replicas, rank)[: self.shape[0]]


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """One weight of a Hugging Face model inside a vLLM model."""

    parameter: str
    """The vLLM parameter that it is in, as ``named_parameters`` says without adapters."""
    parts: tuple[Part, ...]
    """One after the other along the first axis; more than one where Hugging Face joins what vLLM splits by part."""
    heads: int | None = None
    """Of a joined q, k, v that Hugging Face orders by head, and vLLM by q, k, v (GPT-NeoX)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        first = self.parts[0].shape
        return (sum(part.shape[0] for part in self.parts), *first[1:]) if first else ()

    def read(self, gather: Gather, rank: int) -> Tensor:
        """The whole as Hugging Face has it; all ranks call it."""
        parts = [part.read(gather, rank) for part in self.parts]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.heads is None:
            return whole
        by_kind = whole.view(len(parts), self.heads, -1, *whole.shape[1:])
        return by_kind.transpose(0, 1).reshape(whole.shape)


def join(shards: Sequence[Tensor], axis: int, replicas: int, rank: int) -> Tensor:
    """One whole of the ranks' shards. Of replicas each rank takes those that lie beside its own, so all are looked at."""
    return torch.cat(list(shards[rank % replicas :: replicas]), dim=axis)


class HeldWeights:
    """All weights of a vLLM model, by Hugging Face name.

    Raises:
        RolloutError: the model is quantised or has layers whose form is not known here.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, gather: Gather, rank: int, num_ranks: int) -> None:
        self._dtype, self._gather, self._rank = dtype, gather, rank
        self.weights: dict[str, HeldWeight] = {}
        self.aliases: dict[str, str] = {}
        """Of a tied weight the other name -> the one in ``weights``."""
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        # Newer versions also tell it what is joined, which is left to the loader.
        self._mapper = getattr(mapper, "get_rename_mapper", lambda: mapper)()
        names: dict[int, list[str]] = {}
        packed = {**_PACKED, **getattr(model, "packed_modules_mapping", {})}
        for path, module in model.named_modules(remove_duplicate=False):
            path = path.replace(_WRAPPED, "")
            if path.endswith("kv_b_proj"):
                raise RolloutError(
                    f"vLLM computes tensors from {path!r} (latent attention) when it loads a model, and no update would renew "
                    f"them. Use rollout.name=hf for this model."
                )
            for attribute, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) in names:
                    self._add_alias(names[id(parameter)], _names(path, attribute, packed))
                    continue
                held = _held(path, attribute, module, packed, num_ranks)
                names[id(parameter)] = list(held)
                self.weights |= held

    def _add_alias(self, known: list[str], names: list[str]) -> None:
        self.aliases |= {name: first for name, first in zip(names, known, strict=False) if name != first}

    def canonical(self, name: str) -> str:
        """Its key in ``weights``, if it has one: of a tied pair the first name, and vLLM's where that is not Hugging Face's."""
        name = self._mapped(name)
        return self.aliases.get(name, name)

    def is_alias(self, name: str) -> bool:
        """Whether it is the second name of a tied pair."""
        return self._mapped(name) in self.aliases

    def _mapped(self, name: str) -> str:
        if name in self.weights or name in self.aliases or self._mapper is None:
            return name
        return self._mapper._map_name(name) or name

    def find(self, name: str) -> HeldWeight | None:
        """The weight of this name; None: there is none."""
        return self.weights.get(self.canonical(name))

    def read(self, name: str) -> Tensor:
        """The whole weight, in the dtype of the model; all ranks call it.

        Raises:
            KeyError: there is none of this name.
        """
        tensor = self.weights[self.canonical(name)].read(self._gather, self._rank)
        # Some are kept wider than they came (biases on a CPU); rounding them back loses nothing.
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def whole(self, local: Tensor, axis: int | None, replicas: int) -> Tensor:
        """Of a tensor that is split over the ranks as a weight is, see `Part`; all ranks call it."""
        return local if axis is None else join(self._gather(local), axis, replicas, self._rank)

    def fingerprints(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Of every weight, or of these: what this rank samples with, whole; all ranks call it, with the same names."""
        held = Fingerprints()
        for name in self.weights if names is None else names:
            held.add(name, self.read(name))
        return held.read()


def gather_by(group: Any, num_ranks: int) -> Gather:
    """Gathers over a torch process group of ``num_ranks``."""

    def gather(tensor: Tensor) -> list[Tensor]:
        if num_ranks == 1:
            return [tensor]
        tensors = list(tensor.new_empty((num_ranks, *tensor.shape)).unbind())
        dist.all_gather(tensors, tensor.contiguous(), group=group)
        return tensors

    return gather


def _names(path: str, attribute: str, packed: Mapping[str, Sequence[str]]) -> list[str]:
    """What Hugging Face calls a module's parameter: one name, or those of what is joined in it."""
    parent, _, own = path.rpartition(".")
    return [".".join(filter(None, (parent, name, attribute))) for name in packed.get(own, (own,))]


def _held(
    path: str, attribute: str, module: Any, packed: Mapping[str, Sequence[str]], num_ranks: int
) -> dict[str, HeldWeight]:
    names, parts = _names(path, attribute, packed), list(_parts(path, attribute, module, num_ranks))
    parameter = f"{path}.{attribute}" if path else attribute
    if len(names) == len(parts):
        return {name: HeldWeight(parameter, (part,)) for name, part in zip(names, parts, strict=True)}
    if len(names) > 1:
        raise RolloutError(
            f"vLLM's {parameter!r} joins {len(parts)} weights, but {type(module).__name__} is said to join {', '.join(names)}: "
            f"burnish cannot read this model back. Use rollout.name=native or hf for it."
        )
    by_head = path.endswith(".query_key_value") and parts[0].shape[0] == parts[1].shape[0]
    heads = int(module.total_num_heads) if by_head else None
    return {names[0]: HeldWeight(parameter, tuple(parts), heads)}


def _parts(path: str, attribute: str, module: Any, num_ranks: int) -> Iterator[Part]:
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        ReplicatedLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    tensor: Tensor = getattr(module, attribute)
    _check_plain(path, module, tensor)
    # The whole layer is on every rank where it was told so, whatever the number of ranks.
    split = int(getattr(module, "tp_size", num_ranks))

    def part(rows: int, start: int, axis: int | None, whole: int | None = None, replicas: int = 1) -> Part:
        shape = list(tensor.shape)
        if shape:
            shape[0] = rows
        if axis is not None and split > 1:
            shape[axis] = shape[axis] * split // replicas
        if whole is not None:
            shape[0] = whole
        # Padding is cut off also where there is one rank.
        end = start + (min(rows, whole) if whole is not None and split == 1 else rows)
        return Part(module, attribute, slice(start, end), tuple(shape), axis if split > 1 else None, replicas)

    if isinstance(module, QKVParallelLinear):
        q, k, v = (heads * module.head_size for heads in (module.num_heads, module.num_kv_heads, module.num_kv_heads))
        start, kv_replicas = 0, module.num_kv_head_replicas
        for rows, replicas in ((q, 1), (k, kv_replicas), (v, kv_replicas)):
            yield part(rows, start, 0, replicas=replicas)
            start += rows
    elif isinstance(module, MergedColumnParallelLinear):
        start = 0
        for size in module.output_sizes:
            yield part(size // split, start, 0)
            start += size // split
    elif isinstance(module, VocabParallelEmbedding):
        yield part(len(tensor), 0, 0, whole=module.org_vocab_size)
    elif isinstance(module, ColumnParallelLinear):
        yield part(len(tensor), 0, 0)
    elif isinstance(module, RowParallelLinear) and attribute == "weight":
        yield part(len(tensor), 0, 1)
    elif isinstance(module, ReplicatedLinear) and len(getattr(module, "output_sizes", ())) > 1:
        start = 0
        for size in module.output_sizes:
            yield part(size, start, None)
            start += size
    else:
        yield part(len(tensor) if tensor.ndim else 0, 0, None)


def _check_plain(path: str, module: Any, tensor: Tensor) -> None:
    method = type(getattr(module, "quant_method", None)).__name__
    plain = ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
    num_added = getattr(module, "num_added_embeddings", 0)
    if method not in plain or num_added:
        raise RolloutError(
            f"vLLM holds {path!r} in the form of {method}, which burnish cannot update and read back. A policy is sampled "
            f"from as it is trained: leave quantization out of rollout.engine_kwargs.vllm; for a model with experts use "
            f"rollout.name=hf."
        )
    if math.prod(tensor.shape) == 0:
        raise RolloutError(f"vLLM has packed {path!r} away, so it cannot be read back.")
