"""vLLM in processes of its own holds the contract of every rollout engine."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.vllm.process_engines import ProcessEngines
from tests.vllm.vllm_contract import VLLMContract


class TestInItsOwnProcess(VLLMContract):
    @pytest.fixture(autouse=True)
    def _lend_engines(self, process_engines: ProcessEngines) -> None:
        self.engines = process_engines
