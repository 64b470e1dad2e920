"""How weights reach the workers of an engine in other processes of this computer: through memory that both sides see.

A stream of tensors is laid behind each other in buckets, in the dtype that the engine computes in; a worker cuts the tensors out
of a bucket again. Two buckets take turns: while the workers take one, the next is filled. On a CPU a bucket is an anonymous file
that the worker maps (no copy, no name that could be left behind, no limit of /dev/shm); on a GPU it is memory that the worker
opens by its CUDA IPC handle. Where the two sides share no memory, see `burnish.rollout.vllm.broadcast`.

vLLM's own weight-transfer API is not used: it has no transport for a CPU, its calls differ from version to version, and it
neither checks names and shapes nor says which weight did not arrive.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor

from burnish.rollout.base import WeightStream
from burnish.utils.errors import RolloutError

Item = tuple[str, str, list[int], int]
"""A tensor in a bucket: name, dtype ("bfloat16"), shape, first byte. Plain, since it crosses processes."""
Address = list[Any]
"""Where a bucket lies, for another process: its kind, a name of its own, and what its kind needs. Plain too."""

# Cache lines, and what the widest vector loads of a GPU want.
_ALIGNMENT = 256


class Bucket(Protocol):
    """Memory that the workers see too."""

    tensor: Tensor
    """[bytes] uint8."""
    address: Address

    def close(self) -> None:
        """Gives it up; the workers have closed it before."""
        ...


class SharedBucket:
    """Memory of a CPU. Linux keeps it as long as one side has it open, and no longer."""

    def __init__(self, num_bytes: int) -> None:
        self._file = os.memfd_create("burnish-weights")
        os.ftruncate(self._file, num_bytes)
        self._map = mmap.mmap(self._file, num_bytes)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address: Address = ["shared", uuid.uuid4().hex, os.getpid(), self._file, num_bytes]

    def close(self) -> None:
        """See `Bucket`; the map goes when the last tensor over it does."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class IpcBucket:
    """Memory of a GPU, for processes of this computer that see the same GPU."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        rebuild, arguments = reduce_tensor(self.tensor)
        handle = pickle.dumps((rebuild, arguments))
        self.address: Address = ["ipc", uuid.uuid4().hex, gpu_uuid(device.index), handle]

    def close(self) -> None:
        """See `Bucket`."""
        if hasattr(self, "tensor"):
            del self.tensor
            torch.cuda.ipc_collect()  # Else torch keeps what was shared until it shares something again.


def gpu_uuid(index: int | None = None) -> str:
    """Which GPU it is, whatever number a process sees it under; None: the current one."""
    index = torch.cuda.current_device() if index is None else index
    return str(torch.cuda.get_device_properties(index).uuid)


def open_bucket(address: Address) -> Tensor:
    """The bucket at ``address``, [bytes] uint8, in the process of a worker.

    Raises:
        RolloutError: this process cannot see its memory.
    """
    kind, _, *where = address
    if kind == "shared":
        return _open_shared(*where)
    if kind == "ipc":
        return _open_ipc(*where)
    raise RolloutError(f"A bucket of weights came as {kind!r}; known are 'shared' and 'ipc'. Is it the same burnish?")


def _open_shared(pid: int, descriptor: int, num_bytes: int) -> Tensor:
    try:
        file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    except OSError as error:
        raise RolloutError(
            f"The engine cannot open the weights that process {pid} shares with it ({error.strerror}): both must run on one "
            f"computer, as the same user and in the same container. Where they do not, send them by 'broadcast'."
        ) from error
    try:
        return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
    finally:
        os.close(file)


def _open_ipc(gpu: str, handle: bytes) -> Tensor:
    rebuild, arguments = pickle.loads(handle)
    visible = [gpu_uuid(index) for index in range(torch.cuda.device_count())]
    if gpu not in visible:
        raise RolloutError(
            f"The engine does not see the GPU {gpu} on which the trained weights are, only {', '.join(visible)}. Send them "
            f"by 'broadcast', or let the engine see that GPU (CUDA_VISIBLE_DEVICES)."
        )
    arguments = list(arguments)
    arguments[6] = visible.index(
        gpu
    )  # ``storage_device`` of torch's ``rebuild_cuda_tensor``: the sender's number for it.
    opened: Tensor = rebuild(*arguments)
    return opened


class TwoBuckets:
    """A stream of tensors laid into two buckets by turns.

    Args:
        bucket_bytes: of one bucket; a larger tensor gets a bucket of its size.
        dtype: that floating-point tensors are cast to.
        make: gives a bucket of so many bytes.
    """

    def __init__(self, bucket_bytes: int, dtype: torch.dtype, make: Callable[[int], Bucket]) -> None:
        self._bucket_bytes, self._dtype, self._make = bucket_bytes, dtype, make
        self._all: list[Bucket] = []

    def fill(self, stream: WeightStream) -> Iterator[tuple[Bucket, list[Item]]]:
        """Full buckets, and the tensors in each. Whoever asks for the next one needs the one before the last no more."""
        pair: list[Bucket | None] = [None, None]
        turn, end = 0, 0
        items: list[Item] = []
        for name, tensor in stream:
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            num_bytes = tensor.numel() * dtype.itemsize
            start = math.ceil(end / _ALIGNMENT) * _ALIGNMENT
            bucket = pair[turn]
            if bucket is not None and items and start + num_bytes > len(bucket.tensor):
                yield bucket, items
                turn, items, start = 1 - turn, [], 0
                bucket = pair[turn]
            if bucket is None or start + num_bytes > len(bucket.tensor):
                bucket = pair[turn] = self._make(max(self._bucket_bytes, num_bytes, 1))
                self._all.append(bucket)
            end = start + num_bytes
            bucket.tensor[start:end].view(dtype).view(tensor.shape).copy_(tensor)
            items.append((name, str(dtype).removeprefix("torch."), list(tensor.shape), start))
        last = pair[turn]
        if last is not None and items:
            yield last, items

    def close(self) -> None:
        """Gives up the memory; the workers have closed it before."""
        for bucket in self._all:
            bucket.close()
        self._all = []


def cut(bucket: Tensor, items: list[Item]) -> list[tuple[str, Tensor]]:
    """The tensors in a bucket [bytes], by name: views, which hold until the bucket is filled anew."""
    named = []
    for name, dtype_name, shape, start in items:
        dtype: torch.dtype = getattr(torch, dtype_name)
        end = start + math.prod(shape) * dtype.itemsize
        named.append((name, bucket[start:end].view(dtype).view(shape)))
    return named


def send_in_buckets(
    stream: WeightStream,
    bucket_bytes: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    take: Callable[[Address, list[Item]], Future[Any]],
    release: Callable[[], Future[Any]],
    wait: Callable[[Future[Any]], Any],
) -> None:
    """Sends a stream through memory that both sides see, and reads it to its end.

    Args:
        dtype: of the engine's weights.
        device: where the buckets are: the trainer's, "cuda" for CUDA IPC.
        take, release: have the workers take a bucket, and close all of them, without waiting for it.
        wait: for what these returned; raises what went wrong in the engine.
    """

    def make(num_bytes: int) -> Bucket:
        return IpcBucket(num_bytes, device) if device.type == "cuda" else SharedBucket(num_bytes)

    buckets, underway = TwoBuckets(bucket_bytes, dtype, make), list[Future[Any]]()
    try:
        for bucket, items in buckets.fill(stream):
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # The workers read it on streams of their own.
            if underway:
                wait(underway.pop())  # Before its bucket is filled anew.
            underway.append(take(bucket.address, items))
        if underway:
            wait(underway.pop())
    finally:
        # Also behind an error: a call that is underway still reads its bucket, and calls are taken in their order.
        try:
            wait(release())
        finally:
            buckets.close()
