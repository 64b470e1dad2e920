"""Weights on their way to an engine in another process: through shared memory, and by broadcast."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.rollout.vllm.broadcast import BroadcastReceiver, WeightBroadcast
from burnish.rollout.vllm.receiver import WeightReceiver
from burnish.rollout.vllm.transports import SharedBucket, TwoBuckets, cut, open_bucket, send_in_buckets
from burnish.utils.errors import RolloutError
from burnish.utils.fingerprint import Fingerprints

SPAWN = multiprocessing.get_context("spawn")


def weights(num: int = 12, dtype: torch.dtype = torch.float32) -> list[tuple[str, Tensor]]:
    """Tensors of many shapes: a scalar, an empty one, integers, and one that is larger than the buckets here."""
    generator = torch.Generator().manual_seed(0)
    named = [(f"layer.{i}", torch.randn(3 + i, 7, generator=generator).to(dtype)) for i in range(num)]
    large = ("large", torch.randn(90, 33, generator=generator).to(dtype))
    odd = [
        ("scalar", torch.tensor(2.5)),
        ("empty", torch.zeros(0, 4)),
        ("count", torch.arange(5)),
        ("flag", torch.ones(3) > 0),
    ]
    return [*named[:5], large, *odd, *named[5:]]


def fingerprints(named: Any) -> dict[str, int]:
    found = Fingerprints()
    for name, tensor in named:
        found.add(name, tensor)
    return found.read()


class Worker(WeightReceiver):
    """A worker of an engine, as far as weights go."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.device = rank, torch.device("cpu")
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=0, world_size=2))
        self.taken: dict[str, Tensor] = {}
        self.refuses: str | None = None

    def take_weights(self, named: list[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            if name == self.refuses:
                raise RolloutError(f"The weight stream holds {name!r}, which vLLM's model does not have.")
            self.taken[name] = tensor.clone()


@pytest.mark.parametrize("bucket_bytes", [1, 700, 2000, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_cut_out_of_buckets_is_what_was_laid_into_them(bucket_bytes: int, dtype: torch.dtype) -> None:
    buckets = TwoBuckets(bucket_bytes, dtype, SharedBucket)
    came = [(n, t.clone()) for bucket, items in buckets.fill(weights()) for n, t in cut(bucket.tensor, items)]
    assert [name for name, _ in came] == [name for name, _ in weights()]
    for (_, tensor), (name, sent) in zip(came, weights(), strict=True):
        expected = sent.to(dtype) if sent.is_floating_point() else sent
        assert tensor.dtype == expected.dtype, name
        assert torch.equal(tensor, expected), name
    buckets.close()


def test_a_bucket_is_filled_anew_only_when_the_next_but_one_is_asked_for() -> None:
    buckets = TwoBuckets(700, torch.float32, SharedBucket)
    stream = buckets.fill(weights())
    first, items = next(stream)
    before = [tensor.clone() for _, tensor in cut(first.tensor, items)]
    next(stream)
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, cut(first.tensor, items), strict=True))
    buckets.close()


def send_to(worker: Worker, stream: Any, bucket_bytes: int = 2000, dtype: torch.dtype = torch.float32) -> None:
    """Through shared memory, to a worker in another thread, as the engine's process would."""
    with ThreadPoolExecutor(1) as pool:

        def wait(future: Future[Any]) -> Any:
            return future.result(30)

        send_in_buckets(
            stream,
            bucket_bytes,
            dtype=dtype,
            device=torch.device("cpu"),
            take=lambda address, items: pool.submit(worker.take_bucket, address, items),
            release=lambda: pool.submit(worker.close_buckets),
            wait=wait,
        )


def test_a_stream_through_shared_memory_arrives_to_the_bit_and_leaves_nothing_open() -> None:
    send_to(Worker(), weights())
    open_before, worker = os.listdir("/proc/self/fd"), Worker()
    for _ in range(3):
        send_to(worker, weights())
    assert fingerprints(worker.taken.items()) == fingerprints(weights())
    assert len(os.listdir("/proc/self/fd")) == len(open_before)
    assert "burnish_buckets" not in worker.__dict__


def test_what_a_worker_refuses_and_what_the_stream_raises_comes_through_and_the_next_stream_arrives() -> None:
    worker = Worker()
    worker.refuses = "count"
    with pytest.raises(RolloutError, match="'count', which vLLM's model does not have"):
        send_to(worker, weights())
    worker.refuses = None

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from weights()[:6]
        raise KeyError("of the trainer")

    with pytest.raises(KeyError, match="of the trainer"):
        send_to(worker, broken())
    send_to(worker, weights())
    assert fingerprints(worker.taken.items()) == fingerprints(weights())


def _fingerprints_of_bucket(address: Any, items: Any) -> Any:
    return fingerprints(cut(open_bucket(address), items))


def test_another_process_sees_the_bucket() -> None:
    buckets = TwoBuckets(1 << 20, torch.float32, SharedBucket)
    with SPAWN.Pool(1) as other:
        for bucket, items in buckets.fill(weights()):
            seen = other.apply_async(_fingerprints_of_bucket, (bucket.address, items)).get(timeout=120)
            assert seen == fingerprints(weights())
    buckets.close()


def test_a_bucket_that_is_gone_is_an_error_that_says_what_to_do() -> None:
    bucket = SharedBucket(100)
    address = [*bucket.address[:2], 2**22 + 1, *bucket.address[3:]]
    bucket.close()
    with pytest.raises(RolloutError, match="on one computer, as the same user .* 'broadcast'"):
        open_bucket(address)


def receive(worker: Worker, address: dict[str, Any]) -> "Future[None]":
    """``take_broadcast`` in a thread of its own."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            worker.take_broadcast(address, 1)
            future.set_result(None)
        except BaseException as error:  # noqa: BLE001  Raised by the test.
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.fixture
def broadcast() -> Iterator[Callable[..., WeightBroadcast]]:
    made: list[WeightBroadcast] = []

    def make(num_receivers: int = 1, timeout_s: float = 30.0) -> WeightBroadcast:
        made.append(WeightBroadcast(num_receivers, "cpu", timeout_s=timeout_s))
        return made[-1]

    yield make
    for sender in made:
        sender.close()


def test_a_broadcast_arrives_at_every_worker_to_the_bit_time_after_time(
    broadcast: Callable[..., WeightBroadcast],
) -> None:
    sender, workers = broadcast(2), [Worker(0), Worker(1)]
    for update in range(3):
        named = [(name, tensor + update if tensor.dtype != torch.bool else tensor) for name, tensor in weights()]
        futures = [receive(worker, sender.address) for worker in workers]
        sender.send(iter(named), 2000, dtype=torch.bfloat16)
        expected = fingerprints((n, t.bfloat16() if t.is_floating_point() else t) for n, t in named)
        for future, worker in zip(futures, workers, strict=True):
            future.result(30)
            assert fingerprints(worker.taken.items()) == expected


def test_what_one_worker_refuses_is_raised_on_both_sides_and_the_next_broadcast_arrives(
    broadcast: Callable[..., WeightBroadcast],
) -> None:
    sender, workers = broadcast(2), [Worker(0), Worker(1)]
    workers[1].refuses = "layer.3"
    futures = [receive(worker, sender.address) for worker in workers]
    with pytest.raises(RolloutError, match=r"'layer\.3', which vLLM's model does not have"):
        sender.send(iter(weights()), 2000, dtype=torch.float32)
    futures[0].result(30)
    with pytest.raises(RolloutError, match=r"'layer\.3'"):
        futures[1].result(30)
    workers[1].refuses = None
    futures = [receive(worker, sender.address) for worker in workers]
    sender.send(iter(weights()), 2000, dtype=torch.float32)
    assert [future.result(30) for future in futures] == [None, None]
    assert fingerprints(workers[1].taken.items()) == fingerprints(weights())


def test_a_stream_that_breaks_off_ends_the_workers_too_and_the_next_one_arrives(
    broadcast: Callable[..., WeightBroadcast],
) -> None:
    sender, worker = broadcast(), Worker()

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from weights()[:8]
        raise KeyError("of the trainer")

    future = receive(worker, sender.address)
    with pytest.raises(KeyError):
        sender.send(broken(), 500, dtype=torch.float32)
    with pytest.raises(RolloutError, match="broke off sending its weights .*of the trainer"):
        future.result(30)
    future = receive(worker, sender.address)
    sender.send(iter(weights()), 500, dtype=torch.float32)
    future.result(30)
    assert fingerprints(worker.taken.items()) == fingerprints(weights())


def test_a_worker_that_never_comes_is_named_within_the_timeout(broadcast: Callable[..., WeightBroadcast]) -> None:
    sender, workers = broadcast(2, timeout_s=3.0), [Worker(0), Worker(1)]
    came = receive(workers[0], sender.address)
    start = time.monotonic()
    with pytest.raises(RolloutError, match="worker 2 of 2 gave no sign for 3 s"):
        sender.send(iter(weights()), 2000, dtype=torch.float32)
    # The one that came hears at once who did not, and both may come to the next one.
    with pytest.raises(RolloutError, match="broke off .*worker 2 of 2 gave no sign"):
        came.result(1)
    assert time.monotonic() - start < 10
    futures = [receive(worker, sender.address) for worker in workers]
    sender.send(iter(weights()), 2000, dtype=torch.float32)
    assert [future.result(10) for future in futures] == [None, None]


def test_whoever_watches_the_engine_ends_the_wait(broadcast: Callable[..., WeightBroadcast]) -> None:
    sender = broadcast(1, timeout_s=60.0)

    def check() -> None:
        raise RolloutError("The vLLM engine is gone.")

    with pytest.raises(RolloutError, match="is gone"):
        sender.send(iter(weights()), 2000, dtype=torch.float32, check=check)


def test_workers_learn_that_the_trainer_is_gone() -> None:
    sender = WeightBroadcast(1, "cpu", timeout_s=30.0)
    worker = Worker()
    future = receive(worker, sender.address)
    time.sleep(0.3)
    sender.close()
    del sender
    with pytest.raises(RolloutError, match="is gone"):
        future.result(40)


class Dying(BroadcastReceiver):
    """Its process is killed in the middle of a stream."""

    def receive(self, take: Any) -> None:
        def die(named: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        super().receive(die)


def _receive_and_die(address: dict[str, Any]) -> None:
    Dying(address, 1, "cpu").receive(None)


def test_a_worker_that_dies_in_the_middle_is_an_error_and_another_one_can_take_its_place(
    broadcast: Callable[..., WeightBroadcast],
) -> None:
    sender = broadcast(1, timeout_s=120.0)
    process = SPAWN.Process(target=_receive_and_die, args=(sender.address,))
    process.start()

    def check() -> None:
        if process.exitcode is not None:
            raise RolloutError("The engine's process is gone.")

    with pytest.raises(RolloutError):
        sender.send(iter(weights()), 500, dtype=torch.float32, check=check)
    process.join(30)
    worker = Worker()
    future = receive(worker, sender.address)
    sender.send(iter(weights()), 500, dtype=torch.float32)
    future.result(30)
    assert fingerprints(worker.taken.items()) == fingerprints(weights())
