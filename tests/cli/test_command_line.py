"""What a user meets first: help and mistakes are answered at once, without torch."""

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]

PROBE = """
import runpy, sys
sys.argv = {argv!r}
try:
    runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
except SystemExit as exit:
    status = exit.code
heavy = [name for name in ("torch", "transformers", "ray") if name in sys.modules]
print("STATUS", status, "HEAVY", heavy)
"""


def run(module: str, *args: str) -> tuple[str, str]:
    code = PROBE.format(argv=[module, *args], module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, timeout=60)
    return done.stdout, done.stderr


def test_help_loads_no_torch():
    out, _ = run("burnish", "--help")
    assert "demo" in out
    assert "train" in out
    assert "STATUS 0 HEAVY []" in out


def test_a_misspelt_key_is_answered_with_the_right_one_and_without_torch():
    for module, args in (("burnish.trainer.main_ppo", ()), ("burnish", ("train",))):
        out, err = run(module, *args, "data.train_batchsize=4")
        assert "data.train_batchsize" in out + err
        assert "data.train_batch_size" in out + err
        assert "Traceback" not in out + err
        assert "STATUS 2 HEAVY []" in out


def test_the_composed_configuration_is_printed_without_torch():
    out, err = run("burnish.trainer.main_ppo", "--cfg", "job", "trainer.total_epochs=3")
    assert "total_epochs: 3" in out, err
    assert "HEAVY []" in out


def test_the_paths_of_a_script_for_verl_are_the_same_commands():
    for module in ("burnish.trainer.sft_trainer", "burnish.trainer.fsdp_sft_trainer"):
        out, err = run(module, "--cfg", "job", "data.train_files=a.jsonl", "trainer.total_epochs=3")
        assert "total_epochs: 3" in out, err
        assert "STATUS 0" in out


def test_processes_of_torchrun_are_told_to_be_one():
    several = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "0"}
    command = [sys.executable, "-m", "burnish.trainer.fsdp_sft_trainer", "--cfg", "job", "data.train_files=a"]

    def start(variables):
        return subprocess.run(
            command, capture_output=True, text=True, cwd=REPO, env={**os.environ, **variables}, timeout=60
        )

    done = start(several)
    assert done.returncode == 2
    said = " ".join((done.stdout + done.stderr).split())
    assert "torchrun has started 8 processes" in said
    assert "write burnish sft trainer.n_gpus_per_node=4" in said
    assert start({**several, "WORLD_SIZE": "1"}).returncode == 0
