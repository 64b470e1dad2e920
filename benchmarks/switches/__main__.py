"""What each switch gains: remove padding, asynchronous rewards, dynamic batch, shared prompt, fused head; alone and together.

    python -m benchmarks.switches --json                         # CPU: SmolLM2-135M; GPU: a model of Qwen2.5-0.5B's shape
    python -m benchmarks.switches --model tiny --alone --repeats 7
    python -m benchmarks.switches --out docs/results/switches-h100.json
    python -m benchmarks.switches --table docs/results/switches-*.json           # measures nothing, prints Markdown

One run of burnish's trainer does the same GRPO step again and again, prompts and responses of log-normal lengths, and turns
switches between steps: all on (burnish as it comes), each of them off with the others on, all off; with ``--alone`` also each of
them on with the others off. The steps of one round follow each other, so a ratio is of steps that ran at nearly the same time;
figures are medians over the rounds (least, greatest), the first of which warms up. Off means:

remove_padding   every row computes as many tokens as the longest prompt and the longest response of the batch have, and logits in
                 every column of the response (where prompts are shared, their padding is left out, in favour of off)
async_rewards    reward.launch_reward_fn_async=false: rewards begin when the last response is there, in as many processes
dynamic_batch    use_dynamic_bsz=false: as many rows a micro-batch as keep to ppo_max_token_len_per_gpu however long they are
shared_prompt    use_prefix_grouper=false
fused_head       logits of all tokens of a micro-batch in float32, torch's own log_softmax, autograd

Of burnish remove_padding and fused_head are always on; for them the benchmark brings the plain way. The learning rate is 0, so
that every step samples the same tokens, and loss, entropy and gradient norm of every step must be those of the first, or the
benchmark fails: the switches change how a step is computed and not what.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from burnish.utils import env

env.calm_threads()

import torch  # noqa: E402
import transformers  # noqa: E402

import burnish  # noqa: E402
from benchmarks.demo import machine  # noqa: E402
from benchmarks.grpo_step import parse_settings, places  # noqa: E402
from benchmarks.results import commit  # noqa: E402
from benchmarks.switches.run import ALL, STAGES, SWITCHES, run_turns  # noqa: E402
from benchmarks.switches.work import CPU_WORK, GPU_WORK, SwitchesWork  # noqa: E402

# The stages whose seconds a switch is about.
CONCERNS = {
    name: ("gen", "reward") if name == "async_rewards" else ("old_log_prob", "ref", "update_actor") for name in SWITCHES
}
# Relative differences to the first step that rounding explains.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.03}


def variants(*, alone: bool) -> dict[str, frozenset[str]]:
    """The switches that are on, by the name of the variant; what burnish does by itself comes first."""
    named = {"all on": ALL, **{f"without {name}": ALL - {name} for name in SWITCHES}, "all off": frozenset()}
    return named | ({f"only {name}": frozenset({name}) for name in SWITCHES} if alone else {})


def check_same(turns: Sequence[dict[str, Any]], names: Sequence[str], tolerance: float) -> dict[str, float]:
    """The largest difference of each turn's figures to the first turn's: relative, of the loss to 0.01 at least.

    Args:
        names: of each turn's variant.

    Raises:
        RuntimeError: one is above ``tolerance``; the turn did something else.
    """
    largest = {}
    for key, least in (("loss", 0.01), ("entropy", 0.0), ("grad_norm", 0.0)):
        expected = turns[0][key]
        differences = [abs(turn[key] - expected) / max(abs(expected), least) for turn in turns]
        # Not by max: a NaN is greater than nothing.
        place = next((place for place, difference in enumerate(differences) if not difference <= tolerance), None)
        if place is not None:
            raise RuntimeError(
                f"'{names[place]}' has {key}={turns[place][key]:.6g} where all on has {expected:.6g}: they do not compute the "
                f"same (allowed: {tolerance:g} of it)."
            )
        largest[key] = max(differences)
    return largest


def spread(values: Sequence[float]) -> list[float]:
    """Median, least, greatest."""
    return [round(value, 4) for value in (statistics.median(values), min(values), max(values))]


def concerned_seconds(turn: dict[str, Any], stages: Sequence[str]) -> float:
    """Seconds of these stages, as far as the step has them."""
    return sum(turn["stages"].get(stage, 0.0) for stage in stages)


def gain(slow: list[dict[str, Any]], fast: list[dict[str, Any]], stages: Sequence[str]) -> dict[str, Any]:
    """How many times faster ``fast`` is, round by round: the whole step, these stages, and seconds of CPU."""

    def ratios(read: Any) -> list[float]:
        return spread([read(off) / read(on) for off, on in zip(slow, fast, strict=True)])

    return {
        "step": ratios(lambda turn: turn["seconds"]),
        "stages": ratios(lambda turn: concerned_seconds(turn, stages)),
        "cpu": ratios(lambda turn: turn["cpu_seconds"]),
    }


def figures(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one variant."""
    return {
        "seconds": spread([turn["seconds"] for turn in rounds]),
        "cpu_seconds": round(statistics.median(turn["cpu_seconds"] for turn in rounds), 3),
        "stages": {
            stage: round(statistics.median(turn["stages"][stage] for turn in rounds), 4)
            for stage in STAGES
            if stage in rounds[0]["stages"]
        },
        "memory_gib": rounds[0]["memory_gib"] and round(max(turn["memory_gib"] for turn in rounds), 2),
        **{key: rounds[-1][key] for key in ("micro_batches", "computed_tokens", "computed_labels")},
    }


def measure(name: str, work: SwitchesWork, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one model."""
    chosen = variants(alone=args.alone)
    names = list(chosen) * (1 + args.repeats)

    def tell(number: int, turn: dict[str, Any]) -> None:
        print(f"{number + 1}/{len(names)} {names[number]}: {turn['seconds']:.3f} s", file=sys.stderr, flush=True)

    load = os.getloadavg()[0]
    turns = run_turns(
        work,
        [chosen[name] for name in names],
        **places(name),
        device=args.device,
        overrides=args.set,
        on_turn=tell,
    )
    dtype = turns[0]["dtype"]
    same = check_same(turns, names, args.tolerance or TOLERANCES[dtype])
    counted = {
        name: [turn for turn, ran in zip(turns[len(chosen) :], names[len(chosen) :], strict=True) if ran == name]
        for name in chosen
    }
    of_switches = {}
    for switch, stages in CONCERNS.items():
        of_switches[switch] = {"stages": stages, "off": gain(counted[f"without {switch}"], counted["all on"], stages)}
        if args.alone:
            of_switches[switch]["alone"] = gain(counted["all off"], counted[f"only {switch}"], stages)
    together = gain(counted["all off"], counted["all on"], STAGES)
    return {
        "model": name,
        "dtype": dtype,
        "work": work.describe(),
        "sizes": work.as_dict(),
        "settings": args.set,
        "response_tokens": turns[0]["response_tokens"],
        "repeats": args.repeats,
        "same_tokens": min(turn["same_tokens"] for turn in turns),
        "differences": {key: float(f"{value:.2g}") for key, value in same.items()},
        "gains": of_switches,
        "together": {"step": together["step"], "cpu": together["cpu"]},
        "variants": {name: figures(rounds) for name, rounds in counted.items()},
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
    }


def table(result: dict[str, Any]) -> str:
    """One model, for people."""

    def ratio(of: dict[str, Any], key: str) -> str:
        median, least, greatest = of[key]
        return f"{median:5.2f} ({least:.2f}, {greatest:.2f})"

    lines = [
        f"{result['model']} ({result['dtype']}): {result['work']}",
        f"  differences to the first step: {result['differences']}; tokens sampled alike: {result['same_tokens']:.2%}; "
        f"load {result['load'][0]} to {result['load'][1]}",
        f"  {'variant':24} {'seconds a step':>24} {'micro-batches':>13} {'tokens':>8} {'labels':>8}  stages",
    ]
    for name, of in result["variants"].items():
        median, least, greatest = of["seconds"]
        stages = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in of["stages"].items())
        memory = "" if of["memory_gib"] is None else f"; {of['memory_gib']:.1f} GiB"
        lines.append(
            f"  {name:24} {f'{median:.3f} ({least:.3f}, {greatest:.3f})':>24} {of['micro_batches']:13} "
            f"{of['computed_tokens']:8} {of['computed_labels']:8}  {stages}{memory}"
        )
    lines.append(f"  {'times faster':24} {'the step':>20} {'its stages':>20} {'CPU seconds':>20}")
    for switch, gains in result["gains"].items():
        for how in ("off", "alone"):
            if how in gains:
                label = switch if how == "off" else f"{switch}, alone"
                cells = " ".join(f"{ratio(gains[how], key):>20}" for key in ("step", "stages", "cpu"))
                lines.append(f"  {label:24} {cells}")
    lines.append(
        f"  {'all together':24} {ratio(result['together'], 'step'):>20} {'':20} {ratio(result['together'], 'cpu'):>20}"
    )
    return "\n".join(lines)


def markdown(paths: Sequence[Path]) -> str:
    """Files that ``--out`` wrote as tables for a page: how many times faster each switch makes the step, and its stages."""

    def cell(ratio: Sequence[float] | None) -> str:
        return "" if ratio is None else f"{ratio[0]:.2f} ({ratio[1]:.2f}, {ratio[2]:.2f})"

    lines = []
    for path in paths:
        found = json.loads(path.read_text())
        lines += [f"`{found['command']}`, {found['machine']}, commit {found['commit']}:", ""]
        for of in found["results"].values():
            alone = any("alone" in gains for gains in of["gains"].values())
            heads = ["the step", "its stages", *(["the step, alone", "its stages, alone"] if alone else [])]
            lines += [f"{of['model']} ({of['dtype']}), {of['work']}.", "", f"| switch | {' | '.join(heads)} |"]
            lines.append("|---" * (len(heads) + 1) + "|")
            for name, gains in of["gains"].items():
                ratios = [gains[how][key] for how in ("off", "alone") if how in gains for key in ("step", "stages")]
                lines.append(f"| {name} | {' | '.join(map(cell, ratios))} |")
            lines.append(f"| all together | {cell(of['together']['step'])} |{' |' * (len(heads) - 1)}")
            seconds = [f"{name} {cell(of['variants'][name]['seconds'])} s" for name in ("all on", "all off")]
            lines += ["", f"A step takes {', '.join(seconds)}.", ""]
    return "\n".join(lines).rstrip()


def summary(results: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """The first model's gains, and all figures."""
    first = results[0]
    return {
        "benchmark": "switches",
        "command": " ".join(["python -m benchmarks.switches", *args.argv]),
        "commit": args.commit or commit(),
        "machine": machine(),
        "device": args.device,
        "versions": {
            "burnish": burnish.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "gains": {name: gains["off"]["step"][0] for name, gains in first["gains"].items()},
        "together": first["together"]["step"][0],
        "results": {result["model"]: result for result in results},
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.switches",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", nargs="+", help="names of benchmarks/models.py, or folders")
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    parser.add_argument("--alone", action="store_true", help="also each switch on with all others off")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count, after one that warms up")
    parser.add_argument(
        "--tolerance", type=float, help="how far loss, entropy and gradient norm may differ, relatively"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="configuration of burnish by dotted key, in YAML"
    )
    parser.add_argument("--commit", help="of the files, where git does not know it")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    parser.add_argument("--table", nargs="+", type=Path, help="files to print as Markdown, instead of measuring")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    work = parser.add_argument_group("instead of what the device's work says")
    sizes = {"prompts": int, "samples": int, "prompt_length": int, "response_length": int, "max_token_len": int}
    kinds: dict[str, Any] = {**sizes, "sigma": float, "reward_seconds": float}
    for name, kind in kinds.items():
        work.add_argument(f"--{name.replace('_', '-')}", type=kind)
    work.add_argument("--reward-kind", choices=["wait", "compute"])
    args = parser.parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else argv
    args.model = args.model or (["smollm2"] if args.device == "cpu" else ["qwen2.5-0.5b"])
    args.set = parse_settings(args.set)
    given = {name: getattr(args, name) for name in (*kinds, "reward_kind") if getattr(args, name) is not None}
    args.work = replace(CPU_WORK if args.device == "cpu" else GPU_WORK, **given)
    return args


def main() -> None:
    """Measures and prints tables, and one line of JSON if asked for."""
    args = parse()
    if args.table:
        print(markdown(args.table))
        return
    print(f"{machine()}, burnish {burnish.__version__}, transformers {transformers.__version__}", flush=True)
    results = []
    for name in args.model:
        results.append(measure(name, args.work, args))
        print(table(results[-1]), flush=True)
    line = json.dumps(summary(results, args), separators=(",", ":"))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(line + "\n")
    if args.json:
        print(line)


if __name__ == "__main__":
    main()
