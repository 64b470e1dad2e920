"""Which GPUs an engine in processes of its own is put on, and what the ranks do that it is not driven from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from burnish.rollout.base import WeightStream
from burnish.rollout.vllm.requests import Finished, Prepared
from burnish.utils import env


def place() -> tuple[int, int]:
    """(rank, number of ranks) of this process among all that train."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def engine_gpus(num_ranks: int, device: torch.device) -> list[str]:
    """The GPUs of the ``num_ranks`` neighbouring ranks that this one belongs to, as ``CUDA_VISIBLE_DEVICES`` names them.

    All ranks call it. Nothing where they compute on CPUs.
    """
    if device.type != "cuda":
        return []
    index = torch.cuda.current_device() if device.index is None else device.index
    visible = env.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible else None
    own = names[index] if names else str(index)
    rank, world = place()
    if world == 1:  # It has them all to itself, as a standalone engine does.
        return names[index : index + num_ranks] if names else [str(index + more) for more in range(num_ranks)]
    of_all: list[Any] = [None] * world
    dist.all_gather_object(of_all, own)
    first = rank // num_ranks * num_ranks
    return of_all[first : first + num_ranks]


class IdleCore:
    """The `Core` of a rank whose engine another one drives: it reads weights, which all ranks gather, and answers nothing."""

    num_steps = max_running = num_prefilled_tokens = cache_bytes = 0
    prefill_seconds = decode_seconds = 0.0

    def run(
        self,
        requests: Sequence[Prepared],
        on_finished: Callable[[Finished], None],
        take_aborts: Callable[[], set[str]],
    ) -> None:
        """Every request ends at once, without a token: nobody looks at what this rank returns."""
        take_aborts()
        for request in requests:
            on_finished(Finished(request.request_id, [], [], [] if request.params["logprobs"] else None, "abort"))

    def call(self, method: str, *args: Any) -> list[Any]:
        """Nothing: no rank of the engine is here."""
        return []

    def send(self, stream: WeightStream, bucket_bytes: int, version: int = 0) -> None:
        """Reads the stream to its end."""
        for _ in stream:
            pass

    def receive(self, address: Mapping[str, Any], first_rank: int, version: int) -> None:
        """Nothing: the engine's workers receive."""

    def pause(self) -> None:
        """See `Core.pause`."""

    def resume(self) -> None:
        """See `Core.resume`."""

    def sleep(self, level: int) -> None:
        """See `Core.sleep`."""

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See `Core.wake_up`."""

    def close(self) -> None:
        """See `Core.close`."""
