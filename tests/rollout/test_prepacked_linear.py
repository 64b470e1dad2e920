"""Copies of the weights in oneDNN's order change nothing but the time, and live no longer than the weights they are of."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from burnish.config import RolloutConfig
from burnish.model.linear import can_prepack, prepack_weight, prepacked_bytes
from burnish.rollout.base import RolloutRequest, RolloutResponse, SamplingParams
from burnish.rollout.native.engine import NativeRollout
from burnish.rollout.native.memory import MemoryBudget
from burnish.rollout.native.prepacked_linear import PAYS_AFTER, JointLinear, PrepackedLinears
from burnish.utils import env, heap
from tests.rollout.contract import (
    assert_log_probs_are_those_of_a_plain_forward,
    assert_same_responses,
    make_requests,
    tiny_llama,
)

pytestmark = pytest.mark.skipif(not can_prepack(torch.zeros(1, 1)), reason="torch was built without oneDNN")

SAMPLING = SamplingParams(max_new_tokens=PAYS_AFTER, temperature=1.3, eos_token_ids=(2,), seed=5)
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_prepack(torch.zeros(1, 1, dtype=dtype))]


def make_engine(universal: bool = False, **config: Any) -> NativeRollout:
    return NativeRollout(tiny_llama(), RolloutConfig(**config), shares_storage=True, universal=universal)


def plain_responses(
    requests: list[RolloutRequest], monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams = SAMPLING
) -> list[RolloutResponse]:
    """Those of an engine that never copies weights."""
    with monkeypatch.context() as patch:
        patch.setattr(PrepackedLinears, "pays", lambda *_: False)
        return make_engine().generate(requests, sampling)


def held_during(engine: NativeRollout, num_requests: int = 3, sampling: SamplingParams = SAMPLING) -> bool:
    """Whether copies were there when the first response was."""
    seen: list[bool] = []
    engine.generate(make_requests(num_requests, 1), sampling, lambda _: seen.append(engine._runner.linears.held))
    return seen[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_copy_gives_the_same_product(dtype: torch.dtype, adjacent: bool, with_bias: bool) -> None:
    torch.manual_seed(0)
    modules = [nn.Linear(24, size, bias=with_bias, dtype=dtype) for size in (33, 5, 5)]
    if adjacent:
        for name in ("weight", "bias") if with_bias else ("weight",):
            joint = torch.cat([getattr(module, name).data for module in modules])
            for module, rows in zip(modules, joint.split([33, 5, 5]), strict=True):
                getattr(module, name).data = rows
    linear = JointLinear(modules)
    for num_tokens in (0, 1, 2, 7, 64, 300):
        # A slice of wider rows, as the heads of a joint projection are.
        x = torch.randn(num_tokens, 40, dtype=dtype)[:, 8:32]
        linear.drop()
        expected = linear(x)
        linear.prepack()
        output = linear(x)
        assert output.dtype == dtype
        assert not output.requires_grad
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_token_sees_another_one(dtype: torch.dtype) -> None:
    linear = JointLinear([nn.Linear(64, 96, dtype=dtype)])
    linear.prepack()
    x = torch.randn(20, 64, dtype=dtype)
    expected = linear(x)
    x[5] = torch.nan
    output = linear(x)
    assert output[5].isnan().all()
    output[5] = expected[5]
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(torch.cat([linear(row[None]) for row in x])[6:], expected[6:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (100, 33), (64, 64), (1000, 65)])
def test_a_copy_is_no_larger_than_was_reckoned(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = torch.zeros(shape, dtype=dtype)
    assert weight.nbytes <= torch.ops.mkldnn._nbytes(prepack_weight(weight)) <= prepacked_bytes(*shape, dtype)


@pytest.mark.parametrize("universal", [False, True], ids=["fast", "universal"])
def test_responses_are_the_same_and_their_log_probs_those_of_training(
    universal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(5, 2)
    engine = make_engine(universal, max_num_seqs=4)
    responses = engine.generate(requests, SAMPLING)
    assert_same_responses(responses, plain_responses(requests, monkeypatch))
    assert_log_probs_are_those_of_a_plain_forward(tiny_llama(attn=False), requests, responses, SAMPLING.temperature)


def test_copies_are_there_during_a_call_and_gone_after_it() -> None:
    engine = make_engine()
    assert held_during(engine)
    assert not engine._runner.linears.held
    assert all(product.prepacked is None for product in engine._runner.linears._products)
    assert engine._runner.linears.reserved_bytes == 0


def test_a_call_that_fails_frees_them_too() -> None:
    engine = make_engine()

    def fail(_: RolloutResponse) -> None:
        assert engine._runner.linears.held
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        engine.generate(make_requests(), SAMPLING, fail)
    assert not engine._runner.linears.held


def test_none_are_made_where_they_would_not_pay() -> None:
    assert not held_during(make_engine(), sampling=SamplingParams(max_new_tokens=PAYS_AFTER - 1))
    assert not held_during(make_engine(), num_requests=1)  # Float32, one row.
    # Many short responses, a few at a time, are many steps.
    short = SamplingParams(max_new_tokens=4, ignore_eos=True)
    assert held_during(make_engine(max_num_seqs=2), num_requests=PAYS_AFTER, sampling=short)
    assert not held_during(make_engine(), num_requests=PAYS_AFTER, sampling=short)


@pytest.mark.parametrize("shares_storage", [True, False])
def test_weights_that_change_while_it_is_paused_are_copied_anew(shares_storage: bool) -> None:
    """Also where the version stays what it was, as a trainer in the same process may have it."""
    old, new = tiny_llama(), tiny_llama(seed=1)
    engine = NativeRollout(old, RolloutConfig(), shares_storage=shares_storage)
    requests = [RolloutRequest(str(i), [5, 6, 7, 8 + i], f"p{i}", 0) for i in range(4)]
    sampling = SamplingParams(max_new_tokens=24, eos_token_ids=(2, 3, 4, 5, 6, 7), seed=3)
    failures: list[BaseException] = []
    threads: list[threading.Thread] = []

    def update() -> None:
        try:
            engine.pause()
            if shares_storage:
                with torch.no_grad():
                    for mine, other in zip(old.parameters(), new.parameters(), strict=True):
                        mine.copy_(other)
            engine.update_weights(new.named_parameters(), version=1)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)
        finally:
            engine.resume()

    def on_finished(response: RolloutResponse) -> None:
        if not threads:
            assert engine._runner.linears.held
            engine.pause()
            threads.append(threading.Thread(target=update))
            threads[0].start()

    responses = engine.generate(requests, sampling, on_finished)
    threads[0].join()
    assert not failures
    both = [(q, r) for q, r in zip(requests, responses, strict=True) if len(r.policy_versions) == 2]
    assert both
    reference = tiny_llama(seed=1, attn=False)
    for request, response in both:
        count = response.policy_versions[0][1]
        rest = RolloutRequest("r", [*request.prompt_ids, *response.token_ids[:count]], request.uid, 0)
        late = RolloutResponse("r", response.token_ids[count:], response.log_probs[count:], "stop", 1)
        assert_log_probs_are_those_of_a_plain_forward(reference, [rest], [late])


def test_sleep_frees_them_while_it_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, requests = make_engine(), make_requests(4, 1)
    held: list[bool] = []
    threads: list[threading.Thread] = []

    def nap() -> None:
        engine.pause()
        held.append(engine._runner.linears.held)
        engine.sleep()
        held.append(engine._runner.linears.held)
        engine.wake_up()
        engine.resume()

    def on_finished(_: RolloutResponse) -> None:
        if not threads:
            engine.pause()
            threads.append(threading.Thread(target=nap))
            threads[0].start()

    responses = engine.generate(requests, SAMPLING, on_finished)
    threads[0].join()
    assert held == [True, False]
    assert_same_responses(responses, plain_responses(requests, monkeypatch))


def test_a_session_makes_them_once_enough_steps_are_done_and_frees_them_at_its_end() -> None:
    engine = make_engine()
    request = RolloutRequest("a", [5], "p", 0, SamplingParams(max_new_tokens=PAYS_AFTER + 4, ignore_eos=True))
    held: list[bool] = []
    with engine.open_session(on_tokens=lambda *_: held.append(engine._runner.linears.held)) as session:
        session.add([request])
        while session.step():
            pass
    assert held == [False] * PAYS_AFTER + [True] * 4
    assert not engine._runner.linears.held


def test_the_budget_counts_them() -> None:
    engine = make_engine()
    copies = engine._runner.linears.copy_bytes
    weights = [parameter for parameter in engine._runner.model.parameters() if parameter.dim() == 2]
    assert copies >= sum(weight.nbytes for weight in weights) - weights[0].nbytes
    seen: list[int] = []
    without = engine._budget.weight_bytes
    engine.generate(make_requests(), SAMPLING, lambda _: seen.append(engine._budget.weight_bytes))
    assert seen[0] == without + copies
    assert engine._budget.weight_bytes == without


def test_where_the_memory_is_short_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests(3, 1)
    expected = plain_responses(requests, monkeypatch)
    weights = make_engine()._budget.weight_bytes
    for patch in (
        (MemoryBudget, "total_bytes", property(lambda self: int((weights + 200_000) / self.fraction))),
        (env, "available_memory", lambda: 2 * make_engine()._runner.linears.copy_bytes - 1),
    ):
        with monkeypatch.context() as context:
            context.setattr(*patch)
            context.setattr(heap, "kept_bytes", lambda: 0)
            engine = make_engine()
            assert not held_during(engine)
            assert_same_responses(engine.generate(requests, SAMPLING), expected)


def test_a_cpu_without_the_means_computes_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_requests(3, 1)
    expected = plain_responses(requests, monkeypatch)
    monkeypatch.setattr("burnish.model.linear._CAN_PREPACK", False)
    engine = make_engine()
    assert engine._runner.linears.copy_bytes == 0
    assert not held_during(engine)
    assert_same_responses(engine.generate(requests, SAMPLING), expected)


def test_only_whole_matrices_in_float32_or_bf16_can_be_copied() -> None:
    def of(tensor: Tensor) -> bool:
        return can_prepack(tensor)

    assert of(torch.zeros(3, 4))
    assert not of(torch.zeros(3, 4, dtype=torch.float64))
    assert not of(torch.zeros(3, 4, device="meta"))
    assert not of(torch.zeros(3))
