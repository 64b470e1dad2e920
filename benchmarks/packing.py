"""How full micro-batches are, how even the ranks' work is, what shared prompts save, and how long planning takes.

    python -m benchmarks.packing --json
    python -m benchmarks.packing --rows 16384 --bound 16384 --ranks 8

Prompts and responses are drawn log-normal, at several spreads (the standard deviation of the logarithm), n responses to a
prompt. *Efficiency* is tokens computed / (micro-batches x bound), of rows that compute their own prompts and of rows that share
them; *saved* the share of the tokens that sharing leaves out, with what cut groups compute again. *Imbalance* is the work of the
busiest rank over the mean, by the cost model that balances (`burnish.utils.seqlen_balancing`), in order and balanced.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.demo import machine
from burnish.engine.micro_batches import split_rows
from burnish.trainer.ppo.balance import RowWork, spread
from burnish.utils.seqlen_balancing import sequence_cost

SPREADS = (0.3, 0.6, 0.9, 1.2)
MEDIAN_PROMPT, LONGEST_PROMPT = 200, 1024
MEDIAN_RESPONSE, LONGEST_RESPONSE = 400, 4096


def draw(rows: int, n: int, deviation: float, seed: int = 0) -> RowWork:
    """Groups of n rows."""
    source = random.Random(seed)

    def length(median: int, longest: int) -> int:
        return min(longest, int(median * source.lognormvariate(0, deviation)) + 1)

    groups = [row // n for row in range(rows)]
    prompt_of = [length(MEDIAN_PROMPT, LONGEST_PROMPT) for _ in range(groups[-1] + 1)]
    prompts = [prompt_of[group] for group in groups]
    return RowWork([prompt + length(MEDIAN_RESPONSE, LONGEST_RESPONSE) for prompt in prompts], prompts, list(groups))


def shared_tokens(work: RowWork, rows: list[int]) -> int:
    """Of rows in one micro-batch that computes each prompt once."""
    prompts = {work.groups[row]: work.prompt_lengths[row] for row in rows}
    return sum(work.lengths[row] - work.prompt_lengths[row] for row in rows) + sum(prompts.values())


def timed(call: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """The result, and the median of the seconds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)


def imbalance(work: RowWork, parts: list[list[int]], *, share: bool) -> float:
    """The work of the busiest rank over the mean."""
    costs = [work.cost(part) if share else sum(sequence_cost(work.lengths[row]) for row in part) for part in parts]
    return max(costs) / statistics.mean(costs)


def measure_one(work: RowWork, bound: int, ranks: int, repeats: int) -> dict[str, float]:
    """The figures of one batch."""
    own, own_seconds = timed(lambda: split_rows(work.lengths, max_token_len=bound), repeats)
    sharing: dict[str, Any] = {"prompts": work.groups, "prompt_lengths": work.prompt_lengths}
    shared, shared_seconds = timed(lambda: split_rows(work.lengths, max_token_len=bound, **sharing), repeats)
    own_tokens = [sum(work.lengths[row] for row in rows) for rows in own]
    computed = [shared_tokens(work, rows) for rows in shared]
    if max(*own_tokens, *computed) > bound:
        raise AssertionError(f"A micro-batch has more than {bound} tokens.")
    in_order = spread(work, ranks, balance=False, share_prompts=False)
    by_rows, spread_seconds = timed(lambda: spread(work, ranks, balance=True, share_prompts=False), repeats)
    by_groups, groups_seconds = timed(lambda: spread(work, ranks, balance=True, share_prompts=True), repeats)
    return {
        "efficiency": sum(own_tokens) / (len(own) * bound),
        "efficiency_shared": sum(computed) / (len(shared) * bound),
        "micro_batches": len(own),
        "micro_batches_shared": len(shared),
        "fewest_micro_batches": -(-sum(own_tokens) // bound),
        "saved_by_sharing": 1 - sum(computed) / sum(own_tokens),
        "imbalance_in_order": imbalance(work, in_order, share=False),
        "imbalance": imbalance(work, by_rows, share=False),
        "imbalance_shared": imbalance(work, by_groups, share=True),
        "seconds": own_seconds,
        "seconds_shared": shared_seconds,
        "seconds_ranks": spread_seconds,
        "seconds_ranks_shared": groups_seconds,
    }


def measure(rows: int, n: int, bound: int, ranks: int, repeats: int) -> dict[str, Any]:
    """The machine, the sizes, and the figures of each spread."""
    return {
        "machine": machine(),
        "rows": rows,
        "n": n,
        "bound": bound,
        "ranks": ranks,
        "repeats": repeats,
        "figures": {str(spread): measure_one(draw(rows, n, spread), bound, ranks, repeats) for spread in SPREADS},
    }


def table(result: dict[str, Any]) -> str:
    """The figures, for people."""
    lines = [
        result["machine"],
        f"{result['rows']} rows, {result['n']} to a prompt, log-normal; bound {result['bound']} tokens, "
        f"{result['ranks']} ranks; median of {result['repeats']} calls",
        f"{'spread':>6} {'efficiency (shared)':>20} {'micro-batches':>14} {'saved':>6} "
        f"{'imbalance: in order, balanced, shared':>38} {'seconds: packing, shared, ranks, shared':>41}",
    ]
    for spread_, figure in result["figures"].items():
        efficiency = f"{figure['efficiency']:.1%} ({figure['efficiency_shared']:.1%})"
        uneven = ", ".join(f"{figure[key]:.3f}" for key in ("imbalance_in_order", "imbalance", "imbalance_shared"))
        keys = ("seconds", "seconds_shared", "seconds_ranks", "seconds_ranks_shared")
        seconds = ", ".join(f"{figure[key]:.3f}" for key in keys)
        number = f"{figure['micro_batches']} ({figure['micro_batches_shared']})"
        lines.append(
            f"{spread_:>6} {efficiency:>20} {number:>14} {figure['saved_by_sharing']:>6.1%} {uneven:>38} {seconds:>41}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures and prints a table, or one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--n", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--bound", type=int, default=16384)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.rows, args.n, args.bound, args.ranks, args.repeats)
    print(json.dumps(result) if args.json else table(result))


if __name__ == "__main__":
    main()
