"""The operations on a CPU: in plain torch, and compiled."""

import ctypes

import pytest

from burnish.model.kernels.cpu import layers
from burnish.rollout.native.kernels import cpu
from burnish.rollout.native.kernels.cpu.build import CannotBuild, load
from tests.compiling import compiled_here


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels compiled for this machine."""
    try:
        return load(compiled_here(tmp_path_factory))
    except CannotBuild as reason:
        pytest.skip(f"no compiled kernels: {reason}")


@pytest.fixture(params=["torch", "compiled"])
def cpu_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes on the CPU in this test."""
    compiled = request.param == "compiled"
    monkeypatch.setattr(cpu, "_kernels", cpu.kernels_of(request.getfixturevalue("library")) if compiled else {})
    monkeypatch.setattr(layers, "_kernels", {})
    return request.param
