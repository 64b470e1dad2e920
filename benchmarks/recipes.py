"""Runs the recipes of examples/reasoning, several seeds each, and keeps what they reached in docs/results.

    python -m benchmarks.recipes --recipe grpo --task chain_sum --seeds 1 2 3 --json
    python -m benchmarks.recipes --jobs grpo:chain_sum:1 ppo:chain_sum:1 sft-grpo:countdown:1 --parallel 3 --seconds 500
    python -m benchmarks.recipes --all --skip-done --seconds 540 --json        # goes on where the last call ended
    python -m benchmarks.recipes --recipe grpo --set trainer.total_training_steps=20 trainer.test_freq=10

Every job is the script as a user would start it; ``--set`` hands keys to its training command. Results are called
``<recipe>-<task>``, on a CPU with ``-cpu`` behind it; seeds that a result lacks are added to those it has, seeds that it has are
replaced. ``--parallel`` starts several jobs at once: their speeds are kept with each run, and the summary leaves them out.
``sft-grpo`` measures the model, teaches it by sft.sh, and goes on with grpo.sh. Checkpoints are removed when a job is read,
unless ``--keep``. With ``--json`` the last lines are the results that changed, one a line, in one's file's form.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.results.figures import held_out
from burnish.utils.json_lines import read_lines

ROOT = Path(__file__).parents[1]
SMOLLM2 = "models/smollm2"
"""What common.sh fetches where it is missing."""
clock = time.monotonic
TITLES = {
    "grpo": "GRPO",
    "dapo": "DAPO",
    "ppo": "PPO with a critic",
    "lora": "GRPO of LoRA adapters",
    "vllm": "GRPO, vLLM samples",
    "sft-grpo": "SFT, then GRPO",
}
TASKS = ("chain_sum", "basic_arithmetic", "countdown")
_FIRST = ("grpo:chain_sum", "ppo:chain_sum", "dapo:chain_sum", "sft-grpo:countdown", "lora:chain_sum", "vllm:chain_sum")
# The model gets 2 % of it right when it samples: too few to begin with rewards alone.
_MORE = ("sft-grpo:basic_arithmetic",)
ALL = [f"{job}:{seed}" for seed in (1, 2, 3) for job in _FIRST] + [
    f"{job}:{seed}" for seed in (1, 2, 3) for job in _MORE
]
"""In the order of what is to be known first."""


@dataclass(kw_only=True)
class Job:
    """One recipe on one task with one seed, and the processes of its scripts, one after the other."""

    recipe: str
    task: str
    seed: int
    args: argparse.Namespace
    begun: float = 0.0
    most_beside: int = 1
    steps: list[tuple[str, str, list[str]]] = field(default_factory=list)
    process: subprocess.Popen | None = None

    @property
    def words(self) -> str:
        """As it is named on the command line."""
        return f"{self.recipe}:{self.task}:{self.seed}"

    @property
    def result(self) -> str:
        """Name of the result that it belongs to."""
        return f"{self.recipe}-{self.task}{self.args.label}"

    @property
    def folder(self) -> Path:
        """Of its runs."""
        return self.args.runs / f"{self.result}-{self.seed}"

    def start(self) -> None:
        """Starts its first script."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        more = list(self.args.set)
        if self.args.parallel > 1:
            # Each run would otherwise take half of the device for its cache.
            more.insert(0, f"actor_rollout_ref.rollout.gpu_memory_utilization={0.6 / self.args.parallel:.2f}")
        if self.recipe == "sft-grpo":
            base = [*more, "trainer.val_only=true"]
            self.steps = [("base", "grpo", base), ("sft", "sft", self.args.sft_set), ("run", "grpo", more)]
        else:
            self.steps = [("run", self.recipe, more)]
        self.begun = clock()
        self._next()

    def _next(self) -> None:
        name, script, more = self.steps.pop(0)
        model = self.folder / "sft" / "model" if self.recipe == "sft-grpo" and name == "run" else self.args.model
        environment = os.environ | {
            "MODEL": str(model), "TASK": self.task, "SEED": str(self.seed), "RUN": str(self.folder / name),
            "PYTHON": sys.executable,
        }  # fmt: skip
        log = (self.folder / f"{name}.log").open("w")
        self.process = subprocess.Popen(
            ["bash", f"examples/reasoning/{script}.sh", *more],
            cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        log.close()

    def poll(self) -> int | None:
        """None while it runs; the status of its last script, or of the first that failed."""
        status = self.process.poll() if self.process else 0
        if status == 0 and self.steps:
            self._next()
            return None
        return status

    def stop(self) -> None:
        """Ends its processes."""
        assert self.process is not None
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(10)
                return
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue

    def read(self) -> dict[str, Any]:
        """The run's figures; with a supervised start also what the model could before it, and that stage's own."""
        run = results.read_run(self.folder / "run", side_by_side=self.most_beside)
        place = results.place()
        run |= {"seed": self.seed, "wall_seconds": clock() - self.begun}
        run |= {"machine": place["machine"], "commit": place["commit"]}
        if self.recipe == "sft-grpo":
            run["base"] = held_out(next(read_lines(self.folder / "base" / "metrics.jsonl")))
            run["sft"] = results.read_run(self.folder / "sft", side_by_side=self.most_beside)
        return run

    def tail(self) -> str:
        """The last lines of its newest log."""
        logs = sorted(self.folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
        lines = logs[-1].read_text(errors="replace").splitlines() if logs else []
        return "\n".join(f"    {line[:200]}" for line in lines[-15:])


class Schedule:
    """Jobs in their order, some at once, within a number of seconds."""

    def __init__(self, jobs: list[Job], args: argparse.Namespace) -> None:
        self.args = args
        self.waiting = jobs
        self.running: list[Job] = []
        self.deadline = clock() + args.seconds
        self.longest = args.job_seconds
        self.changed: dict[str, Path] = {}
        self.failed = 0

    def run(self) -> None:
        """Until all is done, or the time is over."""
        try:
            while self.waiting or self.running:
                self._start_some()
                if not self.running:
                    break
                time.sleep(0.3)
                self._end_some()
        finally:
            for job in self.running:
                job.stop()
        if self.waiting:
            print(f"No time left for {' '.join(job.words for job in self.waiting)}", flush=True)

    def _start_some(self) -> None:
        while self.waiting and len(self.running) < self.args.parallel:
            # A job that would not end in time only takes from those that do.
            if clock() + self.longest > self.deadline:
                return
            job = self.waiting.pop(0)
            job.start()
            self.running.append(job)
            for each in self.running:
                each.most_beside = max(each.most_beside, len(self.running))

    def _end_some(self) -> None:
        for job in list(self.running):
            status = job.poll()
            if status is None and clock() > self.deadline:
                job.stop()
                status = "no time left"
            if status is None:
                continue
            self.running.remove(job)
            took = clock() - job.begun
            if status == 0:
                try:
                    run = job.read()
                except ValueError as error:  # it ended well, without a step: what it said is in its log
                    status = str(error)
            if status != 0:
                self.failed += 1
                print(f"== {job.words}: {status} after {took:.0f} s\n{job.tail()}", flush=True)
                continue
            # What was measured in a run alone is no bound for several at once: the longest so far is.
            self.longest = took if not self.changed else max(self.longest, took)
            self._keep(job, run, took)

    def _keep(self, job: Job, run: dict[str, Any], took: float) -> None:
        self.changed[job.result] = add_run(job, run)
        before, after = (run.get(when, {}).get("accuracy") for when in ("before", "after"))
        print(f"== {job.words}: {took:.0f} s, held-out accuracy {before} to {after}", flush=True)
        if not self.args.keep:
            for path in [*job.folder.glob("*/global_step_*"), *job.folder.glob("*/model")]:
                shutil.rmtree(path)


def add_run(job: Job, run: dict[str, Any]) -> Path:
    """Puts a run into its result."""
    path = job.args.results / f"{job.result}.json"
    runs = [run]
    if path.exists():
        before = results.read_result(path)
        own = {key: before[key] for key in ("machine", "commit")}
        runs += [own | other for other in before["runs"] if other["seed"] != run["seed"]]
    extra = {
        "title": f"{TITLES[job.recipe]}, {job.task}",
        "recipe": job.recipe,
        "task": job.task,
        "script": f"examples/reasoning/{job.recipe.removeprefix('sft-')}.sh",
        "model": Path(job.args.model).name,
    }
    return results.write_result(job.result, runs, extra=extra, folder=job.args.results)


def is_done(job: Job) -> bool:
    """Whether its result has its seed."""
    path = job.args.results / f"{job.result}.json"
    return path.exists() and job.seed in [run["seed"] for run in results.read_result(path)["runs"]]


def check_machine(jobs: list[Job]) -> None:
    """Before anything runs: results that jobs would add to are of such a device as this machine's.

    Raises:
        ValueError: one is not.
    """
    here = results.place()["machine"]
    for path in {job.args.results / f"{job.result}.json" for job in jobs}:
        there = results.read_result(path)["machine"] if path.exists() else here
        if results.device(there) != results.device(here):
            raise ValueError(
                f"{path} is of another machine ({there}; this one is {here}): seeds of two machines make no mean, unless their "
                f"GPU and torch are the same. Take it away, or name this machine's results otherwise with --label."
            )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--recipe", choices=TITLES)
    what.add_argument("--jobs", nargs="+", metavar="RECIPE:TASK:SEED")
    what.add_argument(
        "--all", action="store_true", help="every job of the page of results, the most telling ones first"
    )
    parser.add_argument("--task", choices=TASKS, default="chain_sum", help="with --recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="with --recipe")
    parser.add_argument("--model", default=SMOLLM2, help="folder, or name of the hub")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys for the training command")
    parser.add_argument("--sft-set", nargs="+", default=[], metavar="KEY=VALUE", help="keys for sft.sh of sft-grpo")
    parser.add_argument("--parallel", type=int, default=1, help="jobs at once")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="in all; a job that would take longer is left out"
    )
    parser.add_argument("--job-seconds", type=float, default=100.0, help="of a job, until one was measured")
    parser.add_argument("--skip-done", action="store_true", help="jobs whose seed is in its result")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "recipes", help="folder of the runs")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="folder of the results")
    parser.add_argument("--label", help="behind the results' names; default: -cpu without a GPU, else nothing")
    parser.add_argument("--keep", action="store_true", help="do not remove checkpoints")
    parser.add_argument("--json", action="store_true", help="print the results that changed, one a line")
    args = parser.parse_args(argv)
    if args.recipe:
        args.jobs = [f"{args.recipe}:{args.task}:{seed}" for seed in args.seeds]
    elif args.all:
        args.jobs = ALL
    for job in args.jobs:
        recipe, _, rest = job.partition(":")
        task, _, seed = rest.partition(":")
        if recipe not in TITLES or task not in TASKS or not seed.isdigit():
            parser.error(
                f"{job}: a job is RECIPE:TASK:SEED with a recipe of {', '.join(TITLES)}, a task of {', '.join(TASKS)}, and a "
                f"number, as grpo:chain_sum:1."
            )
    if Path(args.model).exists():
        args.model = str(Path(args.model).absolute())
    args.runs, args.results = args.runs.absolute(), args.results.absolute()
    if args.label is None:
        args.label = "" if has_gpu() else "-cpu"
    return args


def fetch_model() -> None:
    """Once: several jobs that found it missing would each fetch it, to the same place."""
    subprocess.run([sys.executable, "-m", "burnish.cli", "model", "smollm2", SMOLLM2], cwd=ROOT, check=True)


def has_gpu() -> bool:
    """Whether jobs will run on one."""
    import torch

    return torch.cuda.is_available()


def main() -> None:
    """Runs jobs, prints a line for each, then a table and, if asked, the results themselves."""
    args = parse()
    jobs = []
    for words in args.jobs:
        recipe, task, seed = words.split(":")
        jobs.append(Job(recipe=recipe, task=task, seed=int(seed), args=args))
    jobs = [job for job in jobs if not (args.skip_done and is_done(job))]
    check_machine(jobs)
    if jobs and args.model == SMOLLM2 and not (ROOT / SMOLLM2).exists():
        fetch_model()
    schedule = Schedule(jobs, args)
    schedule.run()
    if schedule.changed:
        print(results.table(schedule.changed.values()))
    if args.json:
        for path in schedule.changed.values():
            print(json.dumps(json.loads(path.read_text()), separators=(",", ":")))
    sys.exit(1 if schedule.failed else 0)


if __name__ == "__main__":
    main()
