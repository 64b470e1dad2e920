"""Seconds of a whole step on one worker and on several: the same work, twice the work, and roles on GPUs of their own.

    python -m benchmarks.scaling --json                                # two GPUs, Qwen2.5-0.5B's shape with random weights
    python -m benchmarks.scaling --case one replicated sharded         # of these cases
    python -m benchmarks.scaling --gpus 4 --json
    python -m benchmarks.scaling --device cpu --model tiny --prompts 4 --repeats 1    # whether it runs at all

Every case is burnish's own trainer on random prompts whose responses have their full length (`benchmarks.grpo_step`), each step
one update of the whole batch:

    one                  GRPO on one worker, in the driver's process
    one_ray              the same, the worker a process of Ray's as those of all cases on several are
    replicated           on N workers, the model on each of them (fsdp_size=1); the same work
    sharded              the model split over them (FSDP2)
    kept                 the same, weights not resharded after the forward (reshard_after_forward=false)
    twice_replicated     N times the prompts
    twice_sharded        N times the prompts
    critic_beside        PPO with a critic in the policy's worker, on one GPU
    critic_apart         the critic in a pool of its own, on the second GPU
    reward_beside        GRPO with a reward model in the policy's worker
    reward_apart         the reward model on the second GPU
    rlhf_beside          PPO with a critic, a KL to a reference in the loss, and a reward model, all in the policy's worker
    rlhf_ray             the same, the worker a process of Ray's
    rlhf_apart           the reward model on the second GPU

``speedup`` is the rate (response tokens a second) over that of the case which it is compared with, ``efficiency`` that over
the number of GPUs. Seconds are medians (least, greatest) from one step's end to the next one's, the first step left out. With
``--json`` each case prints one line when it ends, and the last line is one object with all of them.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from burnish.utils import env

env.calm_threads()

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForSequenceClassification  # noqa: E402

import burnish  # noqa: E402
from benchmarks.demo import machine  # noqa: E402
from benchmarks.grpo_burnish import run_steps  # noqa: E402
from benchmarks.grpo_step import check_learning, check_step, parse_settings, places, spread, stage_medians  # noqa: E402
from benchmarks.grpo_work import CPU_WORK, GPU_WORK, GRPOWork  # noqa: E402
from benchmarks.models import cache_folder, model_path  # noqa: E402
from benchmarks.results import write_figures  # noqa: E402
from burnish.utils.errors import BurnishError  # noqa: E402

ACTOR = "actor_rollout_ref.actor.fsdp_config."
PPO = {"algorithm.adv_estimator": "gae"}
SCORED = {"reward.reward_model.enable": True}
RLHF = PPO | SCORED | {"actor_rollout_ref.actor.use_kl_loss": True}
CRITIC_APART = {"critic.nnodes": 1, "critic.n_gpus_per_node": 1}
REWARD_APART = {
    "reward.reward_model.enable_resource_pool": True,
    "reward.reward_model.nnodes": 1,
    "reward.reward_model.n_gpus_per_node": 1,
}
REPLICATED = {ACTOR + "fsdp_size": 1}
KEPT = {ACTOR + "reshard_after_forward": False}

# Name: configuration by dotted key, whether on all GPUs, whether with as many times the prompts, compared with which case.
CASES: dict[str, tuple[dict[str, Any], bool, bool, str | None]] = {
    "one": ({}, False, False, None),
    "one_ray": ({"trainer.controller": "ray"}, False, False, "one"),
    "replicated": (REPLICATED, True, False, "one"),
    "sharded": ({}, True, False, "one"),
    "kept": (KEPT, True, False, "one"),
    "twice_replicated": (REPLICATED, True, True, "one"),
    "twice_sharded": ({}, True, True, "one"),
    "critic_beside": (PPO, False, False, None),
    "critic_apart": (PPO | CRITIC_APART, False, False, "critic_beside"),
    "reward_beside": (SCORED, False, False, None),
    "reward_apart": (SCORED | REWARD_APART, False, False, "reward_beside"),
    "rlhf_beside": (RLHF, False, False, None),
    "rlhf_ray": (RLHF | {"trainer.controller": "ray"}, False, False, "rlhf_beside"),
    "rlhf_apart": (RLHF | REWARD_APART, False, False, "rlhf_beside"),
}


def reward_model_path(name: str) -> str:
    """The folder of a classifier of the model's shape with random weights, made where it is missing."""
    folder = cache_folder() / f"{os.path.basename(name)}-reward"
    if not (folder / "config.json").exists():
        with torch.random.fork_rng():
            torch.manual_seed(1)
            config = AutoConfig.from_pretrained(model_path(name), num_labels=1)
            # The prompts' tokenizer has no padding that the model knows.
            config.pad_token_id = config.pad_token_id or 0
            model = AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
    return str(folder)


def case_settings(case: str, args: argparse.Namespace) -> tuple[GRPOWork, int, dict[str, Any]]:
    """The work of a case, its workers, and its configuration."""
    overrides, everywhere, more_prompts, _ = CASES[case]
    work: GRPOWork = replace(args.work, prompts=args.work.prompts * (args.gpus if more_prompts else 1))
    settings = dict(overrides)
    if PPO.items() <= overrides.items():
        settings["critic.model.path"] = model_path(args.model)
    if SCORED.items() <= overrides.items():
        settings |= {
            "reward.reward_model.model_path": reward_model_path(args.model),
            "reward.reward_model.function_weight": 1.0,
            # It reads the tokens as they are: there are no conversations.
            "reward.reward_model.model.input_tokenizer": None,
        }
    if args.device == "cpu":
        settings["ray_kwargs.ray_init.num_cpus"] = (
            args.gpus + 1 if everywhere or case.endswith(("apart", "ray")) else None
        )
    return work, args.gpus if everywhere else 1, settings | args.set


def measure(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one case."""
    work, gpus, settings = case_settings(case, args)
    begin = time.perf_counter()
    steps = run_steps(
        work, **places(args.model), device=args.device, gpus=gpus, lr=args.lr, steps=args.repeats, overrides=settings
    )
    for step in steps:
        check_step(step, work, case)
    check_learning(steps, case)
    seconds = [step["seconds"] for step in steps]
    return {
        "case": case,
        "model": args.model,
        "gpus": gpus + (1 if case.endswith("apart") else 0),
        "work": work.describe(),
        "device": args.device_name,
        "dtype": steps[-1]["dtype"],
        "repeats": len(steps),
        **spread("seconds", seconds),
        "response_tokens_per_s": work.num_response_tokens / statistics.median(seconds),
        "stages": stage_medians(steps),
        "memory_gib": steps[-1]["memory_gib"],
        "mean_score": steps[-1]["mean_score"],
        "skipped_updates": sum(step["skipped_updates"] for step in steps),
        "all_seconds": time.perf_counter() - begin,
    }


def compared(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The results with ``speedup`` and ``efficiency`` where the case that they are compared with was measured."""
    found = {}
    for case, result in results.items():
        base = results.get(CASES[case][3] or "")
        more = {}
        if base is not None:
            speedup = result["response_tokens_per_s"] / base["response_tokens_per_s"]
            more = {"speedup": speedup, "efficiency": speedup * base["gpus"] / result["gpus"]}
        found[case] = result | more
    return found


def table(results: dict[str, dict[str, Any]]) -> str:
    """For people."""
    lines = [f"{'case':17} {'GPUs':>4} {'s a step':>22} {'tokens/s':>9} {'speedup':>8} {'GiB':>6}  stages"]
    for case, result in compared(results).items():
        seconds = f"{result['seconds']:.3f} ({result['seconds_min']:.3f}, {result['seconds_max']:.3f})"
        speedup = f"{result['speedup']:.2f}" if "speedup" in result else ""
        memory = f"{result['memory_gib']:.1f}" if result["memory_gib"] is not None else ""
        stages = ", ".join(f"{name} {value:.3f}" for name, value in result["stages"].items())
        rate = f"{result['response_tokens_per_s']:,.0f}"
        lines.append(f"{case:17} {result['gpus']:4} {seconds:>22} {rate:>9} {speedup:>8} {memory:>6}  {stages}")
    return "\n".join(lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--model", help="a name of benchmarks/models.py, or a folder (qwen2.5-0.5b; on a CPU tiny)")
    parser.add_argument("--gpus", type=int, default=2, help="workers of the cases on several")
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    parser.add_argument("--repeats", type=int, default=5, help="steps that count")
    parser.add_argument("--seconds", type=float, default=1e9, help="no case is begun after so many")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="configuration by dotted key, in YAML"
    )
    parser.add_argument("--json", action="store_true", help="a line of JSON for each case, and one for all")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    for name in ("prompts", "samples", "prompt_length", "response_length"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="instead of what the device's work says")
    args = parser.parse_args(argv)
    on_cpu = args.device == "cpu"
    args.model = args.model or ("tiny" if on_cpu else "qwen2.5-0.5b")
    sizes = {name: getattr(args, name) for name in ("prompts", "samples", "prompt_length", "response_length")}
    args.work = replace(CPU_WORK if on_cpu else GPU_WORK, **{name: size for name, size in sizes.items() if size})
    args.set = parse_settings(args.set)
    args.device_name = "cpu" if on_cpu else torch.cuda.get_device_name()
    return args


def main(argv: list[str] | None = None) -> None:
    """Measures the cases one after the other; one that fails is told and the others go on."""
    args, begin = parse(argv), time.perf_counter()
    results: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for case in args.case:
        if time.perf_counter() - begin > args.seconds:
            failed[case] = "no time left"
            continue
        try:
            results[case] = measure(case, args)
        except (BurnishError, RuntimeError) as error:
            failed[case] = f"{type(error).__name__}: {error}"
            print(f"{case} failed: {failed[case]}", file=sys.stderr, flush=True)
            continue
        finally:
            # A worker in this process leaves its memory for those of the next case.
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
        if args.json:
            print(json.dumps(compared(results)[case]), flush=True)
    print(table(results))
    for case, why in failed.items():
        print(f"{case:17} not measured: {why}")
    if args.json:
        versions = {"burnish": burnish.__version__, "torch": torch.__version__}
        facts = {"gpus": args.gpus, "device": args.device_name, "machine": machine(), "versions": versions}
        print(json.dumps({"name": "scaling", **facts, "cases": compared(results), "not_measured": failed}))
    if args.out is not None:
        given = {"set": args.set} if args.set else {}
        write_figures(args.out, {"name": args.out.stem, **given, "cases": compared(results), "not_measured": failed})
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
