"""Microseconds and memory bandwidth of the native rollout's kernels, and how far they are from their plain torch twins.

    python -m benchmarks.kernels --json
    python -m benchmarks.kernels --rows 64 1024 --context 2048
    python -m benchmarks.kernels --training

On a GPU: the Qwen2.5-0.5B shape in bf16 (hidden 896, 14 query heads, 2 key heads of 64 dims, MLP 4864), blocks of 32 tokens.
Each call is captured in a CUDA graph as in decoding; attention goes through as many layers as keep the cache out of L2,
everything else finds its input in L2, as after the operation before it. The bandwidth counts every input and output once, and is
compared with a copy's. Decode attention is timed with every candidate tiling at the most rows, and the best of them with every
number of splits; ``chosen`` is what the engine would take. On a CPU: the twins at the SmolLM2-135M shape, 64 rows, 128 tokens.

``--training``: instead the elementwise kernels of training, forward and backward, at the Qwen2.5-0.5B and 1.5B and the Qwen3-0.6B
shape, 16,384 tokens on a GPU; on a CPU the twins at the SmolLM2-135M shape, 1,024 tokens. Nothing stays in L2 between calls.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.demo import machine
from burnish.model import kernels as training
from burnish.model.kernels.activation import silu_mul_backward_torch, silu_mul_torch
from burnish.model.kernels.norm import rms_norm_backward_torch, rms_norm_torch
from burnish.model.kernels.rotary import rotate_backward_torch, rotate_torch
from burnish.rollout.native import kernels
from burnish.rollout.native.kernels.decode_attention import decode_attention_torch
from burnish.rollout.native.kernels.rotary import rotate_and_store_torch
from burnish.rollout.native.paged_cache import LayerShape, PagedCache

REPEATS = 25
OUT_OF_L2 = 256 * 2**20
TILES = [(32, 1), (32, 2), (32, 4), (64, 1), (64, 2), (64, 4), (128, 2), (128, 4), (128, 8)]
"""Tokens a tile, warps."""
STAGES = [2, 3, 5]
SPLITS = [1, 2, 4, 8]


class Shape(NamedTuple):
    """Of one layer."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int


QWEN_05B = Shape(896, 14, 2, 64, 4864)
QWEN_15B = Shape(1536, 12, 2, 128, 8960)
QWEN3_06B = Shape(1024, 16, 8, 128, 3072)
LLAMA_8B = Shape(4096, 32, 8, 128, 14336)
SMOLLM_135M = Shape(576, 9, 3, 64, 1536)


class Decoding(NamedTuple):
    """The inputs of a decode step's attention, for all layers."""

    query: Tensor
    cache: PagedCache
    tables: Tensor
    lengths: Tensor

    @property
    def nbytes(self) -> int:
        """Read and written in one layer."""
        shape = self.cache.layers[0]
        token = self.cache.dtype.itemsize * shape.num_kv_heads * (shape.key_dim + shape.value_dim)
        return int(self.lengths.sum()) * token + 2 * self.query.nbytes


def decoding(shape: Shape, lengths: Tensor, *, block_size: int, layers: int, dtype: torch.dtype) -> Decoding:
    """Random keys and values; a row's blocks lie scattered unless a block holds the whole row."""
    rows, width = len(lengths), -(-int(lengths.max()) // block_size)
    device = lengths.device
    layer = LayerShape(shape.num_kv_heads, shape.head_dim, shape.head_dim)
    cache = PagedCache([layer] * layers, dtype, device, block_size)
    cache.allocate(1 + rows * width)
    for i in range(layers):
        cache.key(i).normal_()
        cache.value(i).normal_()
    blocks = torch.arange(rows * width, device=device)
    if width > 1:
        blocks = blocks[torch.randperm(rows * width, device=device)]
    query = torch.randn(rows, shape.num_heads, shape.head_dim, device=device).to(dtype)
    return Decoding(query, cache, (1 + blocks).view(rows, width).int(), lengths.int())


def graph_us(calls: list[Callable[[], Any]]) -> float:
    """Median microseconds of a call, all of them captured in one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    taken = []
    for _ in range(REPEATS + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(taken[3:])


def host_us(call: Callable[[], Any]) -> float:
    """Median microseconds of a call on the CPU."""
    taken = []
    for _ in range(REPEATS + 3):
        begin = time.perf_counter()
        call()
        taken.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(taken[3:])


def copy_bandwidth() -> float:
    """GB/s of a copy inside the GPU, read and written bytes counted."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_us([lambda: target.copy_(source)] * 4) / 1000


def simple_calls(shape: Shape, rows: int, dtype: torch.dtype, device: str) -> dict[str, dict[str, Any]]:
    """For every kernel but attention: the call, its twin, and the bytes that it reads and writes."""

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device).to(dtype)

    x, residual, weight = normal(rows, shape.hidden), normal(rows, shape.hidden), normal(shape.hidden)
    gate_up = normal(rows, 2 * shape.intermediate)
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    qkv = normal(rows, (heads + 2 * kv_heads) * dim)
    angles = torch.rand(4096, dim // 2, device=device).repeat(1, 2) * 6
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(4096, (rows,), device=device)
    cache = PagedCache([LayerShape(kv_heads, dim, dim)], dtype, torch.device(device), 32)
    cache.allocate(rows + 1)
    places = 32 * torch.arange(1, rows + 1, device=device)
    key, value = normal(rows, kv_heads, dim), normal(rows, kv_heads, dim)

    def rotated(operation: Callable[..., Any], norm: Tensor | None) -> Callable[[], Any]:
        mine = qkv.clone()

        def call() -> Tensor:
            operation(mine, cos, sin, positions, cache, 0, places, heads, kv_heads, norm, norm, 1e-6)
            return mine

        return call

    head_norm = normal(dim)
    row = dtype.itemsize * rows
    return {
        "rms_norm with residual": {
            "call": lambda: kernels.rms_norm(x, weight, 1e-6, residual),
            "twin": lambda: rms_norm_torch(x, weight, 1e-6, residual)[:2],
            "bytes": 4 * row * shape.hidden,
        },
        "silu_mul": {
            "call": lambda: kernels.silu_mul(gate_up),
            "twin": lambda: silu_mul_torch(gate_up),
            "bytes": 3 * row * shape.intermediate,
        },
        "rotate_and_store": {
            "call": rotated(kernels.rotate_and_store, None),
            "twin": rotated(rotate_and_store_torch, None),
            "bytes": row * (2 * heads + 5 * kv_heads) * dim + 8 * rows * dim,
        },
        "rotate_and_store with norms": {
            "call": rotated(kernels.rotate_and_store, head_norm),
            "twin": rotated(rotate_and_store_torch, head_norm),
            "bytes": row * (2 * heads + 5 * kv_heads) * dim + 8 * rows * dim,
        },
        "store": {
            "call": lambda: kernels.store(cache, 0, places, key, value),
            "twin": None,
            "bytes": 4 * row * kv_heads * dim,
        },
        "gather": {"call": lambda: kernels.gather(cache, 0, places), "twin": None, "bytes": 4 * row * kv_heads * dim},
    }


def furthest(mine: Any, twin: Any) -> float:
    """The largest difference of two tensors, or of two tuples of them."""
    pairs = zip(mine, twin, strict=True) if isinstance(mine, tuple) else [(mine, twin)]
    return max(float((a.float() - b.float()).abs().max()) for a, b in pairs)


def time_simple(shape: Shape, rows: int, dtype: torch.dtype, device: str) -> list[dict[str, Any]]:
    """Every kernel but attention."""
    results = []
    for name, kernel in simple_calls(shape, rows, dtype, device).items():
        result = {"kernel": name, "rows": rows, "dtype": str(dtype).removeprefix("torch.")}
        if device == "cuda":
            if kernel["twin"] is not None:
                result["furthest_from_twin"] = furthest(kernel["call"](), kernel["twin"]())
            result["us"] = graph_us([kernel["call"]] * 20)
        else:
            result["us"] = host_us(kernel["call"])
        result["gb_per_s"] = kernel["bytes"] / result["us"] / 1000
        results.append(result)
    return results


def training_calls(shape: Shape, tokens: int, dtype: torch.dtype, device: str) -> dict[str, dict[str, Any]]:
    """For every elementwise kernel of training: the call, its twin, and the bytes that it reads and writes."""

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device).to(dtype)

    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    x, residual, grad = (normal(tokens, shape.hidden) for _ in range(3))
    weight, rstd = normal(shape.hidden), torch.rand(tokens, device=device) + 0.5
    gate_up, product = normal(tokens, 2 * shape.intermediate), normal(tokens, shape.intermediate)
    qkv = normal(tokens, (heads + 2 * kv_heads) * dim)
    angles = 6 * torch.rand(tokens, dim // 2, device=device).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    grads = normal(tokens, heads, dim), normal(tokens, kv_heads, dim), normal(tokens, kv_heads, dim)
    norms = training.HeadNorms(normal(dim), normal(dim), 1e-6)
    row, turned = dtype.itemsize * tokens, (heads + kv_heads) * dim
    # In place, a call would time, and compare, what the one before left.
    twice = qkv.clone(), qkv.clone(), product.clone(), product.clone()
    return {
        "rms_norm with residual": {
            "call": lambda: training.rms_norm(x, weight, 1e-6, residual),
            "twin": lambda: rms_norm_torch(x, weight, 1e-6, residual),
            "bytes": 4 * row * shape.hidden,
        },
        "rms_norm_backward": {
            "call": lambda: training.rms_norm_backward(grad, x, rstd, weight, residual, again=True),
            "twin": lambda: rms_norm_backward_torch(grad, x, rstd, weight, residual, again=True),
            "bytes": 5 * row * shape.hidden,
        },
        "silu_mul": {
            "call": lambda: training.silu_mul(gate_up),
            "twin": lambda: silu_mul_torch(gate_up),
            "bytes": 3 * row * shape.intermediate,
        },
        "silu_mul_backward": {
            "call": lambda: training.silu_mul_backward(twice[2], gate_up),
            "twin": lambda: silu_mul_backward_torch(twice[3], gate_up),
            "bytes": 6 * row * shape.intermediate,
        },
        "rotate": {
            "call": lambda: training.rotate(twice[0], cos, sin, heads, kv_heads)[0],
            "twin": lambda: rotate_torch(twice[1], cos, sin, heads, kv_heads, None)[:, :heads],
            "bytes": 2 * row * (turned + dim),
        },
        "rotate_backward": {
            "call": lambda: training.rotate_backward(grads, cos, sin)[0],
            "twin": lambda: rotate_backward_torch(grads, cos, sin, None, None)[0],
            "bytes": 2 * row * (turned + (kv_heads + 1) * dim),
        },
        "rotate with norms": {
            "call": lambda: training.rotate(qkv, cos, sin, heads, kv_heads, norms)[0],
            "twin": lambda: rotate_torch(qkv, cos, sin, heads, kv_heads, norms)[:, :heads],
            "bytes": 2 * row * (turned + dim),
        },
        "rotate_backward with norms": {
            "call": lambda: training.rotate_backward(grads, cos, sin, qkv, norms)[0],
            "twin": lambda: rotate_backward_torch(grads, cos, sin, qkv, norms)[0],
            "bytes": row * (3 * turned + 2 * (kv_heads + 1) * dim),
        },
    }


def time_training(on_device: bool) -> dict[str, Any]:
    """The elementwise kernels of training."""
    if not on_device:
        calls = {dtype: training_calls(SMOLLM_135M, 1024, dtype, "cpu") for dtype in (torch.float32, torch.bfloat16)}
        return {
            "kernels": [
                figures(name, kernel, 1024, dtype, host_us(kernel["call"]))
                for dtype, kernels_of_dtype in calls.items()
                for name, kernel in kernels_of_dtype.items()
            ]
        }
    tokens, dtype, results = 16384, torch.bfloat16, []
    for model, shape in {"0.5B": QWEN_05B, "1.5B": QWEN_15B, "Qwen3-0.6B": QWEN3_06B}.items():
        # Flushes L2 between two calls, and is timed by itself.
        flush = torch.empty(OUT_OF_L2, dtype=torch.uint8, device="cuda")
        alone = graph_us([flush.zero_] * 4)
        for name, kernel in training_calls(shape, tokens, dtype, "cuda").items():
            error = furthest(kernel["call"](), kernel["twin"]())
            us = 2 * graph_us([kernel["call"], flush.zero_] * 4) - alone
            result = figures(f"{model} {name}", kernel, tokens, dtype, us)
            results.append({**result, "furthest_from_twin": error})
    candidates = {
        model: training_candidates(shape, tokens, dtype) for model, shape in (("0.5B", QWEN_05B), ("1.5B", QWEN_15B))
    }
    return {"copy_gb_per_s": copy_bandwidth(), "kernels": results, "training_candidates": candidates}


def training_candidates(shape: Shape, tokens: int, dtype: torch.dtype) -> dict[str, list[dict[str, Any]]]:
    """Microseconds of the larger kernels of training in other layouts than their own; the fastest first."""
    from burnish.model.kernels.gpu import activation, norm
    from burnish.model.kernels.gpu.launch import Shared, Tile

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda").to(dtype)

    x, residual, grad = (normal(tokens, shape.hidden) for _ in range(3))
    weight, rstd = normal(shape.hidden), torch.rand(tokens, device="cuda") + 0.5
    gate_up, product = normal(tokens, 2 * shape.intermediate), normal(tokens, shape.intermediate)
    tiles = [Tile(*tile) for tile in ((512, 2), (512, 4), (1024, 4), (1024, 8), (2048, 8), (2048, 4))]
    shared = [Shared(*how) for how in itertools.product((1, 2, 4, 8, 16), (2, 4, 8), (1, 2, 3))]
    calls: dict[str, dict[Any, Callable[[], Any]]] = {
        "rms_norm": {
            num_warps: partial(norm.rms_norm, x, weight, 1e-6, residual, num_warps=num_warps)
            for num_warps in (1, 2, 4, 8)
        },
        "rms_norm_backward": {
            how: partial(norm.rms_norm_backward, grad, x, rstd, weight, residual, again=True, shared=how)
            for how in shared
        },
        "silu_mul": {tile: partial(activation.silu_mul, gate_up, tile=tile) for tile in tiles},
        "silu_mul_backward": {
            tile: partial(activation.silu_mul_backward, product, gate_up, tile=tile) for tile in tiles
        },
    }
    # Each call's tensors are larger than L2.
    timed = {
        name: [{"layout": how, "us": graph_us([call] * 3)} for how, call in of.items()] for name, of in calls.items()
    }
    return {name: sorted(results, key=lambda result: result["us"]) for name, results in timed.items()}


def figures(name: str, kernel: dict[str, Any], rows: int, dtype: torch.dtype, us: float) -> dict[str, Any]:
    """Of one timed kernel."""
    precision = str(dtype).removeprefix("torch.")
    return {"kernel": name, "rows": rows, "dtype": precision, "us": us, "gb_per_s": kernel["bytes"] / us / 1000}


class AttentionTimer:
    """Decode attention of one shape on the GPU."""

    def __init__(self, shape: Shape, dtype: torch.dtype, ceiling: float) -> None:
        self.shape, self.dtype, self.ceiling = shape, dtype, ceiling

    def inputs(self, lengths: Tensor) -> Decoding:
        """Enough layers that none is in L2 when it is read."""
        token = 2 * self.dtype.itemsize * self.shape.num_kv_heads * self.shape.head_dim
        layers = min(max(2, -(-OUT_OF_L2 // (int(lengths.sum()) * token))), 48)
        return decoding(self.shape, lengths, block_size=32, layers=layers, dtype=self.dtype)

    def time(self, name: str, given: Decoding, num_splits: int, tiling: Any) -> dict[str, Any] | None:
        """None: the tiling needs more shared memory or registers than there are."""
        from triton.runtime.errors import OutOfResources

        from burnish.rollout.native.kernels.gpu.decode_attention import decode_attention

        how: dict[str, Any] = {"scaling": self.shape.head_dim**-0.5, "num_splits": num_splits, "tiling": tiling}

        def call(layer: int) -> Tensor:
            return decode_attention(given.query, given.cache, layer, given.tables, given.lengths, **how)

        try:
            us = graph_us([lambda i=i: call(i) for i in range(len(given.cache.layers))])  # type: ignore[misc]
        except OutOfResources:
            return None
        return {
            "case": name,
            "splits": num_splits,
            "tiling": list(tiling),
            "us": us,
            "gb_per_s": given.nbytes / us / 1000,
            "of_copy": given.nbytes / us / 1000 / self.ceiling,
        }

    def furthest_from_twin(self) -> float:
        """On rows of 1 to 300 tokens, with and without a window, for several numbers of splits."""
        lengths = torch.randint(1, 301, (50,), device="cuda")
        given = decoding(self.shape, lengths, block_size=32, layers=1, dtype=self.dtype)
        step = kernels.DecodeStep(given.tables, given.lengths, 32)
        errors = []
        for window, softcap, num_splits in ((None, None, 1), (None, None, 4), (100, None, 3), (None, 5.0, 2)):
            how: dict[str, Any] = {"scaling": 0.2, "sliding_window": window, "softcap": softcap}
            mine = kernels.decode_attention(
                given.query, given.cache, 0, given.tables, given.lengths, num_splits=num_splits, **how
            )
            errors.append(furthest(mine, decode_attention_torch(given.query, given.cache, 0, step, **how)))
        return max(errors)

    def run(self, all_rows: list[int], context: int, tiles: list[tuple[int, int]], stages: list[int]) -> dict[str, Any]:
        """Every tiling at the most rows, then the three best and the engine's own with every number of splits."""
        from burnish.rollout.native.kernels.gpu.decode_attention import Tiling, tiling_for

        def full(rows: int) -> Decoding:
            return self.inputs(torch.full((rows,), context, device="cuda"))

        given = full(max(all_rows))
        tilings = [Tiling(*tile, num_stages) for tile, num_stages in itertools.product(tiles, stages)]
        timed = [self.time(f"{max(all_rows)} rows", given, 1, tiling) for tiling in tilings]
        results = sorted((result for result in timed if result), key=lambda result: result["us"])
        own = tiling_for(self.dtype, self.shape.head_dim, self.shape.num_heads // self.shape.num_kv_heads)
        best = dict.fromkeys([own, *(Tiling(*result["tiling"]) for result in results[:3])])
        chosen = []
        for rows in sorted(all_rows):
            given = full(rows)
            splits = kernels.num_splits_for(rows, self.shape.num_kv_heads, context)
            chosen.append(self.time(f"{rows} rows", given, splits, own))
            pairs = itertools.product(best, SPLITS)
            timed = [self.time(f"{rows} rows", given, num, tiling) for tiling, num in pairs]
            results += [result for result in timed if result]
        ragged = torch.randint(1, 2 * context, (max(all_rows),), device="cuda")
        chosen.append(self.time(f"{max(all_rows)} rows of 1 to {2 * context - 1}", self.inputs(ragged), 1, own))
        return {
            "shape": self.shape._asdict(),
            "furthest_from_twin": self.furthest_from_twin(),
            "chosen": chosen,
            "candidates": results,
        }


def on_gpu(all_rows: list[int], context: int) -> dict[str, Any]:
    """All kernels, timed on the GPU."""
    dtype, ceiling = torch.bfloat16, copy_bandwidth()
    simple = [result for rows in all_rows for result in time_simple(QWEN_05B, rows, dtype, "cuda")]
    attention = AttentionTimer(QWEN_05B, dtype, ceiling).run(all_rows, context, TILES, STAGES)
    wide = AttentionTimer(LLAMA_8B, dtype, ceiling).run([256], context, TILES[1:8], STAGES[1:])
    return {"copy_gb_per_s": ceiling, "kernels": simple, "decode_attention": [attention, wide]}


def on_cpu(context: int) -> dict[str, Any]:
    """The twins, timed on the CPU."""
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        results += time_simple(SMOLLM_135M, 64, dtype, "cpu")
        for name, block_size in (("contiguous", context + 64), ("gathered", 32)):
            given = decoding(
                SMOLLM_135M, torch.full((64,), context), block_size=block_size, layers=1, dtype=dtype
            )  # fmt: skip
            step = kernels.DecodeStep(given.tables, given.lengths, block_size)
            us = host_us(
                lambda given=given, step=step: kernels.decode_attention(  # type: ignore[misc]
                    given.query, given.cache, 0, given.tables, given.lengths, scaling=0.125, step=step
                )
            )
            results.append(
                {
                    "kernel": f"decode_attention, {name}",
                    "rows": 64,
                    "dtype": str(dtype).removeprefix("torch."),
                    "us": us,
                    "gb_per_s": given.nbytes / us / 1000,
                }
            )
    return {"kernels": results}


def show(report: dict[str, Any]) -> None:
    """The report as lines."""
    print(report["machine"])
    if "copy_gb_per_s" in report:
        print(f"copy: {report['copy_gb_per_s']:.0f} GB/s")
    for result in report["kernels"]:
        error = f"{result['furthest_from_twin']:9.4f} from its twin" if "furthest_from_twin" in result else ""
        figures = f"{result['us']:9.1f} us {result['gb_per_s']:7.0f} GB/s{error}"
        print(f"{result['kernel']:37} {result['rows']:5} rows {result['dtype']:8} {figures}")
    for model, of_kernel in report.get("training_candidates", {}).items():
        for name, timed in of_kernel.items():
            shown = ", ".join(f"{result['layout']!s} {result['us']:.1f}" for result in (*timed[:6], timed[-1]))
            print(f"{model} {name}, us: {shown}")
    for attention in report.get("decode_attention", ()):
        print(f"\ndecode_attention {attention['shape']}, {attention['furthest_from_twin']:.4f} from its twin")
        for title in ("chosen", "candidates"):
            print(f"  {title}:")
            for result in sorted(filter(None, attention[title]), key=lambda result: (result["case"], result["us"])):
                print(
                    f"    {result['case']:28} {result['splits']} splits, tiling {result['tiling']!s:14} {result['us']:8.1f} us"
                    f" {result['gb_per_s']:6.0f} GB/s, {result['of_copy']:.0%} of a copy"
                )


def main() -> None:
    """Command line."""
    on_device = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024], help="on a GPU")
    parser.add_argument("--context", type=int, default=512 if on_device else 128)
    parser.add_argument("--training", action="store_true", help="the kernels of training instead")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    start = time.perf_counter()
    with torch.no_grad():
        if given.training:
            report = time_training(on_device)
        else:
            report = on_gpu(given.rows, given.context) if on_device else on_cpu(given.context)
    report = {"machine": machine(), **report, "seconds": time.perf_counter() - start}
    if given.json:
        print(json.dumps(report))
    else:
        show(report)


if __name__ == "__main__":
    main()
