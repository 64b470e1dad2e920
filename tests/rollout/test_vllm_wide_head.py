"""The head of a vLLM model in float32; vLLM need not be installed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.rollout.vllm.wide_head import widen_head


class UnquantizedEmbeddingMethod:
    """As vLLM's, by its name."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)


class QuantizedMethod(UnquantizedEmbeddingMethod):
    """Another one."""


def runner(*, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, method: Any = None, **changes: Any) -> Any:
    """A model runner whose device is only said to be one."""
    weight = torch.randn(11, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    head = SimpleNamespace(weight=weight, quant_method=method or UnquantizedEmbeddingMethod())
    parts = {"lm_head": head, "logits_processor": object(), "hf_config": SimpleNamespace(), **changes}
    return SimpleNamespace(
        device=torch.device(device),
        model=SimpleNamespace(lm_head=parts["lm_head"], logits_processor=parts["logits_processor"]),
        model_config=SimpleNamespace(dtype=dtype, hf_config=parts["hf_config"]),
    )


def logits_of(model_runner: Any, bias: Tensor | None = None) -> Tensor:
    head = model_runner.model.lm_head
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).to(head.weight.dtype)
    return head.quant_method.apply(head, x, bias=bias)


def test_logits_and_their_bias_come_in_float32() -> None:
    given, bias = runner(), torch.arange(11).bfloat16()
    narrow, narrow_with_bias = logits_of(given), logits_of(given, bias)
    widen_head(given)
    assert logits_of(given).dtype == torch.float32
    torch.testing.assert_close(logits_of(given), narrow.float(), atol=0.05, rtol=0.01)
    torch.testing.assert_close(logits_of(given, bias), narrow_with_bias.float(), atol=0.05, rtol=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "cpu"},
        {"dtype": torch.float32},
        {"method": QuantizedMethod()},
        {"logits_processor": SimpleNamespace(base_layer=object())},
        {"hf_config": SimpleNamespace(head_dtype="float32")},
    ],
    ids=["on a CPU", "wide already", "quantised", "with adapters", "by hf_overrides"],
)
def test_other_heads_are_left_alone(changes: dict[str, Any]) -> None:
    given = runner(**changes)
    widen_head(given)
    assert "apply" not in vars(given.model.lm_head.quant_method)


def test_a_model_without_a_head_of_its_own_is_left_alone() -> None:
    widen_head(runner(lm_head=None))
