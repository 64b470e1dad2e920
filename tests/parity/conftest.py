"""verl and TRL, which lie in a folder of their own, and are in nobody's way where it does not exist."""

import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

PEERS = Path(__file__).parents[2] / ".peers" / "parity"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder is `parity`, which a plain `pytest` leaves out."""
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.parity)


def _peer(module: str) -> ModuleType:
    if not (PEERS / ".done").exists():
        pytest.skip(f"{module.partition('.')[0]} is not installed here: `make test-parity` does that.")
    # Last, so that every package that burnish has itself is burnish's.
    if str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(module)


@pytest.fixture(scope="session")
def verl() -> ModuleType:
    """`verl.trainer.ppo.core_algos`."""
    return _peer("verl.trainer.ppo.core_algos")


@pytest.fixture(scope="session")
def verl_correction() -> ModuleType:
    """`verl.trainer.ppo.rollout_corr_helper`."""
    return _peer("verl.trainer.ppo.rollout_corr_helper")


@pytest.fixture(scope="session")
def verl_protocol() -> ModuleType:
    """`verl.protocol`."""
    return _peer("verl.protocol")


@pytest.fixture(scope="session")
def verl_config() -> ModuleType:
    """`verl.workers.config`, for the settings that verl's losses want."""
    return _peer("verl.workers.config")


@pytest.fixture(scope="session")
def verl_folder() -> Path:
    """Where verl lies."""
    return Path(_peer("verl").__path__[0])


@pytest.fixture(scope="session")
def trl() -> ModuleType:
    """`trl`."""
    return _peer("trl")
