"""The Triton kernels against their twins without a GPU."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rollout.kernels.cases import INTERPRETED


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(INTERPRETED, reason="is interpreted already")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_equal_their_twins_in_tritons_interpreter():
    """In a process of its own: the variable counts when the kernels are imported, and for all of them."""
    version = tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
    if version < (3, 9):
        pytest.skip(f"triton {version} cannot interpret loops over loaded bounds with a recent numpy")
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "interpreted", str(here)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=here.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
