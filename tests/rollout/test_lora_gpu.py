"""On a GPU the adapter is in the captured steps: they follow its updates, and without it they are the base's."""

from typing import Any

import pytest
import torch

from burnish.config import HFModelConfig, RolloutConfig
from burnish.model import lora
from burnish.model.load import build_causal_lm
from burnish.model.policy import set_dtype
from burnish.model.projections import pack_projections
from burnish.rollout.base import SamplingParams
from burnish.rollout.native.engine import NativeRollout
from burnish.utils.fingerprint import fingerprint
from tests.rollout.contract import make_requests
from tests.rollout.test_native import ARCHITECTURES
from tests.rollout.test_native_gpu import assert_nearly_the_same

pytestmark = pytest.mark.gpu
SAMPLING = SamplingParams(max_new_tokens=40, temperature=0.8, seed=1)


def build(name: str = "qwen3", *, adapters: bool = True) -> Any:
    model: Any = build_causal_lm(ARCHITECTURES[name])
    if adapters:
        lora.add_adapters(model, HFModelConfig(lora_rank=4))
    model = model.cuda()
    set_dtype(model, torch.float32)
    pack_projections(model)
    return model


def shake(model: Any, seed: int) -> None:
    """As an optimizer does: in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in lora.adapter_parameters(model):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def engine_of(model: Any, **how: Any) -> NativeRollout:
    universal = how.pop("universal", False)
    config = RolloutConfig(max_num_seqs=12, gpu_memory_utilization=0.1, **how)
    return NativeRollout(model, config, shares_storage=True, device="cuda", universal=universal)


@pytest.mark.parametrize("universal", [False, True])
def test_captured_steps_follow_the_adapter_and_its_switch(universal: bool) -> None:
    model, requests = build(), make_requests(6, 2)
    shake(model, 1)
    captured = engine_of(model, universal=universal)
    plain = engine_of(model, universal=True, enforce_eager=True)
    of_base = engine_of(build(adapters=False), universal=universal).generate(requests, SAMPLING)
    for seed in (1, 2, 3):
        shake(model, seed)
        responses = captured.generate(requests, SAMPLING)
        assert_nearly_the_same(responses, plain.generate(requests, SAMPLING))
        assert [r.token_ids for r in responses] != [r.token_ids for r in of_base]
        with lora.adapters_off(model):
            assert_nearly_the_same(captured.generate(requests, SAMPLING), of_base)
    graphs = captured._decoder.graphs  # type: ignore[union-attr]
    assert graphs is not None
    assert not graphs.failed
    assert {mode for _, mode in graphs._graphs} == {False, True}
    assert captured._runner.is_fast is not universal


def test_fingerprints_are_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    for numel in (1, 1001, (1 << 22) + 3, 3 * (1 << 22) + 17):
        tensor = torch.randint(-(2**15), 2**15, (numel,), generator=generator).to(torch.int16).view(torch.bfloat16)
        assert int(fingerprint(tensor)) == int(fingerprint(tensor.cuda()))
        assert int(fingerprint(tensor[1:])) == int(fingerprint(tensor.cuda()[1:]))
