"""Where the session's tests have kernels compiled."""

import os
from pathlib import Path

import pytest


def compiled_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all processes of the session: a compiler takes longer than most of the tests."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "compiled"
