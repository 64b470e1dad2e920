"""The script for SLURM starts Ray on every node, trains over all of them, and is queued again when the time is over."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import REPO, TINY, logged

SCRIPT = REPO / "examples" / "cluster" / "slurm.sh"
DOCKERFILE = REPO / "examples" / "cluster" / "Dockerfile"

# SLURM's commands on one machine that plays both nodes.
COMMANDS = {
    "scontrol": 'case "$1" in show) printf "first\\nsecond\\n" ;; *) echo "$@" >>"$PLAYED/scontrol" ;; esac',
    "squeue": "echo RUNNING",
    "srun": """
node=
while [ "${1#--}" != "$1" ]; do case "$1" in --nodelist=*) node=${1#*=} ;; esac; shift; done
echo "$node: $*" >>"$PLAYED/srun"
exec "$@"
""",
}


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a job of two nodes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in COMMANDS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    own = str(Path(sys.executable).parent)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    yield environment | {
        "PATH": os.pathsep.join([str(folder), own, environment["PATH"]]),
        "PLAYED": str(tmp_path),
        "PYTHONPATH": str(REPO),
        # The port is made of it.
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "2",
        "WORKERS_PER_NODE": "1",
        "HEAD_ADDRESS": "127.0.0.1",
    }
    shutil.rmtree(f"/tmp/ray_{os.getpid()}", ignore_errors=True)


def job(slurm: dict[str, str], run_dir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    arguments = [
        "recipe=demo",
        f"actor_rollout_ref.model.path={TINY / 'model'}",
        f"data.train_files={TINY / 'data' / 'train.jsonl'}",
        "data.val_files=null",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.n=4",
        f"trainer.default_local_dir={run_dir}",
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.logger=[file]",
        "reward.num_workers=0",
        *overrides,
    ]
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, env=slurm, cwd=REPO, capture_output=True, text=True, timeout=1500)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_trains_on_its_nodes_and_is_queued_again_when_its_time_is_over(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    # Over before the first step ends: the run saves that step.
    stopped = job(slurm, tmp_path / "run", "trainer.max_wall_time=1")
    assert stopped.returncode == 75, stopped.stdout[-3000:] + stopped.stderr[-3000:]
    assert (tmp_path / "scontrol").read_text() == f"requeue {slurm['SLURM_JOB_ID']}\n"
    assert "has its 2 nodes" in stopped.stdout
    started = (tmp_path / "srun").read_text()
    assert "first: ray start --head" in started
    assert "second: ray start --address" in started
    finished = job(slurm, tmp_path / "run")
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    assert len(logged(tmp_path / "run")) == 2
    assert (tmp_path / "scontrol").read_text().count("requeue") == 1


def test_the_script_is_one_that_a_shell_can_read() -> None:
    done = subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert os.access(SCRIPT, os.X_OK)
    # SLURM reads its lines up to the first command.
    lines = SCRIPT.read_text().splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(number < first_command for number, line in enumerate(lines) if line.startswith("#SBATCH"))


def test_the_container_copies_what_there_is() -> None:
    lines = DOCKERFILE.read_text().replace("\\\n", " ").splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied
    for name in copied:
        assert (REPO / name).exists(), name
    instructions = {line.split()[0] for line in lines if line and line[0] not in "# "}
    assert instructions <= {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
