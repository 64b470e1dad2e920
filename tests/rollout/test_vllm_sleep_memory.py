"""What vLLM's allocator for sleep is left with when an engine of this process ends, on a fake of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from burnish.rollout.vllm.sleep_memory import let_go


@dataclass
class Pool:
    free: list[int]
    held: list[int]

    def snapshot(self) -> list[dict[str, int]]:
        sizes = [(address, 0) for address in self.free] + [(address, 8) for address in self.held]
        return [{"address": address, "allocated_size": size} for address, size in sizes]


@dataclass
class Allocator:
    """As vLLM's ``CuMemAllocator``, of which ``unmap_and_release`` may be called once for what is mapped."""

    allocator_and_pools: dict[str, Any]
    pointer_to_data: dict[int, Any]
    unmapped: list[int] = field(default_factory=list)

    def _python_free_callback(self, address: int) -> tuple[int, int]:
        self.pointer_to_data.pop(address)
        return (address, 1 << 20)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """Weights at 1 and 2, a cache at 3; somebody still has 2."""
    made = Allocator(
        {"weights": (Pool([1], [2]), None), "kv_cache": [(Pool([3], []), None)]},
        {address: SimpleNamespace(tag="weights" if address < 3 else "kv_cache") for address in (1, 2, 3)},
    )
    module = SimpleNamespace(
        CuMemAllocator=SimpleNamespace(instance=made),
        unmap_and_release=lambda handle: made.unmapped.append(handle[0]),
    )
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", module)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


def test_what_is_free_is_given_back_and_what_somebody_has_stays_mapped(
    allocator: Allocator, caplog: pytest.LogCaptureFixture
) -> None:
    let_go()
    assert allocator.unmapped == [1, 3]
    assert allocator.pointer_to_data == allocator.allocator_and_pools == {}
    assert "are still referred to" in caplog.text


def test_what_sleeps_is_unmapped_already(allocator: Allocator) -> None:
    let_go({"kv_cache"})
    assert allocator.unmapped == [1]
    assert not allocator.pointer_to_data


def test_without_a_gpu_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm.device_allocator.cumem", raising=False)
    let_go()
