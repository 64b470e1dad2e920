"""How long rewards take: rule functions on reward processes and in the driver, the overhead of a row, and one stuck row.

python -m benchmarks.rewards [--rows 16384] [--json]
"""

import argparse
import json
import statistics
import time

from burnish.reward.compute_score import default_compute_score
from burnish.reward.pool import RewardPool
from burnish.reward.score import read_score
from burnish.reward.scorers import InDriver
from burnish.utils import env

REASONING = "We add the two numbers and carry the one, as one does. " * 30
REPEATS = 5


def nothing(**row):
    """A reward function that takes no time: what remains is the pool's own."""
    return 0.0


def stuck_once(i, **row):
    """Row 100 never ends."""
    if i == 100:
        time.sleep(1e9)
    return 1.0


def rule_rows(num_rows: int, data_source: str) -> list[dict]:
    """Responses of some 1,700 characters, every second one right."""
    form = "#### {}" if data_source == "openai/gsm8k" else r"So it is $\boxed{{\frac{{{}}}{{7}}}}$."
    truth = "{}" if data_source == "openai/gsm8k" else r"\frac{{{}}}{{7}}"
    return [
        {
            "data_source": data_source,
            "solution_str": REASONING + form.format(i if i % 2 else i + 1),
            "ground_truth": truth.format(i),
            "extra_info": {"index": i},
        }
        for i in range(num_rows)
    ]


def timed(scorer, rows) -> tuple[list[float], list]:
    """Seconds of each repeat, and the last outcomes."""
    scorer.score(rows[:64])  # Processes start, files are loaded.
    seconds, outcomes = [], []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        outcomes = scorer.score(rows)
        seconds.append(time.perf_counter() - begun)
    return seconds, outcomes


def run(num_rows: int) -> dict[str, dict]:
    """The figures, by what was measured."""
    workers = min(8, env.num_cpus())
    figures = {}
    for source in ("openai/gsm8k", "lighteval/MATH"):
        rows = rule_rows(num_rows, source)
        for place, scorer in (
            ("driver", InDriver(default_compute_score)),
            ("pool", RewardPool(default_compute_score, num_workers=workers)),
        ):
            seconds, outcomes = timed(scorer, rows)
            right = sum(read_score(outcome.value).value == 1 for outcome in outcomes)
            assert right == num_rows // 2, f"{right} of {num_rows} are right, half were meant to be"
            scorer.close()
            figures[f"{source}, {place}"] = summary(seconds)
    rows = rule_rows(num_rows, "openai/gsm8k")
    with RewardPool(nothing, num_workers=1) as pool:
        seconds, _ = timed(pool, rows)
        figures["overhead of a row, one process (ms)"] = summary([1000 * each / num_rows for each in seconds])
        seconds = []
        for row in rows[:500]:
            begun = time.perf_counter()
            pool.score([row])
            seconds.append(1000 * (time.perf_counter() - begun))
        figures["a row alone, there and back (ms)"] = summary(seconds)
    begun = time.perf_counter()
    with RewardPool(nothing, num_workers=workers) as pool:
        pool.wait_until_ready()
        figures["until the first process is ready"] = summary([time.perf_counter() - begun])
    with RewardPool(stuck_once, num_workers=workers, timeout=2.0) as pool:
        pool.wait_until_ready()
        begun = time.perf_counter()
        outcomes = pool.score([{"i": i} for i in range(num_rows)])
        assert [i for i, outcome in enumerate(outcomes) if outcome.kind != "returned"] == [100]
        figures["one stuck row, timeout 2 s"] = summary([time.perf_counter() - begun])
    return figures


def summary(seconds: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": statistics.median(seconds), "least": min(seconds), "greatest": max(seconds)}


def main() -> None:
    """Prints the figures as a table, or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = run(arguments.rows)
    if arguments.json:
        print(json.dumps({"rows": arguments.rows, "cpus": env.num_cpus(), "figures": figures}, indent=1))
        return
    for name, entry in figures.items():
        print(f"{name:40} {entry['median']:8.3f} ({entry['least']:.3f}, {entry['greatest']:.3f})")


if __name__ == "__main__":
    main()
