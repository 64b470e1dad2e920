"""Copies between a device and the CPU, on streams beside the computation."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor


class Transfers:
    """The streams on which copies leave and come back, beside the computation; on a CPU everything is in order anyway."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.has_streams = device.type == "cuda"
        self.out: Any = torch.cuda.Stream(device) if self.has_streams else None
        self.back: Any = torch.cuda.Stream(device) if self.has_streams else None

    def on(self, stream: Any) -> Any:
        """Inside the block copies go on ``stream``, after what the current stream has been given so far."""
        if not self.has_streams:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(stream)

    def mark(self, stream: Any) -> Any:
        """An event behind everything that ``stream`` has been given."""
        return stream.record_event() if self.has_streams else None

    def wait(self, event: Any, stream: Any = None) -> None:
        """Lets ``stream`` (the current one when None) go on only after ``event``; the host does not wait."""
        if event is not None:
            (torch.cuda.current_stream(self.device) if stream is None else stream).wait_event(event)

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Uninitialised CPU memory that copies can reach without a detour."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.has_streams)
