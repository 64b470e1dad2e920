"""Every engine samples from base and adapter as the trained model computes them, and from the base alone when that is asked."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from burnish.config import ActorRolloutRefConfig, HFModelConfig, RolloutConfig
from burnish.model import lora
from burnish.model.attention import plain_attention
from burnish.model.projections import pack_projections, packed_weight
from burnish.rollout import SamplingParams, build_rollout
from burnish.rollout.native.engine import NativeRollout
from burnish.rollout.native.fast import FastForward
from burnish.rollout.native.graphs import DecodeGraphs
from burnish.rollout.native.prepacked_linear import JointLinear
from burnish.rollout.weights import load_weights, weights_checksum
from burnish.utils.errors import RolloutError
from tests.rollout.contract import assert_same_responses, make_requests, tiny_llama

SAMPLING = SamplingParams(max_new_tokens=5)


def trained_policy(shares_storage: bool, shaken: bool = True, **keys: Any) -> Any:
    """A policy whose adapter shows."""
    model = tiny_llama(seed=3)
    lora.add_adapters(model, HFModelConfig(**({"lora_rank": 3} | keys)))
    if shaken:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for _, parameter in lora.adapter_parameters(model):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return SimpleNamespace(module=SimpleNamespace(model=model), shares_storage=shares_storage, dtype=torch.float32)


def stream(policy: Any, adapters_only: bool = False) -> list[tuple[str, torch.Tensor]]:
    """Base first, as an engine sends it."""
    weights = [(lora.hf_name(name), tensor.detach()) for name, tensor in policy.module.model.named_parameters()]
    adapters = [entry for entry in weights if lora.is_adapter_name(entry[0])]
    return adapters if adapters_only else [entry for entry in weights if entry not in adapters] + adapters


def rollout_of(policy: Any, name: str = "native", **keys: Any) -> Any:
    return build_rollout(policy, ActorRolloutRefConfig(rollout=RolloutConfig(name=name, **keys)), "cpu")


def plain_log_probs(model: Any, responses: list[Any]) -> list[list[float]]:
    result = []
    for request, response in zip(make_requests(), responses, strict=True):
        ids = [*request.prompt_ids, *response.token_ids]
        with torch.no_grad(), plain_attention(model):
            log_probs = model(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
        start = len(request.prompt_ids) - 1
        result.append([float(log_probs[start + i, token]) for i, token in enumerate(response.token_ids)])
    return result


@pytest.mark.parametrize("name", ["native", "hf"])
@pytest.mark.parametrize("shares_storage", [True, False])
def test_log_probs_are_those_of_the_trained_model_with_its_adapter(name: str, shares_storage: bool) -> None:
    policy = trained_policy(shares_storage)
    rollout = rollout_of(policy, name)
    rollout.update_weights(iter(stream(policy)), version=1)
    responses = rollout.generate(make_requests(), SAMPLING)
    ours = torch.tensor([value for response in responses for value in response.log_probs])
    expected = torch.tensor([value for row in plain_log_probs(policy.module.model, responses) for value in row])
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    with lora.adapters_off(policy.module.model):
        of_base = torch.tensor([value for row in plain_log_probs(policy.module.model, responses) for value in row])
    assert float((ours - of_base).abs().max()) > 1e-2


def test_switched_off_it_samples_from_the_base_and_then_from_the_adapter_again() -> None:
    policy = trained_policy(True)
    rollout = rollout_of(policy)
    with_adapter = rollout.generate(make_requests(), SAMPLING)
    base = SimpleNamespace(module=SimpleNamespace(model=tiny_llama(seed=3)), shares_storage=True, dtype=torch.float32)
    of_base = rollout_of(base).generate(make_requests(), SAMPLING)
    with lora.adapters_off(policy.module.model):
        assert_same_responses(rollout.generate(make_requests(), SAMPLING), of_base)
    again = rollout.generate(make_requests(), SAMPLING)
    assert_same_responses(again, with_adapter)
    assert [r.log_probs for r in with_adapter] != [r.log_probs for r in of_base]


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"target_modules": ["q_proj", "v_proj", "down_proj"]},
        {"target_modules": ["gate_proj", "o_proj"], "lora_alpha": 5},
    ],
)
@pytest.mark.parametrize("shares_storage", [True, False])
def test_the_fast_path_computes_the_adapters_as_their_modules_do(keys: dict[str, Any], shares_storage: bool) -> None:
    policy = trained_policy(shares_storage, **keys)
    fast = rollout_of(policy)
    universal = NativeRollout(policy.module.model, RolloutConfig(), shares_storage=True, universal=True)
    fast.update_weights(iter(stream(policy)), version=1)
    assert fast._runner.is_fast
    assert not universal._runner.is_fast
    # Enough steps that on a CPU some of them take prepacked weights.
    sampling = SamplingParams(max_new_tokens=24)

    def assert_same() -> None:
        ours, theirs = (engine.generate(make_requests(), sampling) for engine in (fast, universal))
        assert [response.token_ids for response in ours] == [response.token_ids for response in theirs]
        log_probs = [torch.tensor([response.log_probs for response in each]) for each in (ours, theirs)]
        torch.testing.assert_close(*log_probs, atol=1e-4, rtol=0)

    assert_same()
    if shares_storage:
        with lora.adapters_off(policy.module.model):
            assert_same()


@pytest.mark.parametrize("alpha", [4, 8, 5])
def test_in_half_precision_an_adapter_rounds_as_the_trained_layers_do(alpha: int) -> None:
    """Or the policy that samples would be another one than the policy that is trained, by a little on every token."""
    model = trained_policy(True, lora_rank=4, lora_alpha=alpha).module.model.bfloat16()
    x = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        for layer in (attention.q_proj, attention.v_proj):
            assert torch.equal(JointLinear([layer])(x), layer(x))


def test_packed_adapters_are_read_in_one_product_and_other_kinds_take_the_universal_path() -> None:
    policy = trained_policy(True)
    model = policy.module.model
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    pack_projections(model)
    attention = model.model.layers[0].self_attn
    downs = [lora.low_rank(getattr(attention, name))[0] for name in ("q_proj", "k_proj", "v_proj")]
    assert packed_weight(downs) is not None
    assert packed_weight([getattr(attention, name).weight for name in ("q_proj", "k_proj", "v_proj")]) is not None
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert FastForward.supports(model)
    attention.q_proj.lora_dropout["default"] = torch.nn.Dropout(0.1)
    assert not FastForward.supports(model)


def test_graphs_of_one_mode_are_not_replayed_in_another() -> None:
    captured: list[tuple[Any, bool]] = []
    mode = [True]

    class Graphs(DecodeGraphs):
        def _capture(self, variant: Any) -> Any:
            captured.append((variant, mode[0]))
            return SimpleNamespace(replay=lambda of=mode[0]: replayed.append(of))

    replayed: list[bool] = []
    graphs = Graphs(lambda *_: None, lambda: None, [4], "model", mode=lambda: mode[0])
    for value in (True, False, True, False):
        mode[0] = value
        graphs.ready((4, False, False))
        graphs.run((4, False, False), 2)
    assert captured == [((4, False, False), True), ((4, False, False), False)]
    assert replayed == [True, True, False, False, True, True, False, False]


def test_the_first_update_brings_the_base_and_later_ones_the_adapters_alone() -> None:
    policy = trained_policy(False)
    rollout = rollout_of(policy)
    assert rollout.needs_base
    with pytest.raises(RolloutError, match="before 'model.embed_tokens.weight' of its base"):
        rollout.update_weights(iter(stream(policy, adapters_only=True)), version=1)
    with pytest.raises(RolloutError, match="failed half-way"):
        rollout.generate(make_requests(), SAMPLING)
    rollout.update_weights(iter(stream(policy)), version=1)
    assert not rollout.needs_base
    other = trained_policy(False, shaken=False)
    rollout.update_weights(iter(stream(other, adapters_only=True)), version=2)
    assert rollout.weights_checksum() == weights_checksum(other.module.model)
    # A failed update leaves weights of no one policy, the base's among them.
    with pytest.raises(RolloutError, match="ended without"):
        rollout.update_weights(iter(stream(policy)[:3]), version=3)
    assert rollout.needs_base


def test_adapters_before_their_base_and_a_stream_without_adapters_are_refused() -> None:
    policy = trained_policy(False)
    entries = stream(policy)
    adapters = stream(policy, adapters_only=True)
    with pytest.raises(RolloutError, match=r"brings the adapter .* send the base first"):
        rollout_of(policy).update_weights(iter([*adapters, *entries[: -len(adapters)]]), version=1)
    rollout = rollout_of(policy)
    with pytest.raises(RolloutError, match=r"ended without 'model.layers.0.*lora_A.weight'"):
        rollout.update_weights(iter(entries[: -len(adapters)]), version=1)
    rollout.update_weights(iter(entries), version=1)
    with pytest.raises(RolloutError, match=r"ended without '.*lora_A.weight'"):
        rollout.update_weights(iter(()), version=2)
    # A model without adapters must come whole every time.
    plain = SimpleNamespace(module=SimpleNamespace(model=tiny_llama()), shares_storage=False, dtype=torch.float32)
    rollout = rollout_of(plain)
    whole = [(name, tensor.detach()) for name, tensor in plain.module.model.named_parameters()]
    rollout.update_weights(iter(whole), version=1)
    assert not rollout.needs_base
    with pytest.raises(RolloutError, match="ended without"):
        rollout.update_weights(iter(whole[:1]), version=2)


def test_the_checksum_tells_of_every_parameter_as_it_is() -> None:
    policy = trained_policy(False)
    rollout = rollout_of(policy, dtype="bfloat16")
    rollout.update_weights(iter(stream(policy)), version=1)
    held = rollout.weights_checksum()
    assert list(held) != []
    assert set(held) == {name for name, _ in stream(policy)}
    copy = trained_policy(False).module.model.to(torch.bfloat16)
    assert load_weights(copy, iter(stream(policy)), copy=True) == len(held)
    assert weights_checksum(copy) == held
    name, parameter = next(lora.adapter_parameters(copy))
    with torch.no_grad():
        parameter.view(torch.int16)[0, 0] ^= 1
    changed = weights_checksum(copy)
    assert [key for key in held if held[key] != changed[key]] == [lora.hf_name(name)]
