"""How long a checkpoint takes, and how much of it training waits for.

    python -m benchmarks.checkpoint --model tiny smollm2-shape
    python -m benchmarks.checkpoint --model --demo 8

A step here is the pass for old log-probs and one update of ``--rows`` rows; a whole step samples them too, so the shares are
upper bounds. ``save_s`` is a save that training waits for, everything synced to the disk. ``blocking_s`` is what training waits
for with `async_save` (the first save takes memory for the copies, so it is told apart) and ``share`` that of a step;
``writing_s`` is what the thread takes where nothing else runs, and ``step_while_writing_s`` a step beside it. ``load_s`` is
resuming. ``--demo``: real runs of the tiny demo, a checkpoint every step; medians of ``timing_s/save_checkpoint`` and
``timing_s/step``.
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from burnish.utils import env

env.calm_threads()

import torch  # noqa: E402
from transformers import LlamaConfig, PreTrainedConfig  # noqa: E402

import burnish  # noqa: E402
from benchmarks.demo import TINY_MODEL, machine  # noqa: E402
from benchmarks.models import SHAPES  # noqa: E402
from burnish.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from burnish.engine import FSDPEngine  # noqa: E402
from burnish.model.load import build_causal_lm  # noqa: E402
from burnish.protocol import DataProto  # noqa: E402
from burnish.workers.losses import make_policy_loss  # noqa: E402

EVERYTHING = ("model", "optimizer", "extra")


def smollm2() -> PreTrainedConfig:
    """The shape of SmolLM2-135M."""
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


MODELS: dict[str, Callable[[], PreTrainedConfig]] = {**SHAPES, "smollm2-shape": smollm2}


def make_engine(name: str, dtype: str, device: str) -> FSDPEngine:
    """An engine with random weights."""
    return FSDPEngine(
        HFModelConfig(enable_gradient_checkpointing="auto"),
        FSDPEngineConfig(dtype=dtype),
        FSDPOptimizerConfig(lr=1e-5),
        device=device,
        total_training_steps=100,
        model=build_causal_lm(MODELS[name](), torch.float32),
    )


def make_rows(num_rows: int, num_tokens: int) -> DataProto:
    """Rows of random ids, half prompt and half response."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 40000, (num_rows, num_tokens), generator=generator)
    response = num_tokens - num_tokens // 2
    ones = torch.ones(num_rows, response)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "responses": ids[:, -response:],
            "response_mask": ones.bool(),
            "loss_mask": ones.bool(),
            "advantages": torch.randn(num_rows, response, generator=generator),
            "old_log_probs": -10 * ones,
        }
    )


def timed(do: Callable[[], object]) -> float:
    """Seconds of a call."""
    started = time.perf_counter()
    do()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures of one model."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine, rows, number = make_engine(name, args.dtype, device), make_rows(args.rows, args.tokens), 0
    loss = make_policy_loss(FSDPActorConfig())

    def step() -> None:
        nonlocal number
        number += 1
        engine.infer_batch(rows, max_token_len=4096)
        engine.train_batch(rows, loss, outputs=("log_probs", "entropy", "top1_log_probs"), max_token_len=4096)
        engine.optimizer_step(number)

    step()
    steps = [timed(step) for _ in range(args.repeats)]
    saves = [timed(lambda: engine.save_checkpoint(folder / "sync", EVERYTHING)) for _ in range(args.repeats)]
    before = memory_gib()
    blocking, writing, beside = [], [], []
    for _ in range(args.repeats + 1):
        blocking.append(timed(lambda: engine.save_checkpoint(folder / "async", EVERYTHING, blocking=False)))
        writing.append(timed(lambda: engine.checkpoint_written(wait=True)))
        engine.save_checkpoint(folder / "async", EVERYTHING, blocking=False)
        beside.append(timed(step))
        engine.checkpoint_written(wait=True)
    loads = [timed(lambda: engine.load_checkpoint(folder / "sync", EVERYTHING)) for _ in range(args.repeats)]
    size = sum(file.stat().st_size for file in (folder / "sync").rglob("*") if file.is_file())
    step_s, blocking_s = statistics.median(steps), statistics.median(blocking[1:])
    return {
        "model": name,
        "dtype": args.dtype,
        "parameters": sum(parameter.numel() for parameter in engine.module.parameters()),
        "tokens_a_step": args.rows * args.tokens,
        "checkpoint_mb": round(size / 1e6, 1),
        "step_s": round(step_s, 3),
        "save_s": round(statistics.median(saves), 3),
        "first_blocking_s": round(blocking[0], 4),
        "blocking_s": round(blocking_s, 4),
        "share": round(blocking_s / step_s, 4),
        "step_while_writing_s": round(statistics.median(beside[1:]), 3),
        "writing_s": round(statistics.median(writing[1:]), 3),
        "load_s": round(statistics.median(loads), 3),
        "copies_mb": round(engine._checkpoint._memory.num_bytes / 1e6, 1),
        "peak_memory_gib": [round(before, 2), round(memory_gib(), 2)],
    }


def memory_gib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def demo(steps: int) -> dict[str, Any]:
    """The tiny demo with a checkpoint every step: saved while it waits, and in the background."""
    found: dict[str, Any] = {"model": "the tiny demo, whole steps"}
    for name, in_background in (("save_s", False), ("blocking_s", True)):
        with tempfile.TemporaryDirectory() as folder:
            burnish.train(
                model=str(TINY_MODEL / "model"),
                dataset=str(TINY_MODEL / "data" / "train.jsonl"),
                recipe="demo",
                actor_rollout_ref={"actor": {"checkpoint": {"async_save": in_background}}},
                trainer={
                    "total_training_steps": steps + 1,
                    "default_local_dir": folder,
                    "logger": ["file"],
                    "save_freq": 1,
                    "max_actor_ckpt_to_keep": 2,
                },
            )
            lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        # The first step warms up.
        saves = [line["timing_s/save_checkpoint"] for line in lines[1:] if "timing_s/save_checkpoint" in line]
        found[name] = round(statistics.median(saves), 4)
        found["step_s"] = round(statistics.median(line["timing_s/step"] for line in lines[1:]), 4)
    return found | {"share": round(found["blocking_s"] / found["step_s"], 4)}


def main() -> None:
    """Prints the machine, and a line of JSON for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=["tiny", "smollm2-shape"], choices=list(MODELS))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of a row")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--demo", type=int, default=0, metavar="STEPS")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; a temporary folder otherwise")
    args = parser.parse_args()
    print(machine(), f"load {os.getloadavg()[0]:.1f}")
    for name in args.model:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            print(json.dumps(measure(name, args, Path(folder))), flush=True)
    if args.demo:
        print(json.dumps(demo(args.demo)))


if __name__ == "__main__":
    main()
