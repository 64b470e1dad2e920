"""Adapters (LoRA) of a policy inside vLLM: those of each version take the place of the last ones, beside an unchanged base.

vLLM would read them from files. Here they come as tensors of the weight stream and are registered under the one number that every
request names, so that no file is ever looked for. vLLM keeps B multiplied by alpha / rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from burnish.rollout.vllm.held import HeldWeight, HeldWeights, Part
from burnish.utils.errors import RolloutError
from burnish.utils.fingerprint import Fingerprints

ADAPTER_ID = 1
"""vLLM's number of the policy's adapters."""
_NAME = "policy"
_PARTS = (".lora_A.weight", ".lora_B.weight")


def lora_request() -> Any:
    """What a request to vLLM carries to be sampled from the policy with its adapters; without it, from the base."""
    from vllm.lora.request import LoRARequest

    # The path is never opened: the worker has the adapters already.
    return LoRARequest(_NAME, ADAPTER_ID, f"burnish://{_NAME}")


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, the layers of ``model`` that vLLM wrapped for adapters are in their old places: its loader knows them by these."""
    from vllm.lora.layers import BaseLayerWithLoRA

    wrapped = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA) and hasattr(child, "base_layer")
    ]
    try:
        for parent, name, child in wrapped:
            parent._modules[name] = child.base_layer
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child


class Adapters:
    """The policy's adapters on one tensor-parallel rank.

    Args:
        model_runner: of a vLLM worker.
        held: what its model holds.
        config: as in peft's ``adapter_config.json``: ``lora_alpha``, ``use_rslora``.

    Raises:
        RolloutError: vLLM was started without room for adapters, or splits them in a way that cannot be read back.
    """

    def __init__(self, model_runner: Any, held: HeldWeights, dtype: torch.dtype, config: Mapping[str, Any]) -> None:
        if not hasattr(model_runner, "lora_manager"):
            raise RolloutError("The policy has adapters, but vLLM was started without enable_lora.")
        lora_config = model_runner.lora_config
        if lora_config.fully_sharded_loras:
            raise RolloutError(
                "vLLM was started with fully_sharded_loras, which burnish cannot read back: leave it out of "
                "rollout.engine_kwargs.vllm."
            )
        if config.get("rank_pattern") or config.get("alpha_pattern"):
            raise RolloutError("Adapters whose rank or alpha differs by layer cannot be put into vLLM by burnish.")
        self._manager = model_runner.lora_manager._adapter_manager
        self._held, self._config, self._max_rank = held, config, int(lora_config.max_lora_rank)
        lora_dtype = lora_config.lora_dtype
        self._dtype: torch.dtype = lora_dtype if isinstance(lora_dtype, torch.dtype) else dtype
        self._places = self._all_places()
        self._sent: dict[str, Tensor] = {}

    def check(self, name: str, tensor: Tensor) -> None:
        """Whether there is a place for it.

        Raises:
            RolloutError: there is none, or another shape than it has.
        """
        layer, is_a = self._layer(name)
        held = self._places.get(layer)
        if held is None:
            raise RolloutError(
                f"The weight stream brings the adapter {name!r}, but vLLM has no place for one there: it would be left out."
            )
        rows, columns = held[1].shape
        rank = tensor.shape[0] if is_a else tensor.shape[1]
        expected = (rank, columns) if is_a else (rows, rank)
        if tuple(tensor.shape) != expected or rank > self._max_rank:
            raise RolloutError(
                f"The weight stream's {name!r} has shape {list(tensor.shape)}, but vLLM's layer maps {columns} to {rows} "
                f"and takes adapters of rank {self._max_rank} at most."
            )

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts these in the place of those of the last version.

        Args:
            tensors: ``...q_proj.lora_A.weight`` [rank, in] and ``...lora_B.weight`` [out, rank], on any device.

        Raises:
            RolloutError: there are none, one of a pair is missing, or one that the last version had.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        if not tensors:
            raise RolloutError(
                "The policy has adapters, but the weight stream held none: the rollout would never learn."
            )
        stems = dict.fromkeys(_split(name)[0] for name in tensors)
        needed = [stem + part for stem in stems for part in _PARTS] + list(self._sent)
        if missing := [name for name in needed if name not in tensors]:
            raise RolloutError(f"The weight stream ended without the adapter {missing[0]!r}.")
        sent = {name: tensor.detach().to(self._manager.device, self._dtype) for name, tensor in tensors.items()}
        loras = {}
        for stem in stems:
            a, b = (sent[stem + part] for part in _PARTS)
            layer, rank = self._layer(stem + _PARTS[0])[0], a.shape[0]
            # vLLM multiplies its B in place.
            loras[layer] = LoRALayerWeights(layer, rank, self._alpha, a, b.clone(), self._scaling(rank))
        self._manager.remove_adapter(ADAPTER_ID)
        self._manager.add_adapter(LoRAModel(ADAPTER_ID, max(lora.rank for lora in loras.values()), loras))
        self._manager.activate_adapter(ADAPTER_ID)
        self._sent = sent

    def fingerprints(self) -> dict[str, int]:
        """Of every adapter, as it was sent where what is sampled with is that, by the names of the stream; all ranks call it."""
        found = Fingerprints()
        for name, sent in self._sent.items():
            layer, is_a = self._layer(name)
            tensor = self._read(layer, is_a, rank=sent.shape[0 if is_a else 1])
            expected = sent if is_a else sent.clone().mul_(self._scaling(sent.shape[1]))
            found.add(name, sent if torch.equal(tensor, expected) else tensor)
        return found.read()

    def _layer(self, name: str) -> tuple[str, bool]:
        """The layer as vLLM calls it, and whether the adapter is its A."""
        stem, is_a = _split(name)
        return self._held.canonical(f"{stem}.weight").removesuffix(".weight"), is_a

    @property
    def _alpha(self) -> float:
        return float(self._config["lora_alpha"])

    def _scaling(self, rank: int) -> float:
        return self._alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _all_places(self) -> dict[str, tuple[Any, HeldWeight, int]]:
        """A layer's name -> vLLM's layer with room for adapters, the weight beside it, which of its slices."""
        places = {}
        for path, module in self._manager.modules.items():
            names = self._manager.packed_modules.get(path, [path])
            for index, layer in enumerate(names):
                held = self._held.weights.get(f"{layer}.weight")
                if held is not None and len(held.parts) == 1 and len(names) == len(module.lora_a_stacked):
                    places[layer] = (module, held, index)
        return places

    def _read(self, layer: str, is_a: bool, rank: int) -> Tensor:
        """The whole A [rank, in] or B [out, rank] that vLLM samples with."""
        module, held, index = self._places[layer]
        part: Part = held.parts[0]
        slot = self._manager.lora_index_to_id.index(ADAPTER_ID)
        stacked = (module.lora_a_stacked if is_a else module.lora_b_stacked)[index][slot, 0]
        # A reads what the layer reads, B writes what it writes: each is split where the weight's own axis is.
        axis = part.axis if part.axis == (1 if is_a else 0) else None
        local = getattr(part.module, part.attribute)[part.rows].shape
        local_shape = (rank, local[1]) if is_a else (local[0], rank)
        return self._held.whole(stacked[: local_shape[0], : local_shape[1]], axis, part.replicas)


def _split(name: str) -> tuple[str, bool]:
    """The layer's name, and whether it is its A."""
    for part in _PARTS:
        if name.endswith(part):
            return name.removesuffix(part), part == _PARTS[0]
    raise RolloutError(f"The weight stream holds {name!r}, which is no adapter of a linear layer.")
