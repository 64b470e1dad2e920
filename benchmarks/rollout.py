"""Response tokens per second of the native rollout engine beside vLLM or transformers' generate, turn by turn on one machine.

    python -m benchmarks.rollout --peer vllm --json                               # the `group` work on a GPU, `cpu` without one
    python -m benchmarks.rollout --scenario group single latency lognormal --peer vllm
    python -m benchmarks.rollout --scenario cpu --dtype float32 --peer hf
    python -m benchmarks.rollout --scenario group --profile profile.txt          # where decode steps spend their time

A turn is one call of ``generate`` over the whole batch, prefill included, at temperature 1 with the log-prob of every token.
Both engines get the same prompts, new ones in every turn, and no response ends before its length. After one call each that
warms up, they take turns; both stay in memory, each with its share. Figures are medians (least, greatest). With ``--json`` the
last line is one object: the figures of the first scenario, and of all of them under ``scenarios``.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from burnish.utils import env

env.calm_threads()

import torch  # noqa: E402
import transformers  # noqa: E402

import burnish  # noqa: E402
from benchmarks.demo import machine  # noqa: E402
from benchmarks.models import model_path  # noqa: E402
from benchmarks.peers.client import PEERS, Peer  # noqa: E402
from benchmarks.rollout_native import Native, memory_bandwidth  # noqa: E402
from benchmarks.rollout_work import SCENARIOS, Scenario, native_requests, peer_work, random_prompts  # noqa: E402

CPU_CACHE_GIB = 4
# More makes vLLM no faster, and its start longer by the graphs it captures.
PEER_MAX_NUM_SEQS = 1024


class PeerTurns:
    """The peer's turns in one scenario, until they have taken ``budget`` seconds or there are ``repeats`` of them.

    Args:
        batch_sizes: of transformers' generate, each measured in every turn; what counts is the best.
    """

    def __init__(self, peer: Peer, scenario: Scenario, batch_sizes: list[int], repeats: int, budget: float) -> None:
        self._peer, self._scenario = peer, scenario
        sizes = sorted({min(size, scenario.num_sequences) for size in batch_sizes})
        self._variants: list[dict[str, int]] = [{"batch_size": size} for size in sizes] if peer.name == "hf" else [{}]
        self._rates: list[list[float]] = [[] for _ in self._variants]
        self._seconds: list[float] = []
        self._repeats, self._budget = repeats, budget

    def turn(self, prompts: list[list[int]], lengths: list[int], turn: int) -> None:
        """One call for each batch size; turn 0 warms up."""
        if turn and (len(self._rates[0]) >= self._repeats or self._spent_with_another() > self._budget):
            return
        begin = time.perf_counter()
        for variant, rates in zip(self._variants, self._rates, strict=True):
            answer = self._peer.run(peer_work(self._scenario, prompts, lengths, turn, **variant))
            if answer["tokens"] != sum(lengths):
                raise RuntimeError(
                    f"{self._peer.name} gave {answer['tokens']} tokens where {sum(lengths)} were asked for."
                )
            if turn:
                rates.append(answer["tokens"] / answer["seconds"])
        self._seconds.append(time.perf_counter() - begin)

    def _spent_with_another(self) -> float:
        """Seconds after one more turn; one always counts."""
        return 0.0 if len(self._seconds) < 2 else sum(self._seconds) + self._seconds[-1]

    def figures(self) -> dict[str, Any]:
        """Of the best batch size, and the rates of all."""
        best = max(self._rates, key=statistics.median)
        figures: dict[str, Any] = {"peer": self._peer.name, "peer_repeats": len(best)} | spread(
            "peer_tokens_per_s", best
        )
        if len(self._variants) > 1:
            figures["peer_tokens_per_s_by_batch_size"] = {
                str(variant["batch_size"]): statistics.median(rates)
                for variant, rates in zip(self._variants, self._rates, strict=True)
            }
        return figures | {f"peer_{key}": value for key, value in self._peer.facts.items() if key != "ready"}


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def measure(scenario: Scenario, native: Native, peer: Peer | None, args: argparse.Namespace, bandwidth: float) -> dict:
    """All figures of one scenario."""
    turns = None if peer is None else PeerTurns(peer, scenario, args.peer_batch_sizes, args.repeats, args.peer_seconds)
    lengths = scenario.lengths()
    rates: list[float] = []
    equal_rates: list[float] = []
    shares: list[float] = []
    load = os.getloadavg()[0]
    warm_up = 0.0
    native.forget_memory()
    for turn in range(args.repeats + 1):
        prompts = random_prompts(scenario, native.vocab_size, turn)
        requests, sampling = native_requests(scenario, prompts, lengths, turn)
        seconds, responses = native.run(requests, sampling)
        given = sum(len(response.token_ids) for response in responses)
        if given != sum(lengths):
            raise RuntimeError(f"burnish gave {given} tokens where {sum(lengths)} were asked for.")
        stats = dataclasses.asdict(native.engine.stats)
        if turn:
            rates.append(given / seconds)
            shares.append(native.floor_share(requests, lengths, bandwidth))
        else:
            warm_up = seconds
        if scenario.log_normal:
            equal_requests, equal_sampling = native_requests(scenario, prompts, scenario.equal_lengths(), turn)
            equal_seconds, _ = native.run(equal_requests, equal_sampling)
            if turn:
                equal_rates.append(given / equal_seconds)
        if turns is not None:
            turns.turn(prompts, lengths, turn)
    result: dict[str, Any] = {
        "scenario": scenario.name,
        "work": scenario.describe(),
        "model": scenario.model,
        "dtype": scenario.dtypes[0],
        "device": args.device_name,
        "tokens": sum(lengths),
        "repeats": args.repeats,
        **spread("tokens_per_s", rates),
    }
    if turns is not None:
        result |= turns.figures()
        result["ratio"] = result["tokens_per_s"] / result["peer_tokens_per_s"]
    if equal_rates:
        result |= spread("equal_length_tokens_per_s", equal_rates)
        result["over_equal_length"] = result["tokens_per_s"] / result["equal_length_tokens_per_s"]
    # Before the trainer's forward, which needs memory of its own.
    result |= native.memory()
    return result | {
        **native.log_prob_differences(requests, responses, args.check_rows),
        "floor_share": statistics.median(shares),
        "memory_bandwidth_gb_per_s": bandwidth / 1e9,
        "start_seconds": native.start_seconds,
        "warm_up_seconds": warm_up,
        "last_call": {key: value for key, value in stats.items() if isinstance(value, int | float)},
        "load_before": load,
        "load_after": os.getloadavg()[0],
    }


def table(result: dict[str, Any]) -> str:
    """One scenario, for people."""

    def rate(name: str, digits: int = 0) -> str:
        low, high = result[f"{name}_min"], result[f"{name}_max"]
        return f"{result[name]:,.{digits}f} ({low:,.{digits}f}, {high:,.{digits}f})"

    lines = [
        f"{result['scenario']}, {result['model']}, {result['dtype']}: {result['work']}",
        f"  burnish, response tokens/s             {rate('tokens_per_s')}",
    ]
    if "peer" in result:
        lines.append(f"  {result['peer']:38} {rate('peer_tokens_per_s')}, {result['peer_repeats']} turns")
        for size, value in result.get("peer_tokens_per_s_by_batch_size", {}).items():
            lines.append(f"    at batch size {size:24} {value:,.0f}")
        lines.append(f"  burnish over {result['peer']:25} {result['ratio']:.2f}")
    if "over_equal_length" in result:
        lines.append(f"  burnish, equal lengths, tokens/s       {rate('equal_length_tokens_per_s')}")
        lines.append(f"  drawn over equal lengths               {result['over_equal_length']:.2f}")
    lines.append(
        f"  log-probs against the trainer's        max |d| {result['log_prob_max_difference']:.2e}, "
        f"mean |d| {result['log_prob_mean_difference']:.2e}"
    )
    if "trainer_mean_difference_to_float32" in result:
        lines.append(
            f"  both against float32, mean |d|         {result['log_prob_mean_difference_to_float32']:.2e}, "
            f"trainer {result['trainer_mean_difference_to_float32']:.2e}"
        )
    lines.append(
        f"  decode steps, share of their floor     {result['floor_share']:.1%} "
        f"at {result['memory_bandwidth_gb_per_s']:,.0f} GB/s"
    )
    if "memory_peak_gib" in result:
        lines.append(
            f"  memory peak, GiB                       {result['memory_peak_gib']:.2f} = "
            f"{result['memory_over_weights_and_cache']:.2f} x (weights {result['weights_gib']:.2f} + "
            f"cache {result['cache_gib']:.2f}); reserved {result['memory_reserved_gib']:.2f}"
        )
    starts = f"{result['start_seconds']:.1f} + first call {result['warm_up_seconds']:.1f}"
    peer_start = f"; peer {result['peer_start_seconds']:.1f}" if "peer_start_seconds" in result else ""
    lines.append(f"  start, s                               {starts}{peer_start}")
    lines.append(f"  load of the machine                    {result['load_before']:.1f} to {result['load_after']:.1f}")
    return "\n".join(lines)


def chosen_scenarios(args: argparse.Namespace) -> list[Scenario]:
    """One entry for each scenario and dtype, with what the command line changes, those of one model and dtype together."""
    names = ("model", "prompts", "samples", "prompt_length", "response_length", "max_num_seqs")
    changes = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    chosen = []
    for name in args.scenario:
        scenario = dataclasses.replace(SCENARIOS[name], **changes)
        for dtype in args.dtype or scenario.dtypes:
            chosen.append(dataclasses.replace(scenario, dtypes=(dtype,)))
    order = list(dict.fromkeys((scenario.model, scenario.dtypes) for scenario in chosen))
    return sorted(chosen, key=lambda scenario: order.index((scenario.model, scenario.dtypes)))


def run_all(scenarios: list[Scenario], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of every scenario, printed as they come; one engine and one peer for all of a model and dtype."""
    results = []
    bandwidth = memory_bandwidth(args.device)
    if args.device == "cuda":
        # The peer that starts next measures what is free.
        torch.cuda.empty_cache()
    for key in dict.fromkeys((scenario.model, scenario.dtypes) for scenario in scenarios):
        together = [scenario for scenario in scenarios if (scenario.model, scenario.dtypes) == key]
        model, dtype = model_path(key[0]), key[1][0]
        sizes = {
            "max_num_seqs": max(min(scenario.max_num_seqs, scenario.num_sequences) for scenario in together),
            "max_model_len": max(scenario.max_model_len for scenario in together),
        }
        with ExitStack() as stack:
            peer = None
            if args.peer is not None:
                # First: vLLM measures the free memory while it starts and refuses to go on when that changes.
                memory = args.memory if args.device == "cuda" else CPU_CACHE_GIB
                settings = {"model": model, "dtype": dtype, "device": args.device, "memory": memory, **sizes}
                settings["max_num_seqs"] = min(settings["max_num_seqs"], PEER_MAX_NUM_SEQS)
                peer = stack.enter_context(Peer(args.peer, settings, args.logs / f"{args.peer}_{dtype}.log"))
            native = Native(model, dtype, args.device, memory=args.memory, **sizes)
            for scenario in together:
                results.append(measure(scenario, native, peer, args, bandwidth))
                print(table(results[-1]), flush=True)
                with (args.logs / "results.jsonl").open("a") as file:
                    file.write(json.dumps(results[-1]) + "\n")
            if args.profile is not None:
                prompts = random_prompts(together[0], native.vocab_size, args.repeats + 1)
                requests, _ = native_requests(together[0], prompts, together[0].lengths(), 0)
                native.profile(requests, args.profile_windows, args.profile)
                print(f"  profile written to {args.profile}", flush=True)
            del native
    return results


def summary(results: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """The figures of the first scenario that people compare, and all others."""
    first = results[0]
    return {
        "ratio": first.get("ratio"),
        "tokens_per_s": first["tokens_per_s"],
        "peer_tokens_per_s": first.get("peer_tokens_per_s"),
        "device": args.device_name,
        "peer": args.peer,
        "machine": machine(),
        "versions": {
            "burnish": burnish.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "scenarios": {f"{result['scenario']}/{result['dtype']}": result for result in results},
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=["group" if default == "cuda" else "cpu"])
    parser.add_argument("--peer", choices=PEERS, help="the engine to run beside burnish")
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument(
        "--peer-seconds", type=float, default=600.0, help="the peer takes no more turns of a scenario after this"
    )
    parser.add_argument("--peer-batch-sizes", type=int, nargs="+", help="of transformers' generate; the best counts")
    parser.add_argument("--memory", type=float, default=0.4, help="share of the GPU's memory for each engine")
    parser.add_argument("--check-rows", type=int, default=64, help="responses whose log-probs are compared")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="write a table of decode windows of the first scenario"
    )
    parser.add_argument("--profile-windows", type=int, default=4)
    parser.add_argument("--logs", type=Path, help="folder of the peer's log and results.jsonl (a temporary one)")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    work = parser.add_argument_group("instead of what the scenario says")
    work.add_argument("--model", help="a name of benchmarks/models.py, or a folder")
    work.add_argument("--dtype", nargs="+", choices=["bfloat16", "float32"])
    for name in ("prompts", "samples", "prompt-length", "response-length", "max-num-seqs"):
        work.add_argument(f"--{name}", type=int)
    args = parser.parse_args(argv)
    if args.peer_batch_sizes is None:
        args.peer_batch_sizes = [16, 64] if args.device == "cpu" else [256]
    args.logs = Path(tempfile.mkdtemp(prefix="burnish-rollout-")) if args.logs is None else args.logs
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
    results = run_all(chosen_scenarios(args), args)
    if args.json:
        print(json.dumps(summary(results, args)))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
