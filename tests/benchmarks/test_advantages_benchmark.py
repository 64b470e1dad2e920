"""The benchmark of the advantage estimators measures what it says."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks import advantages

ARGUMENTS = ["advantages", "--estimators", "grpo", "--rows", "64", "--tokens", "128", "--repeats", "1"]


def test_every_estimator_is_known_with_its_loop():
    assert set(advantages.ESTIMATORS) <= set(advantages.ESTIMATOR_REFERENCES)
    assert {"gae", "gdpo", "tir_optimal_token_baseline"} <= set(advantages.ESTIMATORS)


@pytest.mark.parametrize("name", advantages.ESTIMATORS)
def test_every_estimator_is_timed_and_compared_with_its_loop(name):
    figure = advantages.measure_one(name, rows=16, tokens=32, repeats=2)
    assert 0 < figure["seconds_min"] <= figure["seconds"] <= figure["seconds_max"]
    assert figure["naive_ratio"] > 0
    per_token = figure["naive_seconds"] / (64 * 128)
    assert figure["naive_ratio_per_token_extrapolated"] == pytest.approx(per_token / (figure["seconds"] / (16 * 32)))


def test_memory_is_what_a_call_holds_at_most():
    size = 64 * 2**20
    growth = advantages.peak_memory(lambda: torch.ones(size // 4).add_(1))
    assert growth is None or 0.9 * size < growth < 1.5 * size


KEEPING = """
import torch
from benchmarks import advantages
from burnish.utils import heap

size = 64 * 2**20
heap.keep_freed_memory()
for _ in range(3):
    growth = advantages.peak_memory(lambda: torch.ones(size // 4).add_(1))
    assert growth is None or 0.9 * size < growth < 1.5 * size, growth
"""


def test_memory_that_the_process_keeps_is_counted_too():
    subprocess.run([sys.executable, "-c", KEEPING], check=True, timeout=120)


@pytest.mark.parametrize("flags", [pytest.param([], marks=pytest.mark.slow), ["--json"]])
def test_it_prints_a_table_or_json(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [*ARGUMENTS, *flags])
    advantages.main()
    printed = capsys.readouterr().out
    if flags:
        result = json.loads(printed)
        assert (result["rows"], result["tokens"], list(result["figures"])) == (64, 128, ["grpo"])
        assert "torch" in result["machine"]
    else:
        assert "64 x 128 tokens in fp32" in printed
        assert "extrapolated" in printed
        assert printed.splitlines()[-1].startswith("grpo ")
