"""The workers' side of `transports` and `broadcast`: takes weights out of buckets and hands them to the worker extension."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from burnish.rollout.vllm.broadcast import BroadcastReceiver
from burnish.rollout.vllm.transports import Address, Item, cut, open_bucket


class WeightReceiver:
    """The part of `burnish.rollout.vllm.extension.WorkerExtension` by which weights come in; its ``take_weights`` gets them.

    vLLM makes it a base of the worker's class and never calls its constructor. The names are unlike those of any worker.
    """

    take_weights: Any
    rank: int
    """Of this worker among those of its engine."""
    device: Any
    model_runner: Any
    vllm_config: Any

    def take_bucket(self, address: Address, items: list[Item]) -> None:
        """Takes the tensors of a bucket that lies in memory which this process can see."""
        opened: dict[str, Tensor] = self.__dict__.setdefault("burnish_buckets", {})
        if address[1] not in opened:
            opened[address[1]] = open_bucket(address)
        bucket = opened[address[1]]
        if bucket.device.type == "cuda" and bucket.device != self.device:
            # The sender's GPU would write, and weights that can sleep lie in memory that only their own GPU may touch.
            bucket = bucket.to(self.device)
        self.take_weights(cut(bucket, items))
        _finish(self.device)  # Behind this call the sender fills the bucket anew.

    def measure_cache(self) -> int:
        """Bytes of this worker's key-value cache."""
        storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in self._caches()}
        return sum(storages.values())

    def close_buckets(self) -> None:
        """The sender gives up its buckets."""
        self.__dict__.pop("burnish_buckets", None)

    def take_broadcast(self, address: dict[str, Any], first_rank: int) -> None:
        """Takes one whole stream of weights from a `burnish.rollout.vllm.broadcast.WeightBroadcast`.

        Args:
            address: of the sender.
            first_rank: of this engine's workers in the sender's group.
        """
        receivers: dict[str, BroadcastReceiver] = self.__dict__.setdefault("burnish_senders", {})
        name = f"{address['host']}:{address['port']}"
        if name not in receivers:
            parallel = self.vllm_config.parallel_config
            rank = first_rank + parallel.data_parallel_index * parallel.world_size + self.rank
            receivers[name] = BroadcastReceiver(address, rank, self.device)
        try:
            receivers[name].receive(self.take_weights)
        except BaseException:
            receivers.pop(name).close()  # Where it stands in the stream is not known: the next one begins anew.
            raise

    def leave_broadcast(self) -> None:
        """Forgets all senders."""
        for receiver in self.__dict__.pop("burnish_senders", {}).values():
            receiver.close()

    def _caches(self) -> Iterator[Tensor]:
        for cache in self.model_runner.kv_caches:
            yield from cache if isinstance(cache, (list, tuple)) else (cache,)


def _finish(device: Any) -> None:
    if getattr(device, "type", "cpu") == "cuda":
        import torch

        torch.cuda.synchronize(device)
