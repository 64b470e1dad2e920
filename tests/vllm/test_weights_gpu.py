"""Weights in vLLM on a GPU: in compiled models with graphs, through sleep, and in time."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm`")

from tests.vllm.weight_models import (
    ENVIRONMENT,
    engine_log_probs,
    model_log_probs,
    moved,
    sent,
    stream,
    update,
    vllm_engine,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
# The shape of Qwen2.5-0.5B: 290 tensors, 0.99 GB in bf16.
SHAPE = Qwen2Config(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
# Of one log-prob in bf16, between two implementations of the model.
TOLERANCE = 0.15
SYNC_SECONDS, CHECK_SECONDS = 0.15, 0.1


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(SHAPE, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        folder: Path = tmp_path_factory.mktemp("qwen2")
        arguments = {"gpu_memory_utilization": 0.3, "enable_sleep_mode": True, "enforce_eager": False}
        with vllm_engine(model, folder, **arguments) as llm:
            yield llm


def tokens() -> torch.Tensor:
    """[rows, length], on the CPU."""
    return torch.randint(3, SHAPE.vocab_size, (4, 40), generator=torch.Generator().manual_seed(0))


def assert_same(engine: Any, model: PreTrainedModel) -> None:
    """Both give the same log-probs, in a prompt and, where the steps are recorded graphs, in a response."""
    from vllm import SamplingParams

    assert engine.collective_rpc("fingerprints") == [sent(stream(model))]
    expected = model_log_probs(model, tokens().cuda()).cpu()
    torch.testing.assert_close(engine_log_probs(engine, tokens()), expected, atol=TOLERANCE, rtol=0)
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=0, ignore_eos=True, detokenize=False)
    (output,) = engine.generate([{"prompt_token_ids": tokens()[0].tolist()}], params, use_tqdm=False)
    sampled = list(output.outputs[0].token_ids)
    found = torch.tensor(
        [of_token[token].logprob for of_token, token in zip(output.outputs[0].logprobs, sampled, strict=True)]
    )
    whole = torch.cat([tokens()[:1], torch.tensor([sampled])], dim=1).cuda()
    torch.testing.assert_close(found, model_log_probs(model, whole)[0, -8:].cpu(), atol=TOLERANCE, rtol=0)


def test_after_each_update_the_engine_is_the_model(engine: Any, model: PreTrainedModel) -> None:
    for version in (1, 2):
        update(engine, stream(moved(model, 0.005)), version, bucket=50)
        assert_same(engine, model)


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_is_updated_when_its_weights_are_awake(engine: Any, model: PreTrainedModel, level: int) -> None:
    update(engine, stream(model))
    engine.sleep(level=level)
    engine.wake_up(tags=["weights"])
    update(engine, stream(moved(model, 0.005)))
    engine.wake_up(tags=["kv_cache"])
    assert_same(engine, model)


def test_an_update_and_its_check_take_no_time(
    engine: Any, model: PreTrainedModel, record_property: Callable[[str, object], None]
) -> None:
    weights = stream(model)

    def seconds(action: Callable[[], Any]) -> float:
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            action()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times[1:])

    sync = seconds(lambda: update(engine, weights, bucket=1000))
    check = seconds(lambda: engine.collective_rpc("fingerprints"))
    ours = seconds(lambda: sent(weights))
    for name, value in {"sync": sync, "engine's fingerprints": check, "fingerprints of what was sent": ours}.items():
        record_property(f"seconds: {name}", value)
    assert sync <= SYNC_SECONDS, f"{sync:.3f} s"
    assert check + ours <= CHECK_SECONDS, f"{check:.3f} + {ours:.3f} s"
