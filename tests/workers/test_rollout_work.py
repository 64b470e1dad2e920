"""What a rollout has done beside what the device could do, by hand."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from burnish.model import bandwidth
from burnish.rollout.stats import RolloutStats
from burnish.utils.machine import used_memory_bytes
from burnish.workers import rollout_work
from burnish.workers.rollout_work import RolloutWork

CONFIG = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=32, num_hidden_layers=3)
CONFIG.get_text_config = lambda: CONFIG
NUMBERS_A_TOKEN = 2 * 2 * 8 * 3


class Counter:
    """A model of 100 weights, 10 of them the head's, whose attention costs 2 operations a pair."""

    def flops(self, num_tokens, num_pairs, num_labels):
        return 2 * 90 * num_tokens + 2 * 10 * num_labels + 2 * num_pairs


def ideal(monkeypatch, prompts, lengths, num_ranks=1, **stats):
    monkeypatch.setattr(rollout_work, "device_peak_flops", lambda device, dtype: 1000.0)
    monkeypatch.setattr(rollout_work, "device_bandwidth", lambda device: 100.0)
    work = RolloutWork(Counter(), CONFIG, torch.bfloat16, torch.device("cpu"), num_ranks)
    requests = [SimpleNamespace(prompt_ids=[0] * length) for length in prompts]
    responses = [SimpleNamespace(token_ids=[0] * length) for length in lengths]
    return work.of(requests, responses, RolloutStats(**stats))


def test_operations_and_reading_are_those_of_the_tokens(monkeypatch):
    found = ideal(monkeypatch, [3, 3], [2, 4], num_steps=4, num_prefilled_tokens=3)
    # Each sampled token looks at the prompt and at those before it and itself: 4, 5 and 4, 5, 6, 7; the prompt once at itself.
    read = (4 + 5) + (4 + 5 + 6 + 7)
    operations = 2 * 90 * (3 + 6) + 2 * 10 * 6 + 2 * (read + 3 * 3 / 2)
    assert found.operation_seconds == pytest.approx(operations / 1000)
    assert found.traffic_seconds == pytest.approx((4 * 100 * 2 + read * NUMBERS_A_TOKEN * 2) / 100)


def test_ranks_of_one_engine_share_its_work(monkeypatch):
    alone = ideal(monkeypatch, [3], [2], num_steps=2, num_prefilled_tokens=2)
    shared = ideal(monkeypatch, [3], [2], num_ranks=2, num_steps=2, num_prefilled_tokens=2)
    assert shared.operation_seconds == alone.operation_seconds / 2
    assert shared.traffic_seconds == alone.traffic_seconds / 2


def test_an_engine_that_counts_nothing_has_no_utilisation(monkeypatch):
    assert ideal(monkeypatch, [3], [2]) == RolloutStats()
    assert not [name for name in RolloutStats(seconds=1.0).metrics() if name.startswith(("perf/mfu", "perf/mbu"))]


def test_utilisation_is_ideal_seconds_over_those_it_took_and_the_slowest_rank_counts():
    call = RolloutStats(seconds=2.0, decode_seconds=1.0, operation_seconds=0.2, traffic_seconds=0.5, num_steps=1)
    metrics = (call + call).metrics()
    assert (metrics["perf/mfu/rollout"], metrics["perf/mbu/rollout"]) == (pytest.approx(0.1), pytest.approx(0.5))
    slower = RolloutStats(seconds=4.0, decode_seconds=2.0, operation_seconds=0.2, traffic_seconds=0.5, num_steps=1)
    metrics = RolloutStats.of_ranks([call, slower]).metrics()
    assert (metrics["perf/mfu/rollout"], metrics["perf/mbu/rollout"]) == (pytest.approx(0.05), pytest.approx(0.25))


def test_the_memorys_bandwidth_is_measured_by_a_copy(monkeypatch):
    monkeypatch.setitem(bandwidth._COPIED_BYTES, "cpu", 1 << 20)
    bandwidth.measured_bandwidth.cache_clear()
    found = bandwidth.device_bandwidth(torch.device("cpu"))
    assert 1e6 < found < 1e13
    # Once a process.
    assert bandwidth.device_bandwidth(torch.device("cpu")) == found
    bandwidth.measured_bandwidth.cache_clear()


def test_memory_in_use_is_what_is_not_available(tmp_path: Path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\n")
    assert used_memory_bytes(file) == 600 * 1024
    assert used_memory_bytes(tmp_path / "none") is None
    file.write_text("MemTotal:       1000 kB\n")
    assert used_memory_bytes(file) is None
