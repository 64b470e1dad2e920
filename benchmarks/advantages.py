"""Seconds and memory of every advantage estimator on a large batch, and how much faster than a naive loop it is.

    python -m benchmarks.advantages --json
    python -m benchmarks.advantages --estimators gae grpo --rows 4096 --tokens 1024

The batch: fp32, groups of 8 rows that lie interleaved, responses of a quarter of the tokens up to all of them with a gap of tool
output, the score on the last token. Each estimator runs in a process of its own. Memory is the most that the process held during
the first call, inputs included, over the size of the inputs. The naive loops (`burnish.conformance.references`, float64) run on
a small batch, and the estimator on the same one; per token the loop is also compared with the large batch, as if it went on there
at its pace.
"""

import argparse
import inspect
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.demo import machine
from burnish.config import AlgoConfig
from burnish.conformance.batches import ragged_batch
from burnish.conformance.references import ESTIMATOR_REFERENCES, ESTIMATOR_SETTINGS
from burnish.core_algos.estimators import ADV_ESTIMATORS
from burnish.utils import heap

GROUP_SIZE = 8
NAIVE_ROWS, NAIVE_TOKENS = 64, 128
SETTINGS = {"gamma": 0.99, "lam": 0.95, "num_repeat": GROUP_SIZE}
ESTIMATORS = tuple(name for name in ADV_ESTIMATORS if not name.endswith("_vectorized"))


def large_batch(names: set[str], rows: int, tokens: int) -> dict[str, Any]:
    """The entries of these names."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(max(tokens // 4, 1), tokens + 1, (rows, 1), generator=generator)
    mask = torch.arange(tokens) < lengths
    mask[:, tokens // 8 : tokens // 7] = False
    mask.scatter_(1, lengths - 1, True)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    makers: dict[str, Callable[[], Any]] = {
        "token_level_rewards": lambda: torch.zeros(rows, tokens).scatter_(1, lengths - 1, uniform(rows, 1)),
        "response_mask": lambda: mask,
        "index": lambda: np.array([f"0-{row % max(rows // GROUP_SIZE, 1)}" for row in range(rows)], dtype=object),
        "values": lambda: uniform(rows, tokens),
        "old_log_probs": lambda: uniform(rows, tokens).neg_(),
        "sum_pi_squared": lambda: uniform(rows, tokens),
        "rollout_is_weights": lambda: uniform(rows, tokens),
        "reward_baselines": lambda: uniform(rows),
        "reward_components": lambda: uniform(rows, 3),
    }
    return {name: make() for name, make in makers.items() if name in names}


def call(estimator: Callable, entries: dict[str, Any]) -> Callable[[], Any]:
    """The estimator on what it names of the entries and of the settings."""
    given = {**entries, **SETTINGS, "config": AlgoConfig()}
    arguments = {key: given[key] for key in inspect.signature(estimator).parameters if key in given}
    return lambda: estimator(**arguments)


def seconds(run: Callable[[], Any], repeats: int) -> list[float]:
    """How long each of the calls took."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return taken


def peak_memory(run: Callable[[], Any]) -> int | None:
    """Bytes that the process held at most during the call, over those before; None where the system does not say.

    What this process has freed and kept (`heap.keep_freed_memory`) is given back first: the call would use it unseen.
    """
    heap.give_back(above=0)
    status = Path("/proc/self/status")
    try:
        # 5: forget the greatest size so far.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        run()
        return None

    def of_process(field: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024

    before = of_process("VmRSS")
    run()
    return of_process("VmHWM") - before


def measure_one(name: str, rows: int, tokens: int, repeats: int) -> dict[str, float | None]:
    """The figures of one estimator."""
    estimator = ADV_ESTIMATORS.get(name)
    entries = large_batch(set(inspect.signature(estimator).parameters), rows, tokens)
    size = sum(entry.nbytes for entry in entries.values() if isinstance(entry, torch.Tensor))
    run = call(estimator, entries)
    growth = peak_memory(run)
    taken = seconds(run, repeats)
    del run, entries

    small = ragged_batch(0, (GROUP_SIZE,) * (NAIVE_ROWS // GROUP_SIZE), width=NAIVE_TOKENS).keyed()
    naive = statistics.median(seconds(lambda: ESTIMATOR_REFERENCES[name](small, ESTIMATOR_SETTINGS | SETTINGS), 3))
    same_size = statistics.median(seconds(call(estimator, small), max(repeats, 5)))
    per_token = statistics.median(taken) / (rows * tokens)
    return {
        "seconds": statistics.median(taken),
        "seconds_min": min(taken),
        "seconds_max": max(taken),
        "memory_ratio": None if growth is None else (size + growth) / size,
        "naive_seconds": naive,
        "naive_ratio": naive / same_size,
        "naive_ratio_per_token_extrapolated": naive / (NAIVE_ROWS * NAIVE_TOKENS) / per_token,
    }


def measure(names: list[str], rows: int, tokens: int, repeats: int) -> dict[str, Any]:
    """The machine, the sizes, and the figures of each estimator."""
    spawn = multiprocessing.get_context("spawn")
    figures = {}
    for name in names:
        with ProcessPoolExecutor(1, mp_context=spawn) as process:
            figures[name] = process.submit(measure_one, name, rows, tokens, repeats).result()
    return {
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "rows": rows,
        "tokens": tokens,
        "repeats": repeats,
        "naive_rows": NAIVE_ROWS,
        "naive_tokens": NAIVE_TOKENS,
        "figures": figures,
    }


def table(result: dict[str, Any]) -> str:
    """The figures, for people."""
    size, small = f"{result['rows']} x {result['tokens']}", f"{result['naive_rows']} x {result['naive_tokens']}"
    lines = [
        f"{result['machine']}, {result['threads']} threads",
        f"{size} tokens in fp32, median of {result['repeats']} calls (least, greatest)",
        f"{'':30} {'seconds':>24} {'memory / inputs':>16} {f'loop at {small}':>18} {'loop per token, extrapolated':>30}",
    ]
    for name, figure in result["figures"].items():
        spread = f"{figure['seconds']:.3f} ({figure['seconds_min']:.3f}, {figure['seconds_max']:.3f})"
        memory = "-" if figure["memory_ratio"] is None else f"{figure['memory_ratio']:.2f}"
        loop, extrapolated = figure["naive_ratio"], figure["naive_ratio_per_token_extrapolated"]
        lines.append(f"{name:30} {spread:>24} {memory:>16} {f'{loop:.0f} x':>18} {f'{extrapolated:.0f} x':>30}")
    return "\n".join(lines)


def main() -> None:
    """Measures and prints a table, or one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--estimators", nargs="+", choices=ESTIMATORS, default=list(ESTIMATORS), metavar="NAME")
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.estimators, args.rows, args.tokens, args.repeats)
    print(json.dumps(result) if args.json else table(result))


if __name__ == "__main__":
    main()
