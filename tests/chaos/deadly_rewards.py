"""A reward function that kills the process in which it runs, which is the driver's with reward.num_workers=0."""

import os
import signal
import time
from pathlib import Path

from burnish.reward.compute_score import default_compute_score

calls: list[str] = []


def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, kill_at, times, folder):
    """Kills at the ``kill_at``th response of a process, in the first ``times`` processes."""
    calls.append(solution_str)
    if len(calls) == kill_at:
        deaths = len(list(Path(folder).glob("death-*")))
        if deaths < times:
            (Path(folder) / f"death-{deaths}").touch()
            time.sleep(1.0)  # The heartbeat tells of the stage by then.
            os.kill(os.getpid(), signal.SIGKILL)
    return default_compute_score(data_source, solution_str, ground_truth, extra_info)
