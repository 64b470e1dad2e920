"""Seconds of the metrics of a validation, and how much faster they are than a thousand random draws a prompt.

    python -m benchmarks.validation_metrics --json
    python -m benchmarks.validation_metrics --prompts 500 --samples 8 --variables 3

The batch: two data sources, an accuracy, answers that are voted on, and further numbers of the reward function. The naive way
draws every statistic anew with replacement, a thousand times for each prompt, variable and k, in Python and numpy; it is timed on
a few prompts and extrapolated to all, since each prompt costs the same.
"""

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.demo import machine
from burnish.protocol import DataProto, object_array
from burnish.trainer.ppo.validation import validation_metrics

NUM_DRAWS = 1000
NAIVE_PROMPTS = 5
MAX_LENGTH = 512


def validation_batch(prompts: int, samples: int, variables: int) -> DataProto:
    """Scored rows; half of the prompts come from each source, and some five answers to each prompt are common."""
    generator = np.random.default_rng(0)
    num = prompts * samples
    right = generator.random(num) < 0.4
    lengths = torch.from_numpy(generator.integers(1, MAX_LENGTH + 1, (num, 1)))
    scores = torch.zeros(num, MAX_LENGTH)
    scores[:, 0] = torch.from_numpy(right.astype(np.float32))
    extras: dict[str, np.ndarray] = {
        "acc": object_array(right.tolist()),
        "pred": object_array(
            ["right" if ok else f"wrong {i}" for ok, i in zip(right, generator.integers(0, 5, num), strict=True)]
        ),
    }
    extras |= {f"extra_{i}": object_array(generator.random(num).tolist()) for i in range(variables)}
    return DataProto.from_dict(
        tensors={
            "token_level_scores": scores,
            "valid": torch.ones(num, dtype=torch.bool),
            "response_mask": torch.arange(MAX_LENGTH) < lengths,
        },
        non_tensors={
            "uid": object_array([f"val-{row // samples}" for row in range(num)]),
            "data_source": object_array([f"source-{row // samples % 2}" for row in range(num)]),
            **extras,
        },
        meta_info={"reward_extra_keys": list(extras)},
    )


def naive_seconds(batch: DataProto, samples: int, variables: int) -> float:
    """Seconds a prompt of the random draws."""
    generator = np.random.default_rng(0)
    others = batch.non_tensor_batch
    start = time.perf_counter()
    for prompt in range(NAIVE_PROMPTS):
        rows = slice(prompt * samples, (prompt + 1) * samples)
        answers = others["pred"][rows]
        for name in ("acc", "acc", *(f"extra_{i}" for i in range(variables))):
            values = others[name][rows].astype(float)
            for k in (2**power for power in range(1, samples.bit_length())):
                for _ in range(NUM_DRAWS):
                    drawn = generator.choice(samples, k, replace=True)
                    np.max(values[drawn]), np.min(values[drawn])
                    votes: dict[str, list[float]] = {}
                    for row in drawn:
                        votes.setdefault(answers[row], []).append(values[row])
                    max(votes.values(), key=len)[0]
    return (time.perf_counter() - start) / NAIVE_PROMPTS


def measure(prompts: int, samples: int, variables: int, repeats: int) -> dict[str, Any]:
    """Figures of one size."""
    batch = validation_batch(prompts, samples, variables)
    taken, metrics = [], {}
    for _ in range(repeats):
        start = time.perf_counter()
        metrics = validation_metrics(batch, MAX_LENGTH)
        taken.append(time.perf_counter() - start)
    naive = naive_seconds(batch, samples, variables) * prompts
    return {
        "prompts": prompts,
        "samples": samples,
        "variables": variables + 2,
        "metrics": len(metrics),
        "seconds": statistics.median(taken),
        "seconds_min": min(taken),
        "seconds_max": max(taken),
        "naive_seconds_extrapolated": naive,
        "naive_ratio": naive / statistics.median(taken),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--variables", type=int, default=2, help="numbers that the reward function returns beside acc")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = measure(arguments.prompts, arguments.samples, arguments.variables, arguments.repeats)
    if arguments.json:
        print(json.dumps({"machine": machine(), **figures}))
        return
    print(
        f"{figures['prompts']} prompts x {figures['samples']} samples, {figures['variables']} variables: "
        f"{figures['seconds']:.3f} s ({figures['seconds_min']:.3f}, {figures['seconds_max']:.3f}) for {figures['metrics']} "
        f"metrics; {NUM_DRAWS} draws each take {figures['naive_seconds_extrapolated']:.1f} s, "
        f"{figures['naive_ratio']:.0f} times as long"
    )


if __name__ == "__main__":
    main()
