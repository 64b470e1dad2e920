"""Seconds of one whole GRPO step, rollout to new weights, of burnish's trainer beside TRL's or verl's on the same work.

    python -m benchmarks.grpo_step --peer trl --json                           # CPU: tiny and smollm2; GPU: qwen2.5-0.5b
    python -m benchmarks.grpo_step --model tiny --variant plain --peer trl
    python -m benchmarks.grpo_step --model qwen2.5-0.5b --gpus 2 --prompts 64  # burnish alone, two ranks at twice the work
    python -m benchmarks.grpo_step --engine vllm --peer trl                    # burnish samples with vLLM too
    python -m benchmarks.grpo_step --peer verl --peer-trainer v0               # a GPU; verl's older trainer

Both sides get the same random prompts, every response has its full length, the reward is a trivial function of the text, there
is no reference policy, and each step makes one update of the whole batch. Variants of burnish: ``defaults`` as it comes, and
``plain``, float32 without shared prompts, which is what TRL does on a CPU (float32 there; on a GPU bf16 autocast over
float32 weights, and vLLM in the same process). A step's seconds are those from one step's end to the next one's, the data and
the logging included; the first step of each side warms up. On a CPU the two sides take turns step by step; on a GPU the peer
comes second. With ``--engine vllm`` burnish samples with the vLLM that is installed beside it: in the same process and with
the same share of the GPU as the peer, unless ``--set`` says otherwise. Seconds of CPU, of all threads, tell more than those of
the clock where other programs want the same cores; verl, whose steps are timed by its own trainer, tells none, and its memory is
what all its processes take of the card, with the share that its vLLM reserves. Figures are medians (least, greatest). With
``--json`` the last line is one object: the figures of the first model and variant, and of all of them under ``results``.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from burnish.utils import env

env.calm_threads()

import torch  # noqa: E402
import transformers  # noqa: E402
import yaml  # noqa: E402
from transformers import AutoConfig  # noqa: E402

import burnish  # noqa: E402
from benchmarks.demo import machine  # noqa: E402
from benchmarks.grpo_burnish import run_steps  # noqa: E402
from benchmarks.grpo_table import table  # noqa: E402
from benchmarks.grpo_work import CPU_WORK, GPU_WORK, GRPOWork  # noqa: E402
from benchmarks.learning.sides import GPUMemory  # noqa: E402
from benchmarks.models import model_path, word_tokenizer_path  # noqa: E402
from benchmarks.peers.client import Peer  # noqa: E402
from benchmarks.results import write_figures  # noqa: E402

# Configuration of each variant by dotted key.
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "plain": {
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.actor.use_prefix_grouper": False,
    },
}


# Likewise of each rollout engine.
ENGINES: dict[str, dict[str, Any]] = {
    "native": {},
    "vllm": {"actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.rollout.mode": "sync"},
}


class PeerSteps:
    """The peer's steps, one a turn, until there are ``repeats`` of them, or one and ``budget`` seconds are over."""

    def __init__(self, peer: Peer, work: GRPOWork, repeats: int, budget: float) -> None:
        self._peer, self._work = peer, work
        self._repeats, self._budget = repeats, budget
        self.steps: list[dict[str, Any]] = []

    def turn(self) -> bool:
        """One step; False when there is none to do any more."""
        spent = sum(step["seconds"] for step in self.steps)
        if len(self.steps) >= self._repeats or (self.steps and spent + self.steps[-1]["seconds"] > self._budget):
            return False
        step = self._peer.run({})
        check_step(step, self._work, self._peer.name)
        self.steps.append(step)
        return True


def check_step(step: dict[str, Any], work: GRPOWork, side: str) -> None:
    """Every response has its length, and rewards were computed.

    Raises:
        RuntimeError: not so.
    """
    if step["tokens"] != work.num_response_tokens:
        raise RuntimeError(
            f"{side} trained on {step['tokens']} response tokens where {work.num_response_tokens} were asked for."
        )
    if not step["mean_score"] > 0:
        raise RuntimeError(f"{side} has a mean score of {step['mean_score']}: its rewards were not computed.")


def check_learning(steps: list[dict[str, Any]], side: str) -> None:
    """Each step leaves other weights than the one before, where the side tells of them.

    Raises:
        RuntimeError: not so.
    """
    prints = [step["fingerprint"] for step in steps if step["fingerprint"] is not None]
    if any(before == after for before, after in pairwise(prints)):
        raise RuntimeError(f"{side} left its weights as they were in a step: nothing was learned ({prints}).")


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def median_of(steps: list[dict[str, Any]], key: str) -> Any:
    """Median of one figure over the steps; None where the side does not tell it."""
    values = [step[key] for step in steps]
    return None if None in values else statistics.median(values)


def stage_medians(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Median seconds of each stage."""
    return {name: statistics.median(step["stages"][name] for step in steps) for name in steps[0]["stages"]}


def measure(name: str, variant: str, peer: Peer | None, work: GRPOWork, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one model and variant; the peer's only if it takes turns."""
    turns = None if peer is None else PeerSteps(peer, work, args.peer_repeats, args.peer_seconds)
    load = os.getloadavg()[0]
    steps = run_steps(
        work,
        **places(name),
        device=args.device,
        gpus=args.gpus,
        lr=args.lr,
        steps=args.repeats,
        overrides=VARIANTS[variant] | engine_settings(args) | args.set,
        after_step=(lambda: None) if turns is None else (lambda: turns.turn() and None),
    )
    for step in steps:
        check_step(step, work, "burnish")
    check_learning(steps, "burnish")
    gc.collect()
    seconds = [step["seconds"] for step in steps]
    result: dict[str, Any] = {
        "model": name,
        "variant": variant,
        "engine": args.engine,
        "work": work.describe(),
        "device": args.device_name,
        "dtype": steps[-1]["dtype"],
        "gpus": args.gpus,
        "repeats": len(steps),
        **spread("seconds", seconds),
        "cpu_seconds": median_of(steps, "cpu_seconds"),
        "response_tokens_per_s": work.num_response_tokens / statistics.median(seconds),
        "stages": stage_medians(steps),
        "mean_score": steps[-1]["mean_score"],
        "memory_gib": steps[-1]["memory_gib"],
        "load_before": load,
        "load_after": os.getloadavg()[0],
    }
    if turns is not None:
        while len(turns.steps) < args.peer_repeats and turns.turn():
            pass
        result |= peer_figures(result, turns.steps, peer, args)
    return result


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Configuration of burnish's rollout engine by dotted key."""
    settings = ENGINES[args.engine]
    if args.engine == "vllm" and args.device == "cuda":
        return settings | {"actor_rollout_ref.rollout.gpu_memory_utilization": args.peer_vllm_memory}
    return settings


def peer_figures(result: dict[str, Any], steps: list[dict[str, Any]], peer: Any, args: argparse.Namespace) -> dict:
    """The peer's figures, and the ratio of its seconds to burnish's."""
    check_learning(steps, peer.name)
    cpu_seconds = median_of(steps, "cpu_seconds")
    return {
        "peer": peer.name,
        "peer_dtype": args.peer_dtype,
        "peer_repeats": len(steps),
        **spread("peer_seconds", [step["seconds"] for step in steps]),
        "peer_cpu_seconds": cpu_seconds,
        "peer_stages": stage_medians(steps),
        "peer_memory_gib": steps[-1]["memory_gib"],
        "peer_mean_score": steps[-1]["mean_score"],
        "peer_versions": peer.facts["versions"],
        "peer_start_seconds": peer.facts["start_seconds"],
        "ratio": median_of(steps, "seconds") / result["seconds"],
        "cpu_ratio": None if cpu_seconds is None else cpu_seconds / result["cpu_seconds"],
    }


def places(name: str) -> dict[str, Any]:
    """Folders of the model and of the tokenizer for its vocabulary, and the vocabulary's size."""
    path = model_path(name)
    vocab_size = AutoConfig.from_pretrained(path).vocab_size
    return {"model": path, "tokenizer": word_tokenizer_path(vocab_size), "vocab_size": vocab_size}


def start_peer(name: str, work: GRPOWork, args: argparse.Namespace) -> Peer:
    """The peer on the model called ``name``, after the step that warms it up."""
    settings = {
        **places(name),
        "device": args.device,
        "dtype": args.peer_dtype,
        "work": work.as_dict(),
        "micro_batch_size": args.peer_micro_batch_size,
        "gradient_checkpointing": args.peer_gradient_checkpointing,
        "lr": args.lr,
        "vllm_memory": args.peer_vllm_memory if args.device == "cuda" and args.peer_engine == "vllm" else None,
    }
    if args.peer == "verl":
        settings |= {"trainer": args.peer_trainer, "folder": str(args.logs.resolve() / "verl")}
    peer = Peer(args.peer, settings, args.logs / f"{args.peer}_{Path(name).name}.log")
    check_step(peer.run({}), work, peer.name)
    return peer


def measure_model(name: str, work: GRPOWork, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of every variant; one peer for all of them."""
    results = []
    with ExitStack() as stack:
        alternate = args.peer is not None and args.device == "cpu"
        peer = stack.enter_context(start_peer(name, work, args)) if alternate else None
        for variant in args.variant:
            results.append(measure(name, variant, peer, work, args))
        if args.peer is not None and not alternate:
            # Not to be lost should the peer not come to its end.
            for result in results:
                print(table(result), flush=True)
            torch.cuda.empty_cache()
            # Beside burnish's own memory there would not be enough for both.
            on_the_card = GPUMemory()
            peer = stack.enter_context(start_peer(name, work, args))
            turns = PeerSteps(peer, work, args.peer_repeats, args.peer_seconds)
            while turns.turn():
                pass
            most = on_the_card.stop()
            results = [result | peer_figures(result, turns.steps, peer, args) for result in results]
            for result in results:
                if result["peer_memory_gib"] is None:
                    result["peer_memory_gib"] = most
    for result in results:
        print(table(result), flush=True)
        with (args.logs / "results.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")
    return results


def summary(results: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """The figures of the first result that people compare, and all others."""
    first = results[0]
    return {
        "ratio": first.get("ratio"),
        "seconds": first["seconds"],
        "peer_seconds": first.get("peer_seconds"),
        "device": args.device_name,
        "model": first["model"],
        "variant": first["variant"],
        "engine": first["engine"],
        "peer": args.peer,
        "machine": machine(),
        "versions": {
            "burnish": burnish.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "results": {f"{result['model']}/{result['variant']}": result for result in results},
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", nargs="+", help="names of benchmarks/models.py, or folders")
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, help="of burnish; on a CPU both, on a GPU defaults")
    parser.add_argument("--engine", choices=ENGINES, default="native", help="burnish's rollout engine")
    parser.add_argument("--peer", choices=["trl", "verl"], help="what to run beside burnish; verl needs a GPU")
    parser.add_argument(
        "--peer-trainer", choices=["v1", "v0"], default="v1", help="verl's: its default or its older one"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    parser.add_argument("--gpus", type=int, default=1, help="ranks of burnish (on a CPU: workers)")
    parser.add_argument("--repeats", type=int, default=5, help="steps of burnish that count")
    parser.add_argument("--peer-repeats", type=int, default=3, help="steps of the peer that count, for each variant")
    parser.add_argument(
        "--peer-seconds", type=float, default=600.0, help="the peer begins no further step of a variant after this"
    )
    parser.add_argument("--peer-dtype", choices=["float32", "bfloat16"], help="float32 on a CPU, else bfloat16")
    parser.add_argument("--peer-micro-batch-size", type=int, help="rows; 8 on a CPU, 16 on a GPU")
    parser.add_argument("--peer-gradient-checkpointing", action="store_true", help="TRL's default; slower")
    parser.add_argument("--peer-engine", choices=["vllm", "hf"], default="vllm", help="TRL's on a GPU; hf: `generate`")
    parser.add_argument("--peer-vllm-memory", type=float, default=0.3, help="share of the GPU's memory for each vLLM")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="configuration of burnish by dotted key, in YAML"
    )
    parser.add_argument("--logs", type=Path, help="folder of the peer's log and results.jsonl (a temporary one)")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    work = parser.add_argument_group("instead of what the device's work says")
    names = ("prompts", "samples", "prompt_length", "response_length")
    for name in names:
        work.add_argument(f"--{name.replace('_', '-')}", type=int)
    args = parser.parse_args(argv)
    on_cpu = args.device == "cpu"
    if args.peer == "verl" and on_cpu:
        parser.error(
            "verl has no training engine and no rollout for a CPU (docs/comparison.md): --peer verl needs a GPU."
        )
    args.model = args.model or (["tiny", "smollm2"] if on_cpu else ["qwen2.5-0.5b"])
    args.variant = args.variant or (["defaults", "plain"] if on_cpu else ["defaults"])
    args.peer_dtype = args.peer_dtype or ("float32" if on_cpu else "bfloat16")
    args.peer_micro_batch_size = args.peer_micro_batch_size or (8 if on_cpu else 16)
    args.set = parse_settings(args.set)
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    args.work = GRPOWork(**((CPU_WORK if on_cpu else GPU_WORK).as_dict() | given))
    args.logs = Path(tempfile.mkdtemp(prefix="burnish-grpo-")) if args.logs is None else args.logs
    args.logs.mkdir(parents=True, exist_ok=True)
    (args.logs / "results.jsonl").write_text("")
    args.device_name = torch.cuda.get_device_name() if args.device == "cuda" else machine()
    return args


def parse_settings(entries: list[str]) -> dict[str, Any]:
    """``key=value`` as on burnish's command line, values in YAML."""
    return {key: yaml.safe_load(value) for key, _, value in (entry.partition("=") for entry in entries)}


def main() -> None:
    """Measures and prints tables, and one line of JSON if asked for."""
    args = parse()
    print(
        f"{machine()}, burnish {burnish.__version__}, transformers {transformers.__version__}; logs in {args.logs}",
        flush=True,
    )
    results = [result for name in args.model for result in measure_model(name, args.work, args)]
    if args.json:
        print(json.dumps(summary(results, args)))
    if args.out is not None:
        write_figures(args.out, {"name": args.out.stem, "device": args.device_name, "results": results})
    sys.stdout.flush()


if __name__ == "__main__":
    main()
