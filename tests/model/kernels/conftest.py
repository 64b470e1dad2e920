"""The operations of a layer compiled for this CPU."""

import pytest

from burnish.model.kernels.cpu import layers
from burnish.model.kernels.cpu.build import CannotBuild, load
from tests.compiling import compiled_here


@pytest.fixture(scope="session")
def layers_library(tmp_path_factory: pytest.TempPathFactory):
    try:
        return load(layers.SOURCE, compiled_here(tmp_path_factory))
    except CannotBuild as reason:
        pytest.skip(f"no compiled kernels: {reason}")


@pytest.fixture
def compiled(layers_library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside, the operations are the compiled ones wherever these serve."""
    monkeypatch.setattr(layers, "_kernels", layers.kernels_of(layers_library))


@pytest.fixture(autouse=True)
def plain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere they are those of torch, whatever ran before in this process."""
    if "compiled" not in request.fixturenames:
        monkeypatch.setattr(layers, "_kernels", {})
