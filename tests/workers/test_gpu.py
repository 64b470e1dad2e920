"""On a GPU: what a loss decides over a mini-batch is what it decides on a CPU, on one rank and on two (NCCL)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.engine_program import run_ranks
from tests.workers import update_program
from tests.workers.update_program import PREPARED, run_case

pytestmark = pytest.mark.gpu


def case(loss_mode: str, fsdp_size: int = 1, **more: Any) -> dict[str, Any]:
    name = f"{loss_mode}-{fsdp_size}"
    shape = {"dtype": "float32", "num_rows": 7, "micro_batch_size": 2}
    return {"name": name, "loss_mode": loss_mode, "fsdp_size": fsdp_size} | shape | more


@pytest.mark.parametrize("loss_mode", ["vanilla", *PREPARED])
def test_an_update_on_the_gpu_is_that_on_the_cpu(loss_mode: str, tmp_path: Path) -> None:
    gpu, cpu = (run_case(case(loss_mode, device=device), tmp_path) for device in ("cuda", "cpu"))
    assert gpu["metrics"] == pytest.approx(cpu["metrics"], rel=1e-3, abs=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_take_the_steps_of_one(tmp_path: Path) -> None:
    cases = [case(loss_mode, fsdp_size, device="cuda") for loss_mode in PREPARED for fsdp_size in (-1, 1)]
    ranks = run_ranks(tmp_path, cases, program=Path(update_program.__file__))
    for each in cases:
        one = run_case(each | {"micro_batch_size": 8}, tmp_path)
        for rank in ranks:
            assert rank[each["name"]]["metrics"] == pytest.approx(one["metrics"], rel=1e-3, abs=1e-5)
