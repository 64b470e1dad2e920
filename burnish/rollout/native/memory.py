"""How much memory the key-value cache may take, and what to say when that is too little."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.model.attention import PackedContext
from burnish.model.policy import backbone_of
from burnish.rollout.native.paged_cache import LayerShape, PagedCache
from burnish.utils import env, heap
from burnish.utils.errors import ModelError, RolloutError

_KEY = "rollout.gpu_memory_utilization"
_GIB = 2**30


class _ShapeProbe:
    """Attends as usual and notes what each layer would store.

    It has no ``attend_tokens``, so that fused layers, which do not say which layer they are, leave it to transformers' own.
    """

    def __init__(self, device: torch.device) -> None:
        self._context = None if device.type == "meta" else PackedContext([1], device)
        self.shapes: dict[int, LayerShape] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **how: object) -> Tensor:
        self.shapes[int(module.layer_idx)] = LayerShape(key.shape[1], key.shape[3], value.shape[3])  # type: ignore[arg-type]
        if self._context is None:
            return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        return self._context.attend(module, query, key, value, **how)  # type: ignore[arg-type]


@torch.no_grad()
def layer_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """What every layer stores of a token, seen in a call of the model on one token; it may be on the meta device.

    Raises:
        ModelError: a layer does not attend through burnish's attention function.
    """
    probe, name = _ShapeProbe(model.device), type(model).__name__
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    advice = "Generate with rollout.name=vllm or rollout.name=hf, or load the model with burnish.model.load."
    try:
        backbone_of(model)(input_ids=token, position_ids=token, use_cache=False, attention_context=probe)
    except TypeError as error:
        raise ModelError(f"{name} cannot be decoded by the native engine: {error}. {advice}") from error
    count = model.config.get_text_config().num_hidden_layers
    missing = sorted(set(range(count)) - set(probe.shapes))
    if missing:
        raise ModelError(
            f"{name} cannot be decoded by the native engine: layers {missing} of {count} do not call burnish's attention "
            f"function. {advice}"
        )
    return [probe.shapes[layer] for layer in range(count)]


def wanted_blocks(longest: int, block_size: int, num_running: int) -> int:
    """Blocks for ``num_running`` sequences of ``longest`` tokens: beside theirs the scratch block, a prefix that waits for rows
    while its first samples run, and room to move sequences."""
    each = -(-longest // block_size)
    return num_running * each + 1 + 2 * each


@dataclass(frozen=True)
class MemoryBudget:
    """The share of a device that weights and cache may take together."""

    device: torch.device
    fraction: float
    weight_bytes: int

    @classmethod
    def of(cls, model: nn.Module, device: torch.device, fraction: float, copy_bytes: int = 0) -> "MemoryBudget":
        """The budget beside this model's weights, and ``copy_bytes`` of copies of them."""
        parameters = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
        return cls(device, fraction, sum(parameters.values()) + copy_bytes)

    @property
    def total_bytes(self) -> int:
        """Memory of the device; of a CPU what this process's container or job may have."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[1]
        return env.total_memory()

    def cache_bytes(self, held: int) -> int:
        """Bytes that the cache may take; ``held`` are those that it has already.

        On a GPU never more than 95 % of what is free now. On a CPU only of the machine's size, so that two runs on one
        machine decide alike.
        """
        share = int(self.fraction * self.total_bytes) - self.weight_bytes
        if self.device.type != "cuda":
            return share
        # What PyTorch holds without using it is free to us.
        free = torch.cuda.mem_get_info(self.device)[0] + held
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return min(share, int(0.95 * free))

    def holds_copy(self, copy_bytes: int, cache_bytes: int) -> bool:
        """Whether a second copy of the weights for a computer's CPU is worth its memory beside the cache.

        It takes a quarter of what the cache could have at most, and no more than half of what the computer has left, since
        training keeps gradients and an optimizer's state in the same memory.

        Args:
            cache_bytes: what the cache needs at least.
        """
        available = env.available_memory()
        if available is not None:
            available += heap.kept_bytes()
        room = self.cache_bytes(0)
        return copy_bytes <= min(room // 4, room - cache_bytes) and (available is None or copy_bytes <= available // 2)

    def check_holds(self, cache: PagedCache, num_tokens: int, num_blocks: int) -> None:
        """A sequence of ``num_tokens`` must fit into ``num_blocks``, the scratch block among them.

        Raises:
            RolloutError: it does not; the message says by which keys it would.
        """
        block_bytes = cache.block_size * cache.bytes_per_token
        need, budget = (1 + -(-num_tokens // cache.block_size)) * block_bytes, num_blocks * block_bytes
        if need <= budget:
            return
        fraction = (self.weight_bytes + need) / self.total_bytes
        ways = (
            f"Set {_KEY} to at least {min(1.0, fraction + 0.005):.2f}, or shorten prompt_length or response_length."
            if fraction < 0.95
            else "Shorten prompt_length or response_length: this device does not hold it beside the weights."
        )
        raise RolloutError(
            f"One sequence of {num_tokens} tokens needs {need / 2**20:,.0f} MiB of key-value cache, but {_KEY}="
            f"{self.fraction:g} of the device's {self.total_bytes / _GIB:.1f} GiB leaves {max(0, budget) / 2**20:,.0f} MiB "
            f"beside the weights ({self.weight_bytes / _GIB:.1f} GiB) and what others hold. {ways}"
        )

    def allocate(self, cache: PagedCache, num_blocks: int) -> None:
        """Makes the cache's blocks.

        Raises:
            RolloutError: the device has less than it said; the message says by how much and which keys to change.
        """
        need = num_blocks * cache.block_size * cache.bytes_per_token
        try:
            cache.allocate(num_blocks)
        except (torch.OutOfMemoryError, MemoryError) as error:
            cache.free()
            free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0
            lower = max(0.05, self.fraction - (need - 0.9 * free) / self.total_bytes)
            raise RolloutError(
                f"The key-value cache of {need / _GIB:.1f} GiB could not be allocated: {free / _GIB:.1f} GiB are free. Set "
                f"{_KEY} to at most {lower:.2f} (it is {self.fraction:g}), or lower rollout.max_num_seqs or response_length."
            ) from error
