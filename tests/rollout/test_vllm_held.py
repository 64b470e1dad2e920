"""What a vLLM model holds, as far as it can be known without vLLM."""

import pytest
import torch
from torch import nn

from burnish.rollout.vllm.held import HeldWeights
from burnish.utils.errors import RolloutError


class Latent(nn.Module):
    """As far as DeepSeek's attention matters here."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(4, 4, bias=False)


def test_a_model_with_tensors_that_no_update_renews_is_refused() -> None:
    model = nn.ModuleDict({"self_attn": Latent()})
    with pytest.raises(RolloutError, match=r"'self_attn\.kv_b_proj' \(latent attention\)"):
        HeldWeights(model, torch.float32, lambda tensor: [tensor], 0, 1)
