"""One Ray for all tests of the room, and the module of the workers that they run."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
# Ray's workers import the test workers by name, and get the driver's path.
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="package")
def ray_started() -> Iterator[ModuleType]:
    """Ray that believes in eight CPUs, whatever the machine has."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        ray.shutdown()
    path = os.pathsep.join([str(HERE), str(HERE.parents[1])])
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        logging_level=logging.ERROR,
        object_store_memory=200_000_000,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    yield ray
    ray.shutdown()
