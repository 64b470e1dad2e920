"""What logging costs a step: the seconds that training waits for loggers and dumps, and those that their threads compute.

    python -m benchmarks.logging
    python -m benchmarks.logging --sizes demo --loggers console file tensorboard --json

``demo``: real runs of the demo on the tiny model, 64 prompts x 8 short responses a step. ``long``: what is handed over after a
step of 512 responses of up to 512 tokens with 150 metrics, made by hand, beside a step of ``--step-s`` seconds. Both with the
loggers named, once with every response dumped and once with eight samples a step, as a run keeps them by itself. ``waiting_ms``
is the median over steps of what the trainer's thread spends there, ``share`` that of the step; ``threads_ms`` is what the threads
behind it compute a step, which shares the processor with training. The first step warms up and is not counted.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import burnish
from benchmarks.demo import TINY_MODEL, machine
from burnish.config.trainer import TrainerConfig
from burnish.protocol import DataProto, object_array
from burnish.render import load_tokenizer
from burnish.trainer.ppo.dumps import Dumps
from burnish.trainer.ppo.run_log import RunLog
from burnish.utils.events import EventLog
from burnish.utils.tracking import Tracking
from burnish.utils.tracking.hub import _Sink

SIZES = ("demo", "long")


class Meter:
    """Seconds by step: of the trainer's thread in the log, and of the processor in the threads behind it."""

    def __init__(self) -> None:
        self.waiting: list[float] = []
        self.threads: dict[str, list[float]] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Measures every run in the block."""
        step, write, call = RunLog.step, Dumps._guarded, _Sink._guarded

        def timed_step(log: RunLog, *args: Any, **kwargs: Any) -> None:
            start = time.perf_counter()
            step(log, *args, **kwargs)
            self.waiting.append(time.perf_counter() - start)

        def timed(method: Any, name_of: Any) -> Any:
            def wrapped(self_: Any, *args: Any) -> None:
                start = time.thread_time()
                method(self_, *args)
                if threading.current_thread() is not threading.main_thread():
                    self.threads.setdefault(name_of(self_), []).append(time.thread_time() - start)

            return wrapped

        RunLog.step, Dumps._guarded = timed_step, timed(write, lambda dumps: "dumps")  # type: ignore[method-assign]
        _Sink._guarded = timed(call, lambda sink: sink.name)  # type: ignore[method-assign]
        try:
            yield
        finally:
            RunLog.step, Dumps._guarded, _Sink._guarded = step, write, call  # type: ignore[method-assign]


def measure_demo(loggers: list[str], *, steps: int, dumps: bool) -> dict[str, float]:
    """One run of ``steps`` steps after one that warms up."""
    meter = Meter()
    with tempfile.TemporaryDirectory() as folder, meter.attached():
        run = burnish.train(
            model=str(TINY_MODEL / "model"),
            dataset=str(TINY_MODEL / "data" / "train.jsonl"),
            recipe="demo",
            trainer={
                "total_training_steps": steps + 1,
                "default_local_dir": f"{folder}/run",
                "logger": loggers,
                "save_freq": -1,
                "val_before_train": False,
                "rollout_data_dir": f"{folder}/rollouts" if dumps else None,
            },
        )
    step = statistics.median(metrics["timing_s/step"] for metrics in run.history[1:])
    return figures(meter, step)


def measure_long(loggers: list[str], *, steps: int, dumps: bool, step_s: float) -> dict[str, float]:
    """``steps`` times the same batch after one that warms up."""
    meter, tokenizer = Meter(), load_tokenizer(str(TINY_MODEL / "model"))
    batch = made_batch(512, 512, len(tokenizer))
    metrics = {f"made/metric_{number}": number / 7 for number in range(150)}
    with tempfile.TemporaryDirectory() as folder, meter.attached():
        trainer = TrainerConfig(
            default_local_dir=f"{folder}/run", rollout_data_dir=f"{folder}/rollouts" if dumps else None
        )
        events = EventLog(f"{folder}/run")
        tracking, kept = Tracking("burnish", "benchmark", loggers, f"{folder}/run"), Dumps(trainer, tokenizer, events)
        kept.open(0)
        for step in range(1, steps + 2):
            start = time.perf_counter()
            tracking.log(metrics, step)
            kept.take_round(batch, {})
            kept.step(batch, step)
            meter.waiting.append(time.perf_counter() - start)
            # A step of seconds leaves the threads the time that they need.
            kept.flush()
        kept.close()
        tracking.finish()
    return figures(meter, step_s)


def figures(meter: Meter, step_s: float) -> dict[str, float]:
    """The row of the table."""
    waiting = statistics.median(meter.waiting[1:])
    return {
        "step_ms": 1000 * step_s,
        "waiting_ms": 1000 * waiting,
        "share": waiting / step_s,
        "threads_ms": 1000 * sum(statistics.median(times[1:]) for times in meter.threads.values()),
    }


def made_batch(num_rows: int, width: int, vocab_size: int) -> DataProto:
    """Responses of random tokens, between half of ``width`` and all of it, as they are at the end of a step."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(width // 2, width + 1, (num_rows, 1), generator=generator)
    mask = torch.arange(width)[None] < lengths
    names = ("rollout_log_probs", "old_log_probs", "advantages", "token_level_scores")
    return DataProto.from_dict(
        tensors={
            "prompts": torch.randint(0, vocab_size, (num_rows, 64), generator=generator),
            "responses": torch.randint(0, vocab_size, (num_rows, width), generator=generator),
            "attention_mask": torch.cat([torch.ones(num_rows, 64, dtype=torch.bool), mask], dim=1),
            "response_mask": mask,
            "loss_mask": mask,
            "valid": torch.ones(num_rows, dtype=torch.bool),
            **{name: torch.randn(num_rows, width, generator=generator) for name in names},
        },
        non_tensors={
            "uid": object_array([f"epoch0-{row // 8}" for row in range(num_rows)]),
            "sample_index": object_array([row % 8 for row in range(num_rows)]),
            "finish_reason": object_array(["stop"] * num_rows),
            "acc": object_array([1.0] * num_rows),
        },
        meta_info={"reward_extra_keys": ["acc"]},
    )


def main() -> None:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--loggers", nargs="+", default=["file", "tensorboard"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--step-s", type=float, default=10.0, help="seconds of a step of the size long")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = {}
    for size in args.sizes:
        for dumps in (False, True):
            common: dict[str, Any] = {"steps": args.steps, "dumps": dumps}
            results[f"{size} {'dump' if dumps else 'samples'}"] = (
                measure_demo(args.loggers, **common)
                if size == "demo"
                else measure_long(args.loggers, **common, step_s=args.step_s)
            )
    if args.json:
        print(json.dumps({"machine": machine(), "loggers": args.loggers, **results}))
        return
    print(f"{machine()}; loggers: {', '.join(args.loggers)}")
    for name, row in results.items():
        print(
            f"{name:14}  step {row['step_ms']:9.1f} ms  waiting {row['waiting_ms']:7.2f} ms = {100 * row['share']:.2f} %  "
            f"threads {row['threads_ms']:7.1f} ms"
        )


if __name__ == "__main__":
    main()
