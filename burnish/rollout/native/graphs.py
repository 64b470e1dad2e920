"""Decode steps as CUDA graphs: one for each batch size in a list of sizes, from the embedding to the sampled token."""

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

logger = logging.getLogger("burnish.rollout")

Variant = tuple[int, bool, bool]


def default_sizes(max_rows: int) -> list[int]:
    """Batch sizes that are captured: fine enough that a batch that shrinks is never padded by more than a quarter."""
    sizes, size = [], 1
    while size < max_rows:
        sizes.append(size)
        # Steps of an eighth to a quarter, later even ones, in multiples that matrix products like.
        size += max(1, 1 << max(0, size.bit_length() - 3)) if size < 128 else 32 if size < 512 else 64
    return [*sizes, max_rows]


class DecodeGraphs:
    """Captures and replays a step function.

    A graph is captured when its size is first needed, and kept: everything that it reads or writes stays at its address.

    Args:
        step: ``step(num_rows, truncates, penalises)`` launches one decode step of the first rows, without looking at
            the device.
        prepare: makes the state such that a step is harmless; called before a capture, which runs steps to warm up.
        sizes: ascending; the last one is the most rows.
        name: of the model, for messages.
        mode: of the model, beyond the arguments of a step: what is captured in one mode is not replayed in another.
    """

    def __init__(
        self,
        step: Callable[[int, bool, bool], None],
        prepare: Callable[[], None],
        sizes: Sequence[int],
        name: str,
        mode: Callable[[], Hashable] = lambda: None,
    ) -> None:
        self._step, self._prepare, self._name, self._mode = step, prepare, name, mode
        self.sizes = list(sizes)
        self._graphs: dict[tuple[Variant, Hashable], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self.failed = False
        """Whether a capture failed; then steps are launched one by one."""

    def size_for(self, num_rows: int) -> int:
        """The smallest captured size that holds ``num_rows``."""
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def ready(self, variant: Variant) -> None:
        """Captures the graph of ``variant`` (size, truncates, penalises) if there is none; the state is idle afterwards."""
        key = (variant, self._mode())
        if key in self._graphs or self.failed:
            return
        self._prepare()
        try:
            self._graphs[key] = self._capture(variant)
        except RuntimeError as error:
            # Models whose layers look at the device, as most mixtures of experts do when they gather each expert's tokens.
            self.failed = True
            self.clear()
            torch.cuda.synchronize()
            logger.warning(
                "%s cannot be captured as a CUDA graph, so its decode steps are launched operation by operation, several "
                "times slower (rollout.enforce_eager=true says so without trying): %s",
                *(self._name, str(error).splitlines()[0]),
            )

    def run(self, variant: Variant, steps: int) -> None:
        """Launches ``steps`` steps."""
        graph = self._graphs.get((variant, self._mode()))
        for _ in range(steps):
            if graph is None:
                self._step(*variant)
            else:
                graph.replay()

    def clear(self) -> None:
        """Forgets all graphs: something that they read has moved."""
        self._graphs.clear()
        self._pool = None

    def _capture(self, variant: Variant) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Kernels are compiled and libraries make their workspaces here, which a capture could not record.
            for _ in range(2):
                self._step(*variant)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._step(*variant)
        return graph
