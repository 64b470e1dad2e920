"""Does burnish learn as another trainer does? Whole runs of both from the same model on the same prompts, a seed after another.

    python -m benchmarks.learning --peer trl --seeds 1 2 3 --json                  # CPU: the tiny model; GPU: SmolLM2
    python -m benchmarks.learning --peer verl --seeds 1 --out docs/results --add   # a GPU; seeds add up over several calls
    python -m benchmarks.learning --peer trl --task smollm2 --out docs/results --show      # the tables of what is kept there
    python -m benchmarks.learning --peer variant --peer-set actor_rollout_ref.rollout.name=vllm    # burnish beside itself
    python -m benchmarks.learning --map                                            # each setting in the words of all sides

Both sides get the same prompts in the same order, sample as many responses to each, and make as many updates by the same loss
with the same optimizer: `benchmarks.learning.work.settings` has the map. Every run is a process of its own, one at a time (or
``--at-once`` several, where nothing but what is learnt counts): ``burnish train`` with its defaults wherever nothing is
compared, TRL's or verl's trainer in the Python of its own environment. ``--peer variant`` compares burnish with itself, other
settings given to one side by ``--peer-set``: what does one of them change in what is learnt?
Held-out accuracy is measured by ``burnish eval``, greedy, on the models that each side saved, so one program measures both.
Whether the sides learn alike is decided by a test that is written down beforehand (`benchmarks.learning.verdict`).

Seconds of a step leave out saving; the first step is left out of medians. On a GPU burnish samples with its own engine and a
peer with vLLM (TRL with ``generate``, if asked), each with the same share of memory. Memory is, on a CPU, the most that the
training process held; on a GPU, the most that was in use of the whole card beside what was before. With ``--out`` the runs of
each side are kept as a file, and with ``--add`` seeds that are in both files already are not run again; calls may run at once.
"""

import argparse
import json
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from burnish.utils import env

env.calm_threads()

import torch  # noqa: E402

from benchmarks.demo import machine  # noqa: E402
from benchmarks.grpo_step import parse_settings  # noqa: E402
from benchmarks.learning.sides import check_alike, learn  # noqa: E402
from benchmarks.learning.tables import line, table, title  # noqa: E402
from benchmarks.learning.verdict import RULE, verdict  # noqa: E402
from benchmarks.learning.work import ROOT, LearningWork, map_table, write_rows  # noqa: E402
from benchmarks.models import model_path  # noqa: E402
from benchmarks.peers.client import PeerError  # noqa: E402
from benchmarks.results import Run, over_seeds, plot, read_result, write_result  # noqa: E402

TINY = ROOT / "examples" / "tiny_model"
TASKS: dict[str, dict[str, Any]] = {
    "tiny": {
        "title": "tiny model, two-digit sums and differences",
        "model": str(TINY / "model"),
        "train": str(TINY / "data" / "train.jsonl"),
        "val": str(TINY / "data" / "test.jsonl"),
        "reward": "burnish.reward.functions.arithmetic:compute_score",
        "prompts": 64,
        "samples": 8,
        "prompt_length": 32,
        "response_length": 8,
        "steps": 40,
        "lr": 3e-4,
        "save_every": 5,
        "micro_batch_rows": 512,
    },
    "smollm2": {
        "title": "SmolLM2-135M-Instruct, chain sums",
        "model": "smollm2",
        "train": str(ROOT / "examples" / "reasoning" / "data" / "chain_sum" / "train.jsonl"),
        "val": str(ROOT / "examples" / "reasoning" / "data" / "chain_sum" / "test.jsonl"),
        "reward": "examples.reasoning.reward:compute_score",
        "prompts": 64,
        "samples": 8,
        "prompt_length": 256,
        "response_length": 24,
        "steps": 40,
        "lr": 1e-5,
        "save_every": 10,
        "micro_batch_rows": 128,
    },
}
SIZES = (
    "prompts",
    "samples",
    "updates",
    "prompt_length",
    "response_length",
    "steps",
    "lr",
    "kl",
    "save_every",
    "micro_batch_rows",
)


def work_of(args: argparse.Namespace, seed: int, folder: Path) -> LearningWork:
    """The work of one seed; its rows are written to ``folder``.

    Raises:
        SystemExit: the task's rows are not there.
    """
    train, val = folder / f"train_{seed}.jsonl", folder / "val.jsonl"
    task = args.settings
    if not Path(task["train"]).exists():
        raise SystemExit(
            f"{task['train']} is not there; `python -m examples.reasoning.data` makes the rows of its tasks."
        )
    write_rows(Path(task["train"]), train, task["prompts"] * task["steps"], seed)
    shutil.copyfile(task["val"], val)
    sizes = {name: task[name] for name in SIZES if name in task}
    work = LearningWork(
        model=model_path(task["model"]),
        train_file=str(train),
        val_file=str(val),
        reward=task["reward"],
        seed=seed,
        device=args.device,
        dtype=args.dtype,
        engine_memory=args.engine_memory,
        peer_engine=args.peer_engine,
        peer_settings=args.peer_set,
        **sizes,
    )
    work.check()
    return work


def measure(args: argparse.Namespace) -> dict[str, list[Run]]:
    """The runs of both sides, seed by seed; results are written after each, so that a call that is cut off leaves what it had.

    Raises:
        PeerError: a program failed; what the others have found is written by then.
    """
    runs = kept(args)
    done = {run["seed"] for run in runs["burnish"]}
    seeds, failed = [seed for seed in args.seeds if seed not in done], []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.work)))
        programs = stack.enter_context(ThreadPoolExecutor(args.at_once))
        # After an error nothing further is begun.
        stack.callback(programs.shutdown, cancel_futures=True)
        works = {seed: work_of(args, seed, scratch) for seed in seeds}
        # The sides that take longer to start first.
        begun = {
            (seed, side): programs.submit(learn, side, works[seed], args.logs / f"{side}_{seed}")
            for seed in seeds
            for side in (reversed(runs) if args.at_once > 1 else runs)
        }
        for seed in seeds:
            try:
                pair = {side: begun[seed, side].result() for side in runs}
            except PeerError as error:
                failed.append(error)
                if args.at_once == 1:
                    break
                continue
            check_alike(pair)
            runs = with_seed(args, runs, seed, pair)
            if args.out is not None:
                write(args, runs, works[seed])
    if failed:
        raise failed[0]
    return runs


def with_seed(args: argparse.Namespace, runs: dict[str, list[Run]], seed: int, pair: dict[str, Run]) -> dict:
    """``runs`` and those of one more seed, which are printed, in the order of the seeds."""
    if args.add:
        # Other calls may have added theirs meanwhile.
        runs = {side: [run for run in found if run["seed"] != seed] for side, found in kept(args).items()}
    for side, run in pair.items():
        if run.get("gpu_gib") is not None and args.side_by_side > 1:
            # That of all programs on it.
            del run["gpu_gib"]
        kept_keys = {key: value for key, value in run.items() if key != "prompt_tokens"}
        added = [*runs[side], {**kept_keys, "side_by_side": args.side_by_side}]
        runs[side] = sorted(added, key=lambda each: each["seed"])
        print(line(side, run), flush=True)
    return runs


def name_of(args: argparse.Namespace, side: str) -> str:
    """Of a side's result; those of burnish say beside whom, since the work may be another one."""
    return f"learning-{args.name}-{side}" if side != "burnish" else f"learning-{args.name}-burnish-beside-{args.peer}"


def kept(args: argparse.Namespace) -> dict[str, list[Run]]:
    """The runs of seeds that both sides' files have, with ``--add`` or ``--show``.

    Raises:
        SystemExit: they are of other work, or of another machine.
    """
    sides: dict[str, list[Run]] = {"burnish": [], args.peer: []}
    paths = {side: args.out / f"{name_of(args, side)}.json" for side in sides} if args.out else {}
    if not (args.add or args.show) or not all(path.exists() for path in paths.values()):
        return sides
    results = {side: read_result(path) for side, path in paths.items()}
    for side, result in results.items():
        if args.add and result["machine"] != machine():
            raise SystemExit(f"{paths[side]} is of another machine ({result['machine']}); give another --name.")
        if args.add and result["work"] != shown_work(args):
            raise SystemExit(
                f"{paths[side]} is of other work ({result['work']}); give another --name, or leave --add out."
            )
    both = set.intersection(*({run["seed"] for run in result["runs"]} for result in results.values()))
    return {side: [run for run in result["runs"] if run["seed"] in both] for side, result in results.items()}


def shown_work(args: argparse.Namespace) -> dict[str, Any]:
    """What was learnt, for a result's file."""
    task = args.settings
    return {
        "model": Path(args.model).name if args.model else task["title"],
        **{name: Path(given).name for name in ("train", "val", "reward") if (given := getattr(args, name)) is not None},
        **{name: task[name] for name in SIZES if name in task},
        "device": args.device,
        "dtype": args.dtype,
        **({"peer_settings": args.peer_set} if args.peer_set else {}),
    }


def write(args: argparse.Namespace, runs: dict[str, list[Run]], work: LearningWork) -> None:
    """Both files and the figure."""
    said = verdict(runs["burnish"], runs[args.peer])
    for side, found in runs.items():
        versions = next((run["peer_versions"] for run in found if "peer_versions" in run), None)
        extra = {"title": title(side, versions), "work": shown_work(args), "describe": work.describe()}
        if side == args.peer:
            extra |= {"peer_versions": versions, "verdict": said, "rule": RULE}
        lean = [{key: value for key, value in run.items() if key != "peer_versions"} for run in found]
        write_result(name_of(args, side), lean, extra=extra, folder=args.out)
    if args.plot:
        draw(args)


def draw(args: argparse.Namespace) -> None:
    """The figure of both sides' files."""
    paths = [args.out / f"{name_of(args, side)}.json" for side in ("burnish", args.peer)]
    plot(paths, args.out / f"learning-{args.name}-{args.peer}.png")


def summary(args: argparse.Namespace, runs: dict[str, list[Run]], said: dict[str, Any]) -> dict[str, Any]:
    """The figures as one object."""
    return {
        "says": said["says"],
        "verdict": said,
        "rule": RULE,
        "work": shown_work(args),
        "machine": machine(),
        "sides": {
            side: {
                "seeds": [run["seed"] for run in found],
                "before": over_seeds([run["before"]["accuracy"] for run in found]),
                "after": over_seeds([run["after"]["accuracy"] for run in found]),
                "step_seconds": [run["stage_seconds"]["step"] for run in found],
                "cpu_seconds": [round(run["cpu_seconds"], 1) if "cpu_seconds" in run else None for run in found],
                "side_by_side": [run.get("side_by_side", 1) for run in found],
                "memory_gib": [run.get("gpu_gib", run.get("process_gib")) for run in found],
                "curves": [run["curve"] for run in found],
                "train_reward": [[round(value, 4) for value in run["train_reward"]] for run in found],
                "versions": next((run["peer_versions"] for run in found if "peer_versions" in run), None),
            }
            for side, found in runs.items()
        },
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--peer",
        choices=["trl", "verl", "variant"],
        default="trl",
        help="verl needs a GPU; variant is burnish with what --peer-set gives",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--task", choices=TASKS, default="smollm2" if on_gpu else "tiny")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the computation; bfloat16 on a GPU")
    parser.add_argument("--engine-memory", type=float, default=0.3, help="share of the GPU for each side's sampling")
    parser.add_argument(
        "--peer-engine", choices=["vllm", "hf"], default="vllm", help="TRL's sampling on a GPU; hf: generate"
    )
    parser.add_argument(
        "--peer-set", nargs="+", default=[], metavar="KEY=VALUE", help="more of the peer's configuration, in YAML"
    )
    parser.add_argument("--out", type=Path, help="folder of the results' files, as docs/results; else none are written")
    parser.add_argument("--name", help="of the results, as learning-NAME-trl.json; the task's")
    parser.add_argument("--add", action="store_true", help="keep the seeds that the files in --out have")
    parser.add_argument("--show", action="store_true", help="run nothing, print the tables of what --out has")
    parser.add_argument("--plot", action="store_true", help="draw the curves into --out, too")
    parser.add_argument(
        "--side-by-side",
        type=int,
        default=1,
        help="programs on the device, this one included; beside others seconds of the clock are not told",
    )
    parser.add_argument(
        "--at-once", type=int, default=1, help="runs that share the device; so many are side by side, at least"
    )
    parser.add_argument("--logs", type=Path, help="folder of every run's log (a temporary one)")
    parser.add_argument("--work", type=Path, help="folder for the data while a seed runs (the system's)")
    parser.add_argument("--map", action="store_true", help="print each setting in the words of all sides, and end")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    group = parser.add_argument_group("instead of what the task says")
    for name, kind in (("model", str), ("train", str), ("val", str), ("reward", str)):
        group.add_argument(f"--{name}", type=kind)
    for name in SIZES:
        group.add_argument(f"--{name.replace('_', '-')}", type=float if name in ("lr", "kl") else int)
    args = parser.parse_args(argv)
    given = {
        name: value
        for name in (*SIZES, "model", "train", "val", "reward")
        if (value := getattr(args, name)) is not None
    }
    args.settings = TASKS[args.task] | given
    args.peer_set = parse_settings(args.peer_set)
    args.side_by_side = max(args.side_by_side, args.at_once)
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    args.name = args.name or (args.task if args.peer_engine == "vllm" else f"{args.task}-generate")
    if args.peer == "verl" and args.peer_engine != "vllm":
        parser.error("verl samples with vLLM: --peer-engine hf is for --peer trl.")
    if args.peer == "variant" and not args.peer_set and not (args.map or args.show):
        parser.error("a variant is burnish with other settings, and none are given: add --peer-set KEY=VALUE.")
    if args.peer == "verl" and args.device == "cpu" and not (args.map or args.show):
        parser.error(
            "verl has no training engine and no rollout for a CPU (docs/comparison.md): --peer verl needs a GPU."
        )
    if (args.add or args.plot or args.show) and args.out is None:
        parser.error("--add, --plot and --show need --out, the folder of the results.")
    args.logs = args.logs and args.logs.resolve()
    return args


def main() -> None:
    """Runs, compares, prints."""
    args = parse()
    if args.map:
        with tempfile.TemporaryDirectory() as folder:
            print(map_table(work_of(args, args.seeds[0], Path(folder))))
        return
    if args.show:
        runs = kept(args)
        if not runs["burnish"]:
            raise SystemExit(f"{args.out} has no {name_of(args, args.peer)}.json with burnish's runs beside it.")
        if args.plot:
            draw(args)
    else:
        args.logs = args.logs or Path(tempfile.mkdtemp(prefix="burnish-learning-"))
        args.logs.mkdir(parents=True, exist_ok=True)
        print(f"{machine()}; logs in {args.logs}\n{RULE}", flush=True)
        runs = measure(args)
    said = verdict(runs["burnish"], runs[args.peer])
    print(table(runs, said))
    print(f"burnish beside {args.peer}: {said['says']}")
    if args.json:
        print(json.dumps(summary(args, runs, said), separators=(",", ":")))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
