"""vLLM in processes of its own on GPUs: weights by CUDA IPC and by NCCL, tensor parallelism, memory given back, death."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

pytest.importorskip("vllm", reason="vLLM is not installed")

from burnish.config import RolloutConfig
from burnish.model.attention import plain_attention
from burnish.model.load import build_causal_lm
from burnish.rollout.base import RolloutResponse, SamplingParams
from burnish.rollout.vllm.arguments import VLLMModel, engine_arguments, engine_environment
from burnish.rollout.vllm.engine import VLLMRollout
from burnish.rollout.vllm.process import ProcessCore
from burnish.rollout.vllm.standalone import EngineProcess, Publisher, StandaloneRollout
from burnish.utils.errors import RolloutError
from burnish.utils.fingerprint import Fingerprints
from tests.rollout.contract import make_requests

pytestmark = pytest.mark.gpu
SAMPLED = SamplingParams(max_new_tokens=40, temperature=1.3, seed=5)
VOCAB = 512


def llama(seed: int = 0, *, large: bool = False) -> PreTrainedModel:
    """Random, in bfloat16; ``large`` has the shapes of a model of half a billion parameters."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    if large:
        sizes = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    config = LlamaConfig(
        **sizes,
        num_attention_heads=4 if not large else 14,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        initializer_range=0.02 if large else 0.15,
        tie_word_embeddings=large,
    )
    return build_causal_lm(config, torch.bfloat16, seed=seed)


def described(folder: Path, model: PreTrainedModel) -> VLLMModel:
    if not (folder / "config.json").exists():
        model.save_pretrained(folder)
    return VLLMModel(path=str(folder), config=model.config, dtype=torch.bfloat16)


def make(
    folder: Path, model: PreTrainedModel, *, gpus: str = "", transport: Any = "memory", **config: Any
) -> VLLMRollout:
    """A rollout on GPUs of this process, or on those that ``gpus`` names."""
    device = torch.device("cuda", 0)
    settings = RolloutConfig(
        mode="async", load_format="dummy", gpu_memory_utilization=0.2, enforce_eager=True, max_num_seqs=64, **config
    )
    description = described(folder, model)
    arguments = engine_arguments(description, settings, device, in_process=False)
    environment = engine_environment(in_process=False) | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})
    core = ProcessCore(arguments, environment, device=device, transport=transport, timeout=300)
    return VLLMRollout(description, settings, device=device, core=core)


@pytest.fixture
def rollout(tmp_path: Path) -> Iterator[Callable[..., VLLMRollout]]:
    made: list[VLLMRollout] = []

    def start(model: PreTrainedModel, **options: Any) -> VLLMRollout:
        made.append(make(tmp_path, model, **options))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


def fingerprints(model: PreTrainedModel) -> dict[str, int]:
    found = Fingerprints()
    for name, parameter in model.named_parameters():
        found.add(name, parameter)
    return found.read()


def assert_plausible(model: PreTrainedModel, responses: list[RolloutResponse]) -> None:
    """Log-probs are those of ``model``, to what bfloat16 leaves of them."""
    for request, response in zip(make_requests(vocab=VOCAB), responses, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *response.token_ids]], device="cuda")
        with torch.no_grad(), plain_attention(model):
            logits = model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1].float() / SAMPLED.temperature
        drawn = torch.tensor(response.token_ids, device="cuda")[:, None]
        expected = logits.log_softmax(-1).gather(-1, drawn).squeeze(-1).cpu()
        assert (torch.tensor(response.log_probs) - expected).abs().mean() < 0.05


def check_updates(engine: VLLMRollout) -> None:
    """Two updates arrive to the bit, and the responses are those of the second."""
    for version in (1, 2):
        model = llama(version).cuda()
        engine.update_weights(model.named_parameters(), version=version)
        assert engine.weights_checksum() == fingerprints(model)
    responses = engine.generate(make_requests(vocab=VOCAB), SAMPLED)
    assert {response.policy_version for response in responses} == {2}
    assert_plausible(model, responses)


def test_weights_arrive_by_cuda_ipc_and_their_buckets_are_freed(rollout: Callable[..., VLLMRollout]) -> None:
    engine = rollout(llama())
    check_updates(engine)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    model = llama(3).cuda()
    engine.update_weights(model.named_parameters(), version=3)
    del model
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_is_filled_in_its_sleep_and_answers_as_before(
    rollout: Callable[..., VLLMRollout], level: int
) -> None:
    engine, model, requests = rollout(llama(), free_cache_engine=True), llama(1).cuda(), make_requests(vocab=VOCAB)
    engine.update_weights(model.named_parameters(), version=1)
    before = engine.generate(requests, SAMPLED)
    awake = torch.cuda.mem_get_info()[0]
    engine.sleep(level)
    assert torch.cuda.mem_get_info()[0] > awake + (1 << 30)
    engine.wake_up(["weights"])
    engine.update_weights(model.named_parameters(), version=2)
    engine.wake_up(["kv_cache"])
    assert [r.token_ids for r in engine.generate(requests, SAMPLED)] == [r.token_ids for r in before]


def test_the_weights_of_half_a_billion_parameters_arrive_fast(rollout: Callable[..., VLLMRollout]) -> None:
    engine, model = rollout(llama(large=True), free_cache_engine=True), llama(1, large=True).cuda()
    seconds = []
    for version in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.update_weights(model.named_parameters(), version=version)
        seconds.append(time.perf_counter() - start)
    whole = []
    for version in range(4, 7):
        engine.sleep(2)
        start = time.perf_counter()
        engine.wake_up(["weights"])
        engine.update_weights(model.named_parameters(), version=version)
        engine.wake_up(["kv_cache"])
        whole.append(time.perf_counter() - start)
        start = time.perf_counter()
        engine.sleep(2)
        whole[-1] += time.perf_counter() - start
        engine.wake_up()
        engine.update_weights(model.named_parameters(), version=version)
    print(f"CUDA IPC: update {min(seconds):.3f} s, wake + update + sleep {min(whole):.3f} s")  # noqa: T201  Its figures.
    assert engine.weights_checksum() == fingerprints(model)
    assert min(seconds) < 0.15
    assert min(whole) < 0.5


def test_an_engine_that_dies_is_named_and_its_gpu_is_free_for_another(rollout: Callable[..., VLLMRollout]) -> None:
    engine = rollout(llama())
    engine.update_weights(llama(1).cuda().named_parameters(), version=1)

    def kill(response: RolloutResponse) -> None:
        if engine.core.lives:  # type: ignore[attr-defined]
            os.kill(engine.core.processes[0].pid, signal.SIGKILL)  # type: ignore[attr-defined]

    with pytest.raises(RolloutError, match="SIGKILL"):
        engine.generate(make_requests(40, 40, vocab=VOCAB), SAMPLED, kill)
    engine.close()
    check_updates(rollout(llama()))


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two_gpus
def test_two_tensor_parallel_workers_take_their_parts_from_one_gpus_memory(rollout: Callable[..., VLLMRollout]) -> None:
    check_updates(rollout(llama(), gpus="0,1", tensor_model_parallel_size=2))


@two_gpus
def test_an_engine_on_another_gpu_gets_its_weights_by_nccl(rollout: Callable[..., VLLMRollout]) -> None:
    engine = rollout(llama(), gpus="1", transport="broadcast")
    check_updates(engine)

    def broken() -> Any:
        yield from list(llama(1).cuda().named_parameters())[:4]
        raise KeyError("of the trainer")

    with pytest.raises(KeyError):
        engine.update_weights(broken(), version=3)
    check_updates(engine)


@two_gpus
def test_an_engine_that_dies_does_not_hold_up_a_broadcast(rollout: Callable[..., VLLMRollout]) -> None:
    engine = rollout(llama(), gpus="1", transport="broadcast")

    def dying() -> Any:
        for index, (name, parameter) in enumerate(llama(1).cuda().named_parameters()):
            if index == 3:
                os.kill(engine.core.processes[0].pid, signal.SIGKILL)  # type: ignore[attr-defined]
            yield name, parameter

    start = time.monotonic()
    with pytest.raises(RolloutError, match="SIGKILL"):
        engine.update_weights(dying(), version=1)
    assert time.monotonic() - start < 60


def make_standalone(folder: str) -> StandaloneRollout:
    """In the process of a standalone engine."""
    settings = RolloutConfig(mode="sync", load_format="dummy", gpu_memory_utilization=0.2, enforce_eager=True)
    return StandaloneRollout(described(Path(folder), llama()), settings, device="cuda")


@two_gpus
def test_a_standalone_engine_on_another_gpu_is_filled_by_nccl(tmp_path: Path) -> None:
    described(tmp_path, llama())
    engine = EngineProcess(make_standalone, str(tmp_path), environment={"CUDA_VISIBLE_DEVICES": "1"})
    publisher = Publisher([engine], "cuda:0", torch.bfloat16, timeout_s=120)
    try:
        for version in (1, 2):
            model = llama(version).cuda()
            publisher.update_weights(model.named_parameters(), version=version)
            assert publisher.weights_checksum() == fingerprints(model)
        assert_plausible(model, engine.generate(make_requests(vocab=VOCAB), SAMPLED))
    finally:
        publisher.close()
        engine.close()
