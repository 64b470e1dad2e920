"""Where the state of one engine lies between its uses: on its device, or on the CPU as far as the keys say."""

from collections.abc import Iterator
from contextlib import contextmanager

from burnish.config import FSDPEngineConfig
from burnish.engine.layout import Layout, Sharded
from burnish.engine.offload import StepOffload, WeightOffload, can_offload
from burnish.engine.optimizer import MasterOptimizer
from burnish.utils.transfers import Transfers


class Residence:
    """Fetches what a use needs and sends it away again.

    Args:
        optimizer: None for a model that is only read.
        config: says what lies on the CPU. On a CPU device, and where FSDP2 keeps everything there by itself
            (``offload_policy``), nothing is left to do.
    """

    def __init__(
        self, layout: Layout, optimizer: MasterOptimizer | None, config: FSDPEngineConfig, transfers: Transfers
    ) -> None:
        self._layout = layout
        self._weights: WeightOffload | None = None
        self._step: StepOffload | None = None
        self._has_changed = True
        on_cpu_anyway = config.offload_policy and isinstance(layout, Sharded)
        if not can_offload(transfers.device) or on_cpu_anyway:
            return
        if config.param_offload and (parts := layout.weight_parts()):
            self._weights = WeightOffload(parts, transfers)
        masters_leave = config.param_offload and bool(layout.step_masters())
        if optimizer is not None and (masters_leave or config.optimizer_offload):
            self._step = optimizer.offload = StepOffload(
                layout.masters(),
                optimizer.state_tensors,
                transfers,
                masters_leave=masters_leave,
                moments_leave=config.optimizer_offload,
            )
            self._step.leave()
        self.park()

    def fetch(self, *, wait: bool = False) -> None:
        """Brings parked weights back.

        Args:
            wait: for a use that does not go through the module.
        """
        if self._weights is not None:
            self._weights.fetch(wait=wait or isinstance(self._layout, Sharded))

    def park(self) -> None:
        """Sends the weights to the CPU, if that is their place."""
        if self._weights is not None:
            self._weights.leave(changed=self._has_changed)
            self._has_changed = False

    def note_change(self) -> None:
        """The weights on the device are no longer those on the CPU."""
        self._has_changed = True

    @contextmanager
    def everything(self) -> Iterator[None]:
        """Inside, weights, masters and optimizer state are on the device; afterwards they go where they belong."""
        self.fetch(wait=True)
        if self._step is not None:
            self._step.fetch()
        try:
            yield
        finally:
            if self._step is not None:
                self._step.leave()
            self.park()
