"""Writes the golden numbers anew: ``python -m tests.golden.renew [NAME ...]``. Look at the difference before committing it."""

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.golden.test_golden_runs import FOLDER, RUNS, golden_run
from tests.golden.test_golden_training import TRAININGS, golden_training

Metrics = list[dict[str, float]]


def main(names: list[str]) -> None:
    golden: dict[str, Callable[[], Metrics]] = {name: partial(run_in_new_folder, name) for name in RUNS}
    golden |= {name: partial(golden_training, name) for name in TRAININGS}
    for name in names or golden:
        (FOLDER / f"{name}.json").write_text(json.dumps(golden[name](), indent=1, sort_keys=True) + "\n")


def run_in_new_folder(name: str) -> Metrics:
    with tempfile.TemporaryDirectory() as folder:
        return golden_run(name, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
