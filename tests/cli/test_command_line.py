"""What a user meets first: help and mistakes are answered at once, without torch."""

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
