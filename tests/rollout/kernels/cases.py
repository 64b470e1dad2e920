"""Where kernels are tested, caches with random content, and formulas in naive loops."""

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from burnish.rollout.native.paged_cache import LayerShape, PagedCache

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Triton's interpreter runs kernels on CPU tensors; its bf16 truncates where a GPU rounds, so half precision is fp16 there.
_interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1, see test_interpreted.py")
BACKENDS = [
    pytest.param("cpu", torch.float32, marks=_interpreted, id="interpreted-fp32"),
    pytest.param("cpu", torch.float16, marks=_interpreted, id="interpreted-fp16"),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu, id="cuda-fp32"),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu, id="cuda-bf16"),
]
on_every_backend: Callable = pytest.mark.parametrize(("device", "dtype"), BACKENDS)

on_both_cpu_backends: Callable = pytest.mark.usefixtures("cpu_backend")
"""In plain torch and compiled."""

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of values of size one."""


def assert_rounded_alike(mine: Tensor, theirs: Tensor, cpu_backend: str) -> None:
    """To the bit; but compiled, fp32 sums and exponentials may differ in their last bits, which bf16 does not show."""
    if cpu_backend == "compiled" and mine.dtype == torch.float32:
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(mine, theirs)


def normal(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    """The same numbers, up to rounding, on every device and in every dtype."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def random_cache(
    num_kv_heads: int,
    key_dim: int,
    *,
    value_dim: int | None = None,
    block_size: int = 4,
    num_blocks: int = 24,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    heads_first: bool = False,
) -> PagedCache:
    """A cache in which every place holds random numbers."""
    shape = LayerShape(num_kv_heads, key_dim, value_dim or key_dim)
    cache = PagedCache([shape] * layers, dtype, torch.device(device), block_size, heads_first=heads_first)
    cache.allocate(num_blocks)
    fill(cache)
    return cache


def fill(cache: PagedCache, seed: int = 1) -> None:
    """Random numbers in every place."""
    for layer in range(len(cache.layers)):
        for i, buffer in enumerate((cache.key(layer), cache.value(layer))):
            buffer.copy_(normal(*buffer.shape, dtype=cache.dtype, seed=seed + 2 * layer + i))


def random_tables(lengths: list[int], block_size: int, num_blocks: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Block tables and lengths, int32: distinct blocks in random order, and no block at all where none is needed."""
    width = max(-(-length // block_size) for length in lengths) + 1
    free = (1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(3))).tolist()
    # An entry that must not be read is not even a block.
    tables = torch.full((len(lengths), width), -1_000_000, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for column in range(-(-length // block_size)):
            tables[row, column] = free.pop()
    return tables.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)


def naive_attention(
    query: Tensor,
    cache: PagedCache,
    layer: int,
    tables: Tensor,
    lengths: Tensor,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Row by row and head by head in float64; [rows, num_heads, value_dim]."""
    key, value, query = (x.double().cpu() for x in (cache.key(layer), cache.value(layer), query))
    group = query.shape[1] // key.shape[2]
    out = torch.zeros(*query.shape[:2], value.shape[-1], dtype=torch.float64)
    for row, length in enumerate(lengths.tolist()):
        seen = range(max(0, length - sliding_window) if sliding_window else 0, length)
        blocks, offsets = [int(tables[row, t // cache.block_size]) for t in seen], [t % cache.block_size for t in seen]
        keys, values = key[blocks, offsets], value[blocks, offsets]
        for head in range(query.shape[1]):
            scores = keys[:, head // group] @ query[row, head] * scaling
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            weights = scores.exp()
            out[row, head] = weights @ values[:, head // group] / weights.sum()
    return out


def rope_tables(num_positions: int, head_dim: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin [num_positions, head_dim] in fp32, both halves alike."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    angles = torch.arange(num_positions).double()[:, None] * frequencies
    angles = torch.cat((angles, angles), -1)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def run_interpreted(folder: Path) -> None:
    """Runs the tests of ``folder`` in Triton's interpreter.

    In a process of its own: the variable counts when the kernels are imported, and for all of them.
    """
    version = tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
    if version < (3, 9):
        pytest.skip(f"triton {version} cannot interpret loops over loaded bounds with a recent numpy")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "interpreted", str(folder)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
