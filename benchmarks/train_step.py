"""Tokens per second and MFU of one update and of the log-prob pass, beside the plain Hugging Face loop on the same rows.

    python -m benchmarks.train_step --model qwen2.5-0.5b qwen2.5-1.5b --peer hf --json      # a GPU: 96 rows of 256 + 768 tokens
    python -m benchmarks.train_step --model qwen2.5-0.5b --gpus 2 --json                    # one rank, then two, same total work
    python -m benchmarks.train_step --model qwen2.5-0.5b --lengths lognormal --samples 8    # groups that share a prompt
    python -m benchmarks.train_step --model qwen2.5-0.5b --profile update.txt

One update is ``train_batch`` with the policy loss of PPO and GRPO, as the worker calls it, and ``optimizer_step``: float32
masters, gradients and moments, clipping, entropy for the logs. MFU counts the operations of tokens that were really computed
(a shared prompt once, tokens without a label not through the head, nothing that is recomputed) against the device's data sheet,
989 TFLOP/s for an H100 in bf16; on a CPU against a measured matrix product. The peer (AutoModelForCausalLM, SDPA, padded rows,
full logits, gradient checkpointing, torch's fused AdamW) is run in bf16 throughout and under autocast; the better one counts.
Figures are medians (least, greatest) after one repeat that warms up. With ``--json`` the last line is one object: the figures of
the first model, and of all of them under ``results``.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from burnish.utils import env

env.calm_threads()

import torch  # noqa: E402
import transformers  # noqa: E402

import burnish  # noqa: E402
from benchmarks import train_ranks  # noqa: E402
from benchmarks.demo import machine  # noqa: E402
from benchmarks.grpo_step import parse_settings, spread  # noqa: E402
from benchmarks.models import model_path  # noqa: E402
from benchmarks.peers.client import Peer  # noqa: E402
from benchmarks.train_work import TrainWork  # noqa: E402

PARTS = ("forward", "backward", "optimizer")


def measure(name: str, world_size: int, args: argparse.Namespace) -> dict[str, Any]:
    """burnish's figures of one model on ``world_size`` ranks, which share the rows."""
    load = os.getloadavg()[0]
    ranks = train_ranks.measure(rank_settings(name, args), world_size)
    first = ranks[0]
    updates = [update["update"] for update in first["updates"]]
    tokens = args.work.tokens
    # The ranks' operations together against the peak of all their devices.
    peak = sum(rank["peak_flops"] for rank in ranks)
    update_flops, pass_flops = (sum(rank[key] for rank in ranks) for key in ("update_flops", "pass_flops"))
    update, log_probs = statistics.median(updates), statistics.median(first["passes"])
    memory = [rank["memory_gib"] for rank in ranks]
    return {
        "model": name,
        "work": args.work.describe(),
        "dtype": first["dtype"],
        "device": args.device_name,
        "ranks": world_size,
        "repeats": args.repeats,
        **spread("seconds", updates),
        "tokens_per_s": tokens / update,
        "mfu": update_flops / update / peak,
        "tera_operations": update_flops / 1e12,
        "parts": {part: statistics.median(one[part] for one in first["updates"]) for part in PARTS},
        **spread("log_prob_seconds", first["passes"]),
        "log_prob_tokens_per_s": tokens / log_probs,
        "log_prob_mfu": pass_flops / log_probs / peak,
        "memory_gib": memory[0] if world_size == 1 else memory,
        "log_prob_memory_gib": first["pass_memory_gib"],
        "grad_norm": first["grad_norm"],
        "peak_tera_flops": first["peak_flops"] / 1e12,
        "start_seconds": first["start_seconds"],
        "memory_plan": first["plan"],
        "load_before": load,
        "load_after": os.getloadavg()[0],
    }


def rank_settings(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """What every rank is told."""
    overrides: dict[str, Any] = {
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": args.max_token_len,
        "actor_rollout_ref.actor.fsdp_config.dtype": args.dtype,
        "actor_rollout_ref.actor.use_prefix_grouper": args.shared_prompts,
    }
    return {
        "model": model_path(name),
        "device": args.device,
        "work": asdict(args.work),
        "overrides": overrides | args.set,
        "repeats": args.repeats,
        "profile": None if args.profile is None else str(args.profile),
    }


def measure_peer(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The plain loop in each precision; the figures of the fastest."""
    found = {}
    for precision in args.peer_precision:
        settings = {
            "model": model_path(name),
            "device": args.device,
            "precision": precision,
            "work": asdict(args.work),
            "micro_batch_size": args.peer_micro_batch_size,
            "gradient_checkpointing": not args.no_peer_checkpointing,
            "lr": 1e-6,
        }
        with Peer("hf_train", settings, args.logs / f"hf_{Path(name).name}_{precision}.log") as peer:
            peer.run({})
            answers = [peer.run({}) for _ in range(args.peer_repeats)]
            facts = peer.facts
        seconds = [answer["seconds"] for answer in answers]
        found[precision] = {
            "peer": "hf",
            "peer_precision": precision,
            "peer_repeats": args.peer_repeats,
            **spread("peer_seconds", seconds),
            "peer_tokens_per_s": args.work.tokens / statistics.median(seconds),
            "peer_memory_gib": answers[-1]["memory_gib"],
            "peer_versions": facts["versions"],
        }
    best = max(found.values(), key=lambda figures: figures["peer_tokens_per_s"])
    return best | {"peer_tokens_per_s_by_precision": {key: one["peer_tokens_per_s"] for key, one in found.items()}}


def measure_model(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one model, printed when they are there."""
    result = measure(name, 1, args)
    if args.gpus > 1:
        several = measure(name, args.gpus, args)
        result |= {"several_ranks": several, "scaling": result["seconds"] / several["seconds"]}
    if args.peer is not None:
        result |= measure_peer(name, args)
        result["ratio"] = result["tokens_per_s"] / result["peer_tokens_per_s"]
    print(table(result), flush=True)
    with (args.logs / "results.jsonl").open("a") as file:
        file.write(json.dumps(result) + "\n")
    return result


def table(result: dict[str, Any]) -> str:
    """One model, for people."""
    lines = [*rank_lines(result)]
    if "several_ranks" in result:
        lines += [*rank_lines(result["several_ranks"]), f"  over one rank                {result['scaling']:.2f}"]
    if "peer" in result:
        tried = ", ".join(f"{key} {rate:,.0f}" for key, rate in result["peer_tokens_per_s_by_precision"].items())
        memory = result["peer_memory_gib"]
        lines.append(
            f"  {result['peer']}, tokens/s                 {result['peer_tokens_per_s']:,.0f} ({tried})"
            + ("" if memory is None else f", peak {memory:.1f} GiB")
        )
        lines.append(f"  burnish over {result['peer']}              {result['ratio']:.2f}")
    lines.append(f"  load of the machine          {result['load_before']:.1f} to {result['load_after']:.1f}")
    return "\n".join(lines)


def rank_lines(result: dict[str, Any]) -> list[str]:
    """burnish's lines on so many ranks."""
    parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in result["parts"].items())
    memory = result["memory_gib"]
    memories = memory if isinstance(memory, list) else [memory]
    peaks = "" if memories[0] is None else f", peak {' '.join(f'{one:.1f}' for one in memories)} GiB"
    return [
        f"{result['model']}, {result['dtype']}, {result['ranks']} rank(s): {result['work']}",
        f"  update, tokens/s             {result['tokens_per_s']:,.0f}, MFU {result['mfu']:.1%}{peaks}",
        f"    seconds                    {result['seconds']:.3f} ({result['seconds_min']:.3f}, "
        f"{result['seconds_max']:.3f}): {parts}",
        f"  log-prob pass, tokens/s      {result['log_prob_tokens_per_s']:,.0f}, MFU {result['log_prob_mfu']:.1%}",
    ]


def summary(results: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """The figures of the first model that people compare, and all others."""
    first = results[0]
    keys = ("tokens_per_s", "mfu", "log_prob_tokens_per_s", "log_prob_mfu", "memory_gib", "seconds")
    return {
        "ratio": first.get("ratio"),
        **{key: first[key] for key in keys},
        "peer_tokens_per_s": first.get("peer_tokens_per_s"),
        "scaling": first.get("scaling"),
        "device": args.device_name,
        "model": first["model"],
        "peer": args.peer,
        "machine": machine(),
        "versions": {
            "burnish": burnish.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "results": {result["model"]: result for result in results},
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", nargs="+", help="names of benchmarks/models.py, or folders; on a CPU tiny")
    parser.add_argument("--peer", choices=["hf"], help="what to run beside burnish")
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    parser.add_argument(
        "--gpus", type=int, default=1, help="ranks that share the rows, after one rank alone (CPU: workers)"
    )
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--max-token-len", type=int, default=32768, help="tokens of a micro-batch, at most")
    parser.add_argument("--repeats", type=int, default=5, help="updates that count")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a table of one update")
    parser.add_argument(
        "--shared-prompts",
        action=argparse.BooleanOptionalAction,
        help="compute the prompt of a group once; as burnish decides",
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="configuration of burnish by dotted key, in YAML"
    )
    parser.add_argument("--peer-precision", nargs="+", choices=["bfloat16", "autocast", "float32"])
    parser.add_argument("--peer-repeats", type=int, default=3, help="updates of the peer that count")
    parser.add_argument("--peer-micro-batch-size", type=int, default=8, help="rows")
    parser.add_argument("--no-peer-checkpointing", action="store_true", help="the peer keeps its activations")
    parser.add_argument("--logs", type=Path, help="folder of the peer's log and results.jsonl (a temporary one)")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    work = parser.add_argument_group("work")
    work.add_argument("--tokens", type=int, help="of all rows; 98304, on a CPU 4608")
    work.add_argument("--row", type=int, help="tokens of a row; 1024, on a CPU 72")
    work.add_argument("--prompt", type=int, help="of which so many are the prompt; 256, on a CPU 40")
    work.add_argument("--samples", type=int, default=1, help="rows that share a prompt")
    work.add_argument("--lengths", choices=["equal", "lognormal"], default="equal")
    args = parser.parse_args(argv)
    on_cpu = args.device == "cpu"
    args.model = args.model or (["tiny"] if on_cpu else ["qwen2.5-0.5b"])
    args.peer_precision = args.peer_precision or (["float32", "autocast"] if on_cpu else ["bfloat16", "autocast"])
    args.set = parse_settings(args.set)
    usual = TrainWork(tokens=4608, row=72, prompt=40) if on_cpu else TrainWork(tokens=98304, row=1024, prompt=256)
    given = {name: getattr(args, name) for name in ("tokens", "row", "prompt") if getattr(args, name) is not None}
    args.work = replace(usual, **given, samples=args.samples, log_normal=args.lengths == "lognormal")
    args.logs = Path(tempfile.mkdtemp(prefix="burnish-train-")) if args.logs is None else args.logs
    args.logs.mkdir(parents=True, exist_ok=True)
    (args.logs / "results.jsonl").write_text("")
    args.device_name = torch.cuda.get_device_name() if args.device == "cuda" else machine()
    return args


def main() -> None:
    """Measures and prints tables, and one line of JSON if asked for."""
    args = parse()
    print(
        f"{machine()}, burnish {burnish.__version__}, transformers {transformers.__version__}; logs in {args.logs}",
        flush=True,
    )
    results = [measure_model(name, args) for name in args.model]
    if args.json:
        print(json.dumps(summary(results, args)))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
