"""Writes the golden numbers anew: ``python -m tests.golden.renew``. Look at the difference before committing it."""

import json
import tempfile
from pathlib import Path

from tests.golden.test_golden_runs import FOLDER, RUNS, golden_run


def main() -> None:
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            metrics = golden_run(name, Path(folder))
        (FOLDER / f"{name}.json").write_text(json.dumps(metrics, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
