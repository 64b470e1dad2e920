"""Floating-point operations of a model's tokens, for model FLOPs utilisation (MFU)."""

import torch
from transformers import PreTrainedModel

# Dense peak of the matrix units in bfloat16, operations per second, by a part of the device's name (vendors' data sheets).
_PEAK_BF16 = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak operations per second of a GPU in ``dtype``, or None where it is not known (other dtypes, CPUs)."""
    if device.type != "cuda" or dtype is not torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_BF16.items() if part in name), None)


def estimate_flops_per_token(
    model: PreTrainedModel, mean_context: float, *, backward: bool = True, head_share: float = 1.0
) -> float:
    """Operations of one token through a dense causal LM; multiplications and additions count each.

    A weight costs 2 operations in the forward and 4 in the backward, so the blocks cost 2 N or 6 N; attention costs
    4 * heads * head_dim per layer and visible key (scores and their product with the values), three times that with the
    backward (PaLM, arXiv:2204.02311, appendix B). Recomputed activations are no useful work and not counted.

    Args:
        model: its parameters count, except embeddings (a look-up) and, for a mixture, experts that a token skips.
        mean_context: keys that a token sees on average; for whole causal sequences half their length.
        backward: with the backward pass, or the forward alone.
        head_share: share of the tokens that go through the language-model head.
    """
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    head_weights = 0 if head is None else head.weight.numel()
    outside = {id(model.get_input_embeddings().weight)} | ({id(head.weight)} if head is not None else set())
    block_weights = 0.0
    for name, parameter in model.named_parameters():
        # Vectors (norms, biases) are not multiplied with matrices.
        if id(parameter) in outside or parameter.ndim < 2:
            continue
        block_weights += parameter.numel() * (_active_share(config) if ".experts." in name else 1.0)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = getattr(config, "sliding_window", None)
    context = mean_context if window is None or getattr(config, "layer_types", None) else min(mean_context, window)
    attention = 4.0 * config.num_hidden_layers * config.num_attention_heads * head_dim * context
    forward = 2.0 * (block_weights + head_share * head_weights) + attention
    return 3.0 * forward if backward else forward


def _active_share(config: object) -> float:
    """Share of the experts that one token goes through."""
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    active = getattr(config, "num_experts_per_tok", None)
    return active / experts if experts and active else 1.0
