"""Seconds that new weights take to reach vLLM, as a step pays them: wake the weights, copy, check, wake the cache, sleep.

    python -m benchmarks.weight_sync --json                              # CPU: tiny; GPU: qwen2.5-0.5b; both modes
    python -m benchmarks.weight_sync --model qwen2.5-1.5b --mode async --bucket-megabytes 512

One process trains (and holds the weights), the engine is beside it (``--mode sync``) or in processes of its own on the same
device (``async``). Each repeat changes every weight, hands them over as a run does, with the comparison of all fingerprints, and
samples a few tokens. On a GPU the engine sleeps at level 2 before, as between two rollouts. Figures are medians (least, greatest)
after one repeat that warms up. With ``--json`` the last line is one object with the figures of each mode under ``results``.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from burnish.utils import env

env.calm_threads()

import torch  # noqa: E402

import burnish  # noqa: E402
from benchmarks.demo import machine  # noqa: E402
from benchmarks.models import model_path  # noqa: E402
from burnish.config import load_config  # noqa: E402
from burnish.rollout import RolloutRequest, SamplingParams  # noqa: E402
from burnish.rollout.vllm.installed import vllm_version  # noqa: E402
from burnish.workers import ActorRolloutRefWorker  # noqa: E402

PARTS = ("copy", "check", "sync", "wake_cache", "sleep", "wake_sync_sleep")


def installed() -> str:
    """The distribution of vLLM and its version."""
    return " ".join(vllm_version() or ("no vLLM",))


def make_worker(name: str, mode: str, args: argparse.Namespace) -> tuple[ActorRolloutRefWorker, float]:
    """The policy's worker with its engine, and the seconds of their start."""
    rollout = "actor_rollout_ref.rollout"
    keys: dict[str, Any] = {
        "actor_rollout_ref.model.path": model_path(name),
        "actor_rollout_ref.actor.fsdp_config.dtype": args.dtype,
        f"{rollout}.name": "vllm",
        f"{rollout}.mode": mode,
        f"{rollout}.max_num_seqs": 64,
        f"{rollout}.gpu_memory_utilization": args.memory,
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": args.bucket_megabytes,
        "data.max_prompt_length": 64,
        "data.max_response_length": 64,
        "trainer.n_gpus_per_node": 1,
    }
    config = load_config([keys, *args.set], train_rows_given=True)
    start = time.perf_counter()
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, "actor_rollout", args.device, 1, 0, None)
    worker.init_model()
    return worker, time.perf_counter() - start


def one_repeat(
    worker: ActorRolloutRefWorker, version: int, seconds: Callable[[Callable[[], Any]], float]
) -> dict[str, float]:
    """The seconds of each part."""
    with torch.no_grad():
        for parameter in worker.engine.module.parameters():
            parameter.mul_(1.001)
    worker.take_rollout_stats()
    sync = seconds(lambda: worker.update_weights(version))
    stats = worker.take_rollout_stats()
    wake = seconds(worker.rollout.wake_up)
    requests = [RolloutRequest(str(index), (5, 6, 7), "u", index) for index in range(8)]
    worker.rollout.generate(requests, SamplingParams(max_new_tokens=4, ignore_eos=True))
    sleep = seconds(lambda: worker.rollout.sleep(level=2))
    return {
        "copy": stats.weight_copy_seconds,
        "check": stats.weight_check_seconds,
        "sync": sync,
        "wake_cache": wake,
        "sleep": sleep,
        "wake_sync_sleep": sync + wake + sleep,
        "gib": stats.weight_copy_bytes / 2**30,
    }


def measure(name: str, mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one model in one mode."""

    def seconds(work: Callable[[], Any]) -> float:
        _synchronise(args.device)
        start = time.perf_counter()
        work()
        _synchronise(args.device)
        return time.perf_counter() - start

    worker, start_seconds = make_worker(name, mode, args)
    try:
        repeats = [one_repeat(worker, version, seconds) for version in range(1, args.repeats + 2)][1:]
    finally:
        worker.close()
    figures: dict[str, Any] = {
        "model": name,
        "mode": mode,
        "dtype": str(worker.engine.dtype).removeprefix("torch."),
        "start_seconds": start_seconds,
        "weights_gib": repeats[-1]["gib"],
        "repeats": len(repeats),
        "load": os.getloadavg()[0],
    }
    for part in PARTS:
        values = [repeat[part] for repeat in repeats]
        figures |= {part: statistics.median(values), f"{part}_min": min(values), f"{part}_max": max(values)}
    return figures


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def table(figures: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"{figures['model']} ({figures['dtype']}, {figures['weights_gib']:.3f} GiB), mode {figures['mode']}, "
        f"{figures['repeats']} repeats, start {figures['start_seconds']:.1f} s, load {figures['load']:.1f}"
    ]
    for part in PARTS:
        lines.append(
            f"  {part:16s} {figures[part]:8.4f} s ({figures[f'{part}_min']:.4f}, {figures[f'{part}_max']:.4f})"
        )
    return "\n".join(lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--model", help="a name of benchmarks/models.py, or a folder; tiny on a CPU, qwen2.5-0.5b on a GPU"
    )
    parser.add_argument("--mode", nargs="+", choices=["sync", "async"], default=["sync", "async"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--bucket-megabytes", type=int, default=256)
    parser.add_argument("--memory", type=float, default=0.3, help="rollout.gpu_memory_utilization")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="configuration by dotted key")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args(argv)
    args.model = args.model or ("tiny" if args.device == "cpu" else "qwen2.5-0.5b")
    return args


def main() -> None:
    """Measures and prints tables, and one line of JSON if asked for."""
    args = parse()
    print(f"{machine()}, burnish {burnish.__version__}, {installed()}", flush=True)
    results = {}
    for mode in args.mode:
        results[mode] = measure(args.model, mode, args)
        print(table(results[mode]), flush=True)
    if args.json:
        print(json.dumps({"device": machine(), "vllm": installed(), "results": results}), flush=True)


if __name__ == "__main__":
    main()
