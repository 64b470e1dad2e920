"""Gathered in buckets of any size, the weights are what they were before they were cut up."""

from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.engine import weights_out
from burnish.model import lora
from tests.engine.engine_program import make_engine, run_ranks
from tests.engine.lora_program import make_lora_engine

PROGRAM = Path(__file__).parent / "weights_out_program.py"
# Odd sizes: on two and on three ranks the last ones hold less than the others, or nothing.
ODD = {"vocab_size": 47, "hidden_size": 12, "intermediate_size": 17, "num_attention_heads": 3, "num_key_value_heads": 1}
CASES: list[dict[str, Any]] = [
    {"name": "float32", "dtype": "float32"},
    {"name": "bfloat16", "dtype": "bfloat16"},
    {"name": "hybrid", "dtype": "float32", "fsdp_size": 2},
    {"name": "replicated", "dtype": "bfloat16", "fsdp_size": 1},
]


@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.slow) for world in (3, 4))])
def test_every_bucket_size_gives_the_whole_weights_to_every_rank(tmp_path: Path, world: int) -> None:
    possible = [case for case in CASES if world % max(case.get("fsdp_size", 1), 1) == 0]
    # Four ranks are two copies of two shards.
    cases = [{**case, "config": ODD} for case in possible if world < 4 or case["name"] == "hybrid"]
    results = run_ranks(tmp_path, cases, world=world, program=PROGRAM)
    for case in cases:
        alone = dict(make_engine(dtype=case["dtype"], config=ODD).named_weights())
        for rank in results:
            for stream in rank[case["name"]]["streams"]:
                assert list(stream) == list(alone)
                for name, weight in alone.items():
                    assert stream[name].dtype == weight.dtype
                    assert torch.equal(stream[name], weight)
            # One bucket after the other: no more at a time than the largest tensor or the bucket, and the next one.
            for bucket_bytes, sizes in rank[case["name"]]["buckets"]:
                largest = max(weight.nbytes for weight in alone.values())
                assert all(size <= max(bucket_bytes, largest) for size in sizes)
                assert (
                    len(sizes) >= sum(weight.nbytes for weight in alone.values()) / max(bucket_bytes, largest)
                    or not sizes
                )


def test_replicated_weights_are_the_very_tensors() -> None:
    engine = make_engine(dtype="bfloat16")
    parameters = dict(engine.module.model.named_parameters())
    for name, tensor in engine.named_weights():
        assert tensor.data_ptr() == parameters[name].data_ptr()


def test_base_comes_first_and_under_its_own_names() -> None:
    engine = make_lora_engine()
    names = [name for name, _ in engine.named_weights()]
    plain = [name for name, _ in make_engine().named_weights()]
    assert names[: len(plain)] == plain
    assert all(lora.is_adapter_name(name) for name in names[len(plain) :])
    assert [name for name, _ in engine.named_weights(adapters_only=True)] == names[len(plain) :]
    with pytest.raises(ValueError, match="no adapters"):
        list(make_engine().named_weights(adapters_only=True))


def test_a_part_is_as_large_as_the_first_ranks() -> None:
    for rows, ranks, expected in ((7, 3, 3), (6, 3, 2), (1, 4, 1), (0, 2, 0)):
        assert weights_out._part_numel(torch.empty(rows, 5), ranks) == expected * 5
