"""Weights that vLLM splits over two tensor-parallel ranks: each rank tells the fingerprints of the whole."""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

pytest.importorskip("vllm", reason="needs vLLM: `make test-vllm`")

from burnish.rollout.vllm.held import HeldWeight, Part, join


def test_rows_and_columns_are_joined_in_the_order_of_the_ranks() -> None:
    whole = torch.arange(24.0).view(4, 6)
    for axis in (0, 1):
        shards = list(whole.chunk(2, dim=axis))
        assert torch.equal(join(shards, axis, 1, rank=0), whole)


def test_of_replicas_each_rank_reads_its_own() -> None:
    heads = [torch.full((2, 3), float(head)) for head in range(2)]
    shards = [heads[0], heads[0].clone(), heads[1], heads[1].clone()]
    shards[3].fill_(9)
    assert torch.equal(join(shards, 0, 2, rank=2), torch.cat(heads))
    assert torch.equal(join(shards, 0, 2, rank=1), torch.cat([heads[0], shards[3]]))


def test_the_rows_that_pad_a_vocabulary_are_cut_off() -> None:
    whole = torch.arange(30.0).view(10, 3)
    padded = torch.cat([whole, torch.full((6, 3), -1.0)]).chunk(2)
    module = nn.Module()
    module.weight = nn.Parameter(padded[0], requires_grad=False)
    part = Part(module, "weight", slice(0, 8), (10, 3), 0)
    assert torch.equal(part.read(lambda _: list(padded), 0), whole)


def test_a_joined_weight_comes_back_ordered_by_head() -> None:
    # GPT-NeoX: Hugging Face has q, k, v of the first head, then of the second.
    by_head = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    module = nn.Module()
    module.weight = nn.Parameter(by_head.transpose(0, 1).reshape(24, 5), requires_grad=False)
    parts = tuple(Part(module, "weight", slice(8 * i, 8 * i + 8), (8, 5), None) for i in range(3))
    held = HeldWeight("query_key_value.weight", parts, heads=2)
    assert held.shape == (24, 5)
    assert torch.equal(held.read(lambda tensor: [tensor], 0), by_head.view(24, 5))


@pytest.mark.timeout(600)
def test_two_ranks_hold_what_was_sent(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, (port, str(tmp_path)), nprocs=2)


def _rank(rank: int, port: int, folder: str) -> None:
    """One of two ranks that run one engine together."""
    from tests.vllm import test_weights_adapters as adapters
    from tests.vllm.weight_models import ENVIRONMENT

    os.environ.update(ENVIRONMENT, VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from burnish.rollout.vllm import cpu_linear
    from burnish.rollout.vllm.adapters import lora_request
    from tests.vllm.weight_models import engine_log_probs, model_log_probs, moved, sent, tiny_model, update, vllm_engine

    # One key and value head for both ranks; every bias.
    policy = adapters.with_adapters(tiny_model("one-kv-head"))
    arguments = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "external_launcher",
        "seed": 0,
        "enable_lora": True,
        "max_lora_rank": 8,
        "max_loras": 1,
    }
    with vllm_engine(tiny_model("one-kv-head", seed=9), Path(folder, str(rank)), **arguments) as llm:
        llm.collective_rpc("use_adapters", args=(adapters.CONFIG,))
        for version in (1, 2):
            torch.manual_seed(version)
            update(llm, adapters.stream(moved(policy)), version)
            assert llm.collective_rpc("fingerprints") == [sent(adapters.stream(policy))]
            found = engine_log_probs(llm, adapters.TOKENS, lora_request())
            torch.testing.assert_close(found, model_log_probs(policy, adapters.TOKENS), atol=1e-3, rtol=1e-3)
        # A copy of the one head on the second rank that missed an update.
        (model,) = llm.llm_engine.apply_model(lambda model: model)
        qkv = model.model.layers[1].self_attn.qkv_proj.base_layer
        if rank == 1:
            qkv.weight.data[-1] += 1
            cpu_linear.pack_again(model)
        held, expected = llm.collective_rpc("fingerprints")[0], sent(adapters.stream(policy))
        wrong = [name for name in expected if held[name] != expected[name]]
        assert wrong == ["model.layers.1.self_attn.v_proj.weight"] * rank
