"""Logits of a half-precision model in float32, as training computes them."""

import logging
from typing import Any

from torch import Tensor

from burnish.model.head_chunks import matmul

logger = logging.getLogger("burnish.rollout")


def widen_head(model_runner: Any) -> None:
    """Makes the language-model head of a bf16 or fp16 model on a GPU write its logits in float32.

    vLLM rounds them to the model's dtype: in bf16 by up to 0.06 for a logit of 20, on every token whose log-prob is then
    compared with the one in training, where the same product is written in float32 (`burnish.model.head.head_logits`). On a
    CPU training rounds them too. A head that is quantised, has adapters, or whose dtype ``hf_overrides.head_dtype`` sets is
    left alone.
    """
    model, config = model_runner.model, model_runner.model_config
    head = getattr(model, "lm_head", None)
    reason = None
    if model_runner.device.type != "cuda" or config.dtype.itemsize != 2:
        return
    method: Any = getattr(head, "quant_method", None)
    if type(method).__name__ != "UnquantizedEmbeddingMethod":
        reason = "it is not a plain one"
    elif hasattr(getattr(model, "logits_processor", None), "base_layer"):
        reason = "it can have adapters"
    elif getattr(config.hf_config, "head_dtype", None) is not None:
        reason = "hf_overrides sets its head_dtype"
    if reason is not None:
        logger.info("The logits of vLLM's head are rounded to %s before they are drawn from: %s.", config.dtype, reason)
        return
    method.apply = _wide_logits


def _wide_logits(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """[tokens, rows of the head] in float32 of states [tokens, hidden]: ``UnquantizedEmbeddingMethod.apply``."""
    logits = matmul(x, layer.weight.t())
    return logits if bias is None else logits.add_(bias)
