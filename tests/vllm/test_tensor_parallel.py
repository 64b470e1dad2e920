"""Two ranks that are one vLLM engine answer as the native engine, take weights, and agree on what is aborted."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import PreTrainedModel

from burnish.config import RolloutConfig
from burnish.rollout.base import RolloutResponse, SamplingParams
from burnish.rollout.native.engine import NativeRollout
from burnish.rollout.vllm.arguments import VLLMModel
from burnish.rollout.vllm.engine import VLLMRollout
from burnish.rollout.weights import weights_checksum
from tests.rollout.contract import assert_same_responses, make_requests
from tests.vllm.in_process_engines import tiny_vllm_llama

SAMPLING = SamplingParams(
    max_new_tokens=9, temperature=1.3, top_k=30, repetition_penalty=1.2, eos_token_ids=(2, 7), seed=5
)


def native(model: PreTrainedModel) -> list[RolloutResponse]:
    engine = NativeRollout(model, RolloutConfig(max_num_seqs=16), shares_storage=True, device="cpu")
    return engine.generate(make_requests(5, 3), SAMPLING)


def one_rank(rank: int, folder: str, store: str, world: int) -> None:
    """What each of ``world`` processes does: an engine of its own, and then one that all of them are."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for size in (1, world):
        one_engine(rank, folder, size, is_shared=size == world)
        dist.barrier()  # The ranks' own group outlives the engine.
    dist.destroy_process_group()


def one_engine(rank: int, folder: str, size: int, *, is_shared: bool) -> None:
    model, other = tiny_vllm_llama(), tiny_vllm_llama(seed=1)
    config = RolloutConfig(mode="sync", load_format="auto", max_num_seqs=16, tensor_model_parallel_size=size)
    engine = VLLMRollout(VLLMModel(path=folder, config=model.config, dtype=torch.float32), config)
    assert_same_responses(engine.generate(make_requests(5, 3), SAMPLING), native(model))
    engine.update_weights(other.named_parameters(), version=3)
    assert engine.weights_checksum() == weights_checksum(other)
    assert_same_responses(engine.generate(make_requests(5, 3), SAMPLING), native(other))

    def abort_the_others(response: RolloutResponse) -> None:
        if rank == 0:
            engine.abort()

    ignored = SamplingParams(max_new_tokens=30, eos_token_ids=(2,), seed=5)
    responses = engine.generate(make_requests(5, 3), ignored, abort_the_others)
    outcomes: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, [(r.token_ids, r.finish_reason) for r in responses])
    assert (outcomes[0] == outcomes[1]) is is_shared
    if rank == 0 or is_shared:
        assert "abort" in {r.finish_reason for r in responses}
    engine.close()


@pytest.mark.timeout(900)
def test_two_ranks_have_an_engine_each_and_then_are_one(tmp_path: Path) -> None:
    tiny_vllm_llama().save_pretrained(tmp_path / "model")
    mp.spawn(one_rank, (str(tmp_path / "model"), str(tmp_path / "store"), 2), nprocs=2)
