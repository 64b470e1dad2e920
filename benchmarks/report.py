"""How long `burnish report` takes and how large its page is.

    python -m benchmarks.report --steps 200 --rollouts 512 --tokens 512

The run is made up: 200 metrics, and every response of every step dumped with its tokens. Where there is a Chromium, the page is
opened in it, and the seconds until it is drawn are told too.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

from burnish.report import open_runs, write_report
from tests.report.chromium import BINARY, Chromium
from tests.report.made_runs import made_run


def main() -> None:
    """Makes the run, writes its page, and prints one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rollouts", type=int, default=512, help="responses of a step, 8 to each prompt")
    parser.add_argument("--tokens", type=int, default=512, help="of a response, at most")
    parser.add_argument("--max-mb", type=float, default=20.0)
    parser.add_argument("--out", type=Path, help="keep the page here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        made_run(
            run,
            num_steps=options.steps,
            num_prompts=max(1, options.rollouts // 8),
            num_samples=8,
            num_tokens=options.tokens,
            num_metrics=175,
        )
        dumped = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
        started, processor = time.perf_counter(), time.process_time()
        runs = open_runs([str(run)])
        read = time.perf_counter() - started
        out = options.out or Path(folder) / "report.html"
        size = write_report(runs, out, most_mb=options.max_mb)
        seconds = time.perf_counter() - started
        result = {
            "steps": options.steps,
            "rollouts_a_step": options.rollouts,
            "run_mb": round(dumped / 1e6, 1),
            "read_s": round(read, 2),
            "seconds": round(seconds, 2),
            "cpu_seconds": round(time.process_time() - processor, 2),
            "page_mb": round(size / 1e6, 2),
            "peak_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        }
        if BINARY is not None:
            with Chromium(Path(folder) / "profile") as browser:
                started = time.perf_counter()
                browser.open(out.resolve().as_uri())
                result["opened_s"] = round(time.perf_counter() - started, 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
