"""The Triton kernels against their twins without a GPU."""

import importlib.util
from pathlib import Path

import pytest

from tests.rollout.kernels.cases import INTERPRETED, run_interpreted


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(INTERPRETED, reason="is interpreted already")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_equal_their_twins_in_tritons_interpreter():
    run_interpreted(Path(__file__).parent)
