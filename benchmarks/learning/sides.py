"""One run of one side in a process of its own, and the accuracy of the models that it left, measured alike for all sides."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.learning.work import ROOT, LearningWork, merged, words
from benchmarks.peers.client import PeerError, interpreter
from benchmarks.results import Run, read_run
from burnish.utils import env

OURS = ("burnish", "variant")
"""A variant is burnish with more of its configuration given."""
_EVALUATES = threading.Lock()
"""Programs may run at once, but this one evaluates one model at a time."""
_USED = "status, KiB, seconds of CPU: "
# A program's most memory, as the system counts it, is never less than that of the program that starts it: so a small one does.
_START = (
    "import os, subprocess, sys; process = subprocess.Popen(sys.argv[1:]); _, status, used = os.wait4(process.pid, 0); "
    f"print('\\n{_USED}', [os.waitstatus_to_exitcode(status), used.ru_maxrss, used.ru_utime + used.ru_stime], sep='')"
)


def learn(side: str, work: LearningWork, folder: Path) -> Run:
    """Trains and measures; the models are gone afterwards.

    Returns:
        the run as `benchmarks.results` describes it, with ``prompt_tokens`` of every step, what `execute` tells of memory and
        time, and ``peer_versions`` of a peer.

    Raises:
        PeerError: it failed; its log says why.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = burnish_command(side, work, folder) if side in OURS else peer_command(side, work, folder)
    memory = execute(command, folder / "log.txt", work.device)
    run = burnish_run(folder) if side in OURS else peer_run(work, folder)
    if side == "verl":
        # Its work is done by Ray's processes, which nobody's seconds count.
        del memory["cpu_seconds"]
    run = {**run, **memory, "seed": work.seed}
    models = {step: model_folder(side, folder, step) for step in work.measured_steps}
    measured = {step: accuracy(str(path), work) for step, path in {0: Path(work.model), **models}.items()}
    for path in models.values():
        shutil.rmtree(path)
    run["curve"] = [[step, found["accuracy"]] for step, found in measured.items()]
    return {**run, "before": measured[0], "after": measured[work.steps]}


def burnish_command(side: str, work: LearningWork, folder: Path) -> list[str]:
    """``burnish train`` on the work; a variant takes what was given for the peer."""
    module, _, function = work.reward.partition(":")
    spec = find_spec(module)
    assert spec is not None
    own: dict[str, Any] = {
        "actor_rollout_ref.model.path": work.model,
        "data.train_files": [work.train_file],
        "data.val_files": [work.val_file],
        "reward.custom_reward_function.path": spec.origin,
        "reward.custom_reward_function.name": function,
        "trainer.device": work.device,
        "trainer.n_gpus_per_node": 1,
        "trainer.default_local_dir": str(folder / "run"),
        "trainer.logger": ["file"],
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": work.save_every,
        "trainer.resume_mode": "disable",
        "actor_rollout_ref.actor.checkpoint.save_contents": ["model"],
    }
    if work.device == "cuda":
        own["actor_rollout_ref.rollout.gpu_memory_utilization"] = work.engine_memory
    given = work.peer_settings if side == "variant" else {}
    return [sys.executable, "-m", "burnish", "train", *words(own | merged(work, "burnish") | given)]


def peer_command(side: str, work: LearningWork, folder: Path) -> list[str]:
    """The peer's program, in the interpreter of its environment."""
    return [interpreter(side), "-m", f"benchmarks.peers.{side}_learning", json.dumps(work.as_dict()), str(folder)]


def execute(command: list[str], log: Path, device: str) -> dict[str, float]:
    """Runs a command to its end.

    Returns:
        ``gpu_gib``, the most memory of the GPU that was in use meanwhile beside what was before, or on a CPU ``process_gib``,
        the most that one process held; and ``cpu_seconds`` of all threads from its start to its end.

    Raises:
        PeerError: it ended otherwise than well.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with log.open("w") as out:
        watch = GPUMemory() if device == "cuda" else None
        starter = [sys.executable, "-S", "-c", _START, *command]
        done = subprocess.run(starter, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, check=False)
    told = log.read_text(encoding="utf-8", errors="replace")
    code, most_kib, seconds = (
        json.loads(told.rpartition(_USED)[2].splitlines()[0]) if _USED in told else (done.returncode, 0, 0.0)
    )
    memory = {"process_gib": most_kib / 2**20} if watch is None else {"gpu_gib": watch.stop()}
    memory["cpu_seconds"] = seconds
    if code != 0:
        end = "\n".join(told.splitlines()[-15:])
        raise PeerError(f"{' '.join(command[1:4])} ended with code {code}; the end of {log}:\n{end}")
    return memory


class GPUMemory:
    """Looks twice a second at the memory in use on the GPU that programs take, of all processes together, less what is in use
    now."""

    def __init__(self) -> None:
        self._before = self._most = gpu_memory_used() or 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """The most that was seen, in GiB."""
        self._done.set()
        self._thread.join()
        return self._most - self._before

    def _watch(self) -> None:
        while not self._done.wait(0.5):
            self._most = max(self._most, gpu_memory_used() or 0.0)


def gpu_memory_used() -> float | None:
    """GiB in use on the GPU that programs take, as its driver tells; None where it does not."""
    # The driver numbers all GPUs of the computer, whatever this process may see.
    taken = (env.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0].strip()
    query = ["nvidia-smi", f"--id={taken}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return float(answer) / 1024 if answer.isdigit() else None


def burnish_run(folder: Path) -> Run:
    """What burnish's own files tell."""
    run = read_run(folder / "run")
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "timing_s/step" in line]
    run["prompt_tokens"] = [round(line["prompt_length/mean"] * line["training/num_rows"]) for line in steps]
    for key in ("what_ran", "memory_gib", "seconds", "mfu"):
        run.pop(key, None)
    return run


def peer_run(work: LearningWork, folder: Path) -> Run:
    """What a peer's ``steps.jsonl`` tells, in the words of `benchmarks.results`.

    Raises:
        PeerError: it made another number of steps.
    """
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    if len(steps) != work.steps:
        raise PeerError(f"{folder / 'steps.jsonl'} has {len(steps)} steps where {work.steps} were asked for.")
    warm = steps[1:] or steps
    return {
        "steps": work.steps,
        "train_seconds": sum(step["seconds"]["step"] for step in steps),
        "train_reward": [step["mean_score"] for step in steps],
        "prompt_tokens": [step["prompt_tokens"] for step in steps],
        "stage_seconds": {
            name: statistics.median(step["seconds"][name] for step in warm) for name in warm[0]["seconds"]
        },
        "response_tokens_per_s": statistics.median(step["tokens"] / step["seconds"]["gen"] for step in warm),
        "peer_versions": json.loads((folder / "facts.json").read_text()),
    }


def model_folder(side: str, folder: Path, step: int) -> Path:
    """Where a side left the model of a step, in Hugging Face's format."""
    return folder / "run" / f"global_step_{step}" / "actor" if side in OURS else folder / f"step_{step}"


def accuracy(model: str, work: LearningWork) -> dict[str, Any]:
    """``burnish eval``, greedy: ``{"accuracy", "low", "high", "num_prompts", "samples"}`` with a 95 % Wilson interval."""
    from burnish.trainer.offline.evaluate import EvalOptions, evaluate
    from burnish.trainer.offline.settings import AskOptions

    module, _, function = work.reward.partition(":")
    spec = find_spec(module)
    assert spec is not None
    ask = AskOptions(
        data=[work.val_file],
        n=1,
        temperature=0.0,
        max_tokens=work.response_length,
        device=work.device,
        dtype=work.dtype,
        reward=f"{spec.origin}:{function}",
    )
    with _EVALUATES:
        result, _ = evaluate(EvalOptions(models=[model], ask=ask))
    found = result["models"][0]
    metric = found["metrics"]["pass@1"]
    return {
        "accuracy": metric["value"],
        "low": metric["low"],
        "high": metric["high"],
        "num_prompts": found["num_prompts"],
        "samples": 1,
    }


def check_alike(runs: dict[str, Run]) -> None:
    """Both sides got the same prompts: as many tokens of prompts in every step.

    Raises:
        RuntimeError: not so.
    """
    (name, first), *others = runs.items()
    for other, run in others:
        if run["prompt_tokens"] != first["prompt_tokens"]:
            pairs = zip(first["prompt_tokens"], run["prompt_tokens"], strict=False)
            step, (ours, theirs) = next(
                ((n, pair) for n, pair in enumerate(pairs, start=1) if pair[0] != pair[1]), (0, (0, 0))
            )
            raise RuntimeError(
                f"{name} and {other} were not given the same prompts: step {step} has {ours} tokens of prompts in one and "
                f"{theirs} in the other."
            )
