"""Floating-point operations of a model's tokens, and what the device could do: model FLOPs utilisation (MFU).

Multiplications and additions count one each, of matrix products only: norms, activations and softmax are bound by memory and
are a fraction of a per cent. What is computed twice (activations in the backward, scores inside an attention kernel, logits of
a fused head) counts once: it is how the work is done and no work.
"""

import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from burnish.utils.device_table import find_device

# The side of the square matrices whose product measures a device: long enough to reach its pace, short enough not to be felt.
_MEASURED_SIDE = {"cpu": 1024, "cuda": 8192}
# A CPU that does not multiply in bf16 takes seconds for those: a product that takes longer than this is long enough.
_SMALL_SIDE, _LONG_ENOUGH = 256, 0.01
# The keys under which families say how many experts a token goes through.
_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
# Layers that read a block's own input.
_INPUT_PROJECTIONS = {
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "query_key_value",
    "c_attn",
    "q_a_proj",
    "kv_a_proj_with_mqa",
}


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second that ``device`` can do in ``dtype``: its data sheet's, or else `measured_peak_flops`."""
    if device.type == "cuda" and dtype is torch.bfloat16:
        known = find_device(torch.cuda.get_device_name(device))
        if known is not None:
            return known.bf16_flops
    return measured_peak_flops(device, dtype, torch.get_num_threads() if device.type == "cpu" else 0)


@cache
def measured_peak_flops(device: torch.device, dtype: torch.dtype, num_threads: int = 0) -> float:
    """Operations per second of one large square matrix product, the best of five; some tens of milliseconds, once a process.

    Args:
        num_threads: of a CPU; a ceiling holds for as many threads as it was measured with.
    """
    side = _SMALL_SIDE
    seconds = _seconds_of_product(side, device, dtype)
    if seconds < _LONG_ENOUGH:
        side = _MEASURED_SIDE.get(device.type, 1024)
        seconds = _seconds_of_product(side, device, dtype)
    return 2.0 * side**3 / seconds


def _seconds_of_product(side: int, device: torch.device, dtype: torch.dtype) -> float:
    a = torch.ones(side, side, device=device, dtype=dtype)
    out = torch.empty_like(a)
    best = float("inf")
    # The first is the warm-up.
    for attempt in range(6):
        _wait_for(device)
        start = time.perf_counter()
        torch.mm(a, a, out=out)
        _wait_for(device)
        if attempt:
            best = min(best, time.perf_counter() - start)
    return best


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class FlopsCounter:
    """Counts the operations of a causal LM, or of a backbone with a value head, from its modules.

    A weight of N entries costs 2 N operations for a token in the forward. In the backward it costs 2 N for the gradient of
    its input, and 2 N more for its own if it is trained; so 6 N in all, 4 N where it is frozen between trained layers. A
    mixture's experts count with the share that a token goes through. Attention costs 2 (d_k + d_v) for every head and
    visible pair, and twice that in the backward.

    Args:
        model: in any layout, with ``requires_grad`` as it is trained.
        value_head: the layer behind a backbone that has no language-model head.
    """

    def __init__(self, model: PreTrainedModel, value_head: nn.Module | None = None) -> None:
        head = model.get_output_embeddings() if value_head is None else value_head
        head_weight = getattr(head, "weight", None)
        config = model.config.get_text_config()
        embedding = model.get_input_embeddings()
        reads_frozen = embedding is None or not embedding.weight.requires_grad
        self._first_block = _first_block(model)
        weights = list(_matrices(model, config, skip=head_weight))
        self._forward = 2.0 * sum(size for _, size, _ in weights)
        self._backward = 0.0
        trains = any(is_trained for _, _, is_trained in weights) or not reads_frozen
        for name, size, is_trained in weights:
            # Nothing upstream of these is trained, so nobody asks for the gradient of their input.
            ends_there = reads_frozen and self._reads_the_first_input(name)
            self._backward += 2.0 * size * (is_trained + (trains and not ends_there))
        head_size, head_is_trained = (
            (0, False) if head_weight is None else (head_weight.numel(), head_weight.requires_grad)
        )
        self._head_forward = 2.0 * head_size
        self._head_backward = 2.0 * head_size * (trains + head_is_trained)
        self._attention = list(_attention_layers(model, config))

    def _reads_the_first_input(self, name: str) -> bool:
        parts = set(name.removeprefix(self._first_block).split(".")) if name.startswith(self._first_block) else set()
        # B of an adapter reads what the trained A gives.
        return bool(parts & _INPUT_PROJECTIONS) and "lora_B" not in parts

    def flops(self, num_tokens: float, num_pairs: float, num_labels: float, *, backward: bool = False) -> float:
        """Operations of one call of the model.

        Args:
            num_tokens: tokens that go through the blocks.
            num_pairs: (query, key) pairs that attend, of all segments: n (n + 1) / 2 of a causal one of n tokens. Layers with
                a sliding window see no more than ``num_tokens`` times the window of them.
            num_labels: tokens that go through the head.
            backward: with the backward pass, or the forward alone.
        """
        attention = sum(cost * min(num_pairs, num_tokens * window) for cost, window in self._attention)
        forward = num_tokens * self._forward + num_labels * self._head_forward + attention
        if not backward:
            return forward
        return forward + num_tokens * self._backward + num_labels * self._head_backward + 2.0 * attention


def _first_block(model: PreTrainedModel) -> str:
    """Name of the first block, with a dot behind it."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    return next((f"{name}." for name, module in model.named_modules() if type(module).__name__ in kinds), "\0")


def _matrices(model: PreTrainedModel, config: Any, skip: Any) -> Iterator[tuple[str, float, bool]]:
    """Name, entries that one token is multiplied with, and whether it is trained, of every weight but head and look-ups."""
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.ParameterDict):
            continue
        parameters = dict(module.named_parameters(recurse=False))
        grouped = any(parameter.ndim == 3 for parameter in parameters.values())
        for name, parameter in parameters.items():
            # Vectors (norms, biases) are not multiplied with matrices; beside grouped experts they come as [experts, dim].
            if parameter is skip or parameter.ndim < (3 if grouped else 2):
                continue
            share = 1.0
            if grouped:
                share = _active_experts(config, parameter.shape[0]) / parameter.shape[0]
            elif ".experts." in f"{prefix}.":
                total = len(_parent_list(model, prefix))
                share = _active_experts(config, total) / total
            yield f"{prefix}.{name}", parameter.numel() * share, parameter.requires_grad


def _parent_list(model: PreTrainedModel, name: str) -> Any:
    """The list of experts that the module ``name`` lies in."""
    return model.get_submodule(name[: name.index(".experts.") + len(".experts")])


def _active_experts(config: Any, total: int) -> int:
    return next((value for name in _ACTIVE_EXPERTS if (value := getattr(config, name, None))), total)


def _attention_layers(model: PreTrainedModel, config: Any) -> Iterator[tuple[float, float]]:
    """Operations of a visible pair in the forward, and the window, of every attention layer."""
    heads = config.num_attention_heads
    usual = getattr(config, "head_dim", None) or config.hidden_size // heads
    kinds = getattr(config, "layer_types", None)
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if not type(module).__name__.endswith("Attention") or not isinstance(index, int):
            continue
        key_dim = next(
            (
                size
                for name in ("qk_head_dim", "head_dim", "head_size")
                if isinstance(size := getattr(module, name, None), int)
            ),
            usual,
        )
        value_dim = size if isinstance(size := getattr(module, "v_head_dim", None), int) else key_dim
        window = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
        if kinds is not None and index < len(kinds) and kinds[index] != "sliding_attention":
            window = None
        if not getattr(config, "use_sliding_window", True):
            window = None
        yield 2.0 * heads * (key_dim + value_dim), float("inf") if window is None else float(window)
