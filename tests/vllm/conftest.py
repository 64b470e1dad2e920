"""Engines that take long to start are shared by all modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.vllm.process_engines import ProcessEngines


@pytest.fixture(scope="session")
def process_engines() -> Iterator[ProcessEngines]:
    """Engines in processes of their own; what a test kills is started again for the next one."""
    from tests.vllm.process_engines import ProcessEngines

    made = ProcessEngines()
    yield made
    made.close()
