"""What a vLLM server needs to be handed trained weights: named to it as ``--worker-extension-cls``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from burnish.rollout.vllm.extension import WorkerExtension
from burnish.utils.errors import RolloutError


class ServedExtension(WorkerExtension):
    """Methods that ``POST /collective_rpc`` calls with JSON, on every rank; what goes wrong is answered, for the caller to read.

    The server's own sampler stays: other clients use it too.
    """

    def served(self, folder: str) -> dict[str, Any]:
        """What this worker is; ``folder`` is where weights will come, which must be seen from here."""

        def answer() -> dict[str, Any]:
            if not Path(folder).is_dir():
                raise RolloutError(
                    f"The server does not see {folder}, in which it would be handed weights. Choose a "
                    f"rollout.server.weights_dir that both see, under one name."
                )
            return {"dtype": str(self.vllm_config.model_config.dtype)}

        return _answered(answer)

    def take_files(self, folder: str, names: Sequence[str], version: int) -> dict[str, Any]:
        """Takes the weights of policy ``version`` from these safetensors files of ``folder``."""

        def answer() -> dict[str, Any]:
            from safetensors import safe_open

            self.begin_update(int(version))
            for name in names:
                with safe_open(Path(folder) / name, framework="pt", device="cpu") as file:
                    self.take_weights((key, file.get_tensor(key)) for key in file.keys())  # noqa: SIM118
            return self.end_update()

        return _answered(answer)

    def served_fingerprints(self) -> dict[str, Any]:
        """See `WorkerExtension.fingerprints`; as text, since not every JSON has 64-bit numbers."""
        return _answered(lambda: {name: str(value) for name, value in self.fingerprints().items()})


def _answered(answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A worker that raises ends the whole engine, so what is known to go wrong is told instead."""
    try:
        return answer()
    except RolloutError as error:
        return {"burnish_error": str(error)}
