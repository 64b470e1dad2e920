"""Runs on a Ray cluster of several nodes on one machine; one process, since it can be connected to one cluster only.

    python cluster_program.py FOLDER '[{"name": ..., "overrides": [...], ...}, ...]'

Every process has one core, so that sums are made by one thread however many workers a node has, and the same numbers can be
expected to the bit. The driver runs in another folder than the one in which the nodes were started. Prints one JSON object:
what became of each run by its name.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import ray  # noqa: E402
from ray._common.utils import reset_ray_address  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from burnish.trainer.main_ppo import TaskRunner, run_ppo  # noqa: E402
from burnish.trainer.preflight.cluster import check_cluster  # noqa: E402
from burnish.trainer.preflight.findings import Findings  # noqa: E402
from burnish.utils.errors import BurnishError  # noqa: E402
from tests.e2e.runs import tiny_config  # noqa: E402

CPUS = 4
"""Of each node, as Ray counts them."""


class Nodes:
    """The cluster; the first node is the driver's."""

    def __init__(self, number: int) -> None:
        os.chdir("/")
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": CPUS, "include_dashboard": False, "object_store_memory": 150_000_000},
        )
        # Ray writes down where it is, and other runs on this machine would join it.
        reset_ray_address()
        self.others: list[Any] = []
        for _ in range(number - 1):
            self.add()

    def add(self) -> None:
        """One more."""
        self.others.append(self.cluster.add_node(num_cpus=CPUS, object_store_memory=150_000_000))

    def kill_one_when(self, file: Path) -> None:
        """The node of the last rank is gone as soon as ``file`` is there, as when its power fails."""

        def wait() -> None:
            while not file.exists():
                time.sleep(0.05)
            # Pools are placed in the order of the nodes' ids where addresses are alike; the driver's own must not be it.
            used = {actor["NodeID"] for actor in _living_actors()}
            victim = next(node for node in self.others if node.node_id in used)
            self.others.remove(victim)
            self.cluster.remove_node(victim, allow_graceful=False)

        threading.Thread(target=wait, daemon=True).start()


def _living_actors() -> list[dict[str, Any]]:
    found = []
    for actor in ray._private.state.actors().values():
        if actor["State"] == "ALIVE":
            found.append({"NodeID": actor["Address"]["NodeID"]})
    return found


def run(nodes: Nodes, folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """One run, or one check; where it fails, the error's kind and text."""
    where = [f"ray_kwargs.ray_init.address='{nodes.cluster.address}'", "trainer.controller=ray"]
    run_dir = folder / case.get("run_dir", case["name"])
    for _ in range(case.get("add_nodes", 0)):
        nodes.add()
    if "kill_at" in case:
        nodes.kill_one_when(run_dir / case["kill_at"])
    try:
        config = tiny_config(run_dir, *where, *case["overrides"])
        if case.get("check"):
            found = Findings()
            config.trainer.device = "cpu"
            check_cluster(config, found)
            return {"said": [[item.level, item.message] for item in found.items], "facts": found.facts["cluster"]}
        runner = ray.remote(TaskRunner) if case.get("runner_is_actor") else None
        summary = run_ppo(config, runner, quiet=True)
    except BurnishError as error:
        return {"error": type(error).__name__, "said": str(error)}
    return {"steps": summary.steps, "status": summary.status}


def main() -> None:
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    started = Path.cwd()
    nodes = Nodes(cases[0].get("nodes", 2))
    os.chdir(started)
    results = {}
    for case in cases:
        results[case["name"]] = run(nodes, folder, case)
        if ray.is_initialized():
            ray.shutdown()
    os.write(1, f"\n{json.dumps(results)}\n".encode())
    nodes.cluster.shutdown()


if __name__ == "__main__":
    main()
