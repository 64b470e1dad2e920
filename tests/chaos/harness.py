"""Runs that are interrupted, and what has to be true of what they leave."""

import hashlib
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

from burnish.trainer.ppo.metrics import NON_DETERMINISTIC_PREFIXES

HERE = Path(__file__).parent
REPO = HERE.parents[1]
TINY = REPO / "examples" / "tiny_model"
MARK = "BURNISH_CHAOS_RUN"
STEPS = 5
SECONDS = 400
"""That a run of a few steps may take on a machine that is busy."""

ONE_PROCESS = ("trainer.controller=local", "trainer.n_gpus_per_node=1")
TWO_RANKS = ("trainer.controller=ray", "trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=4")


def overrides(folder: Path, *more: str) -> list[str]:
    """A run of `STEPS` steps of 4 prompts x 4 samples that saves every second step and at the end."""
    return [
        "recipe=demo",
        f"actor_rollout_ref.model.path={TINY / 'model'}",
        f"data.train_files={TINY / 'data' / 'train.jsonl'}",
        "data.val_files=null",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        f"reward.custom_reward_function.path={HERE / 'rewards.py'}",
        "reward.num_workers=1",
        "trainer.device=cpu",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=2",
        "trainer.resume_mode=auto",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={folder}",
        *more,
    ]


def sft_overrides(folder: Path, *more: str) -> list[str]:
    """A run of `STEPS` steps of 4 conversations that saves and validates every second step and at the end."""
    rows = [
        {"messages": [{"role": r, "content": c} for r, c in (("user", f"{n}+1="), ("assistant", f"{n + 1}"))]}
        for n in range(20)
    ]
    files = folder.parent / "conversations.jsonl"
    files.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"model.path={TINY / 'model'}",
        f"data.train_files={files}",
        f"data.val_files={files}",
        "data.train_batch_size=4",
        "data.max_length=64",
        "engine.dtype=float32",
        "trainer.device=cpu",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        "trainer.resume_mode=auto",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={folder}",
        *more,
    ]


class Chaos:
    """One process of a run, and all that it starts, which carry a mark by which they are found."""

    def __init__(self, folder: Path, what: dict, *more: str, logs: Path | None = None, is_sft: bool = False) -> None:
        self.mark = uuid.uuid4().hex
        self.output = (logs or folder.parent) / f"{folder.name}-{self.mark[:6]}.log"
        of_run = sft_overrides(folder, *more) if is_sft else overrides(folder, *more)
        arguments = [*(["sft"] if is_sft else []), json.dumps(what), *of_run]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "program.py"), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=REPO,
                # Signals for the run's group are not for the tests'.
                process_group=0,
                env=os.environ | {MARK: self.mark, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
            )

    def end(self, seconds: float = SECONDS) -> int:
        """Waits until it has ended, and no process of it is left."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"It did not end:\n{self.said}") from None
        finally:
            self.process.kill()
        self.wait_until_all_are_gone()
        return status

    @property
    def said(self) -> str:
        """What it has printed so far."""
        return self.output.read_text(errors="replace")

    def left(self) -> dict[int, str]:
        """Its processes that are still there, with their command lines."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")[:200]
            except OSError:
                continue
        return {pid: command for pid, command in found.items() if command}

    def wait_until_all_are_gone(self, seconds: float = 60) -> None:
        """Asserts that no process outlives the run."""
        deadline = time.monotonic() + seconds
        while left := self.left():
            assert time.monotonic() < deadline, f"Still there: {left}\n{self.said}"
            time.sleep(0.2)


def run_to_the_end(folder: Path, *more: str, logs: Path | None = None, is_sft: bool = False) -> str:
    """A run, or the rest of one, in which nothing happens.

    Returns:
        what it printed.
    """
    run = Chaos(folder, {}, *more, logs=logs, is_sft=is_sft)
    assert run.end() == 0, run.said
    return run.said


def checkpoints(folder: Path) -> dict[int, Path]:
    """The complete checkpoints: those with a manifest, each of whose files has its size."""
    found = {}
    for path in folder.glob("global_step_*"):
        manifest = path / "manifest.json"
        assert manifest.is_file(), f"{path} has the name of a complete checkpoint"
        for name, size in json.loads(manifest.read_text())["files"].items():
            assert (path / name).stat().st_size == size, f"{path / name}"
        found[int(path.name.removeprefix("global_step_"))] = path
    return found


def contents(folder: Path) -> dict[str, str]:
    """A digest of every file of a checkpoint that holds weights, optimizer states or random numbers."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("manifest.json", "trainer_state.json")
    }


def metrics(folder: Path) -> list[dict]:
    """The logged steps without what measures time."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if not key.startswith(NON_DETERMINISTIC_PREFIXES)} for line in lines
    ]


def resume(folder: Path, *more: str, logs: Path | None = None, is_sft: bool = False) -> None:
    """Goes on with an interrupted run to its end, from the newest checkpoint that it has."""
    newest = max(checkpoints(folder), default=None)
    run_to_the_end(folder, *more, logs=logs, is_sft=is_sft)
    assert [event["step"] for event in events(folder, "resume")] == ([] if newest is None else [newest])


def assert_equal_runs(folder: Path, reference: Path) -> None:
    """Both have trained the same: weights, optimizer and random numbers to the bit, and every metric of every step."""
    ours, theirs = checkpoints(folder)[STEPS], checkpoints(reference)[STEPS]
    assert contents(ours) == contents(theirs)
    assert metrics(folder) == metrics(reference)


def events(folder: Path, kind: str) -> list[dict]:
    """Events of a run of one kind."""
    file = folder / "events.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [event for line in lines if (event := json.loads(line))["kind"] == kind]
