"""Engines in a pool of their own, on other GPUs or computers than the trainer's: the seam for asynchronous training.

    trainer's process:    Publisher  --- weights: WeightBroadcast (NCCL or gloo) --->  StandaloneRollout  :engine's process
                          Remote     --- calls and responses: EngineProcess, or a Ray actor --->

A `Publisher` is what `burnish.workers.weight_sync.WeightSync` fills and checks, as it does with a rollout of its own.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from burnish.rollout.base import OnFinished, RolloutRequest, RolloutResponse, SamplingParams, WeightStream
from burnish.rollout.vllm.broadcast import WeightBroadcast
from burnish.rollout.vllm.engine import VLLMRollout
from burnish.rollout.vllm.engine_watch import GLANCE_S, EngineWatch, Heartbeat
from burnish.rollout.vllm.launch import launch_environment
from burnish.utils.errors import RolloutError

_DEFAULT_TIMEOUT_S = 600.0
# An engine learns at once that an update has failed.
_SETTLES_IN_S = 30.0


class StandaloneRollout(VLLMRollout):
    """A rollout whose weights do not come as a stream but from a `Publisher` in another process."""

    _num_rounds = 0
    _is_generating = False

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[RolloutResponse]:
        """See `BaseRollout.generate`."""
        self._is_generating = True
        try:
            return super().generate(requests, sampling, on_finished)
        finally:
            self._is_generating = False

    def _between_steps(self) -> set[str]:
        self._num_rounds += 1
        return super()._between_steps()

    def answer_between_steps(self) -> None:
        """Returns when the engine has come from one step to the next; at once where it makes none."""
        seen = self._num_rounds
        while self._is_generating and not self._lifecycle.is_paused and self._num_rounds == seen:
            time.sleep(GLANCE_S)

    def num_workers(self) -> int:
        """Workers of the engine, each of which is a receiver of the broadcast."""
        return len(self._core.call("weight_shapes"))

    def receive_weights(self, address: Mapping[str, Any], first_rank: int, version: int) -> None:
        """Takes the weights of policy ``version`` while the publisher sends them; also while paused.

        Args:
            address: `WeightBroadcast.address`.
            first_rank: of this engine's workers in the broadcast's group.

        Raises:
            RolloutError: a name that is missing, unknown, given twice, or of another shape here; the publisher is gone.
        """
        with self._lifecycle.updating(version):
            self._wake(frozenset(("weights",)))
            self._core.receive(address, first_rank, version)
            self.lost_weights = False


class Remote(Protocol):
    """A `StandaloneRollout` in another process: `EngineProcess`, or a few lines around a Ray actor."""

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Begins to call the method of that name with plain arguments."""
        ...

    def check(self) -> None:
        """Raises what is known of the engine's death."""
        ...


class Publisher:
    """The trainer's side of one or more standalone engines, which all get the same weights in one broadcast.

    Args:
        engines: all of them.
        device: where the trained weights are.
        dtype: of the engines' weights.
        host: this computer's address, as the engines reach it.
        timeout_s: for each step of an update.
    """

    shares_storage = False
    needs_base = True

    def __init__(
        self,
        engines: Sequence[Remote],
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        bucket_bytes: int = 256 << 20,
        host: str = "127.0.0.1",
        timeout_s: float = _DEFAULT_TIMEOUT_S,
    ) -> None:
        self._engines, self._dtype, self._bucket_bytes = list(engines), dtype, bucket_bytes
        sizes = [engine.call("num_workers") for engine in self._engines]
        self._first_ranks, next_rank = [], 1
        for size in sizes:
            self._first_ranks.append(next_rank)
            next_rank += size.result(timeout_s)
        self._broadcast = WeightBroadcast(next_rank - 1, device, host=host, timeout_s=timeout_s)
        self._timeout_s = timeout_s

    def update_weights(self, stream: WeightStream, version: int) -> None:
        """Sends the weights of policy ``version`` to all engines. One that is generating must be paused before.

        Raises:
            RolloutError: an engine refused what was sent, died, or did not come.
        """
        taken = [
            engine.call("receive_weights", self._broadcast.address, first_rank, version)
            for engine, first_rank in zip(self._engines, self._first_ranks, strict=True)
        ]

        def check() -> None:
            for engine, future in zip(self._engines, taken, strict=True):
                engine.check()
                if future.done():
                    future.result()  # It ended before its time: this raises why.

        try:
            self._broadcast.send(stream, self._bucket_bytes, dtype=self._dtype, check=check)
        except BaseException:
            concurrent.futures.wait(taken, timeout=_SETTLES_IN_S)  # Their next update may not find them in this one.
            raise
        for future in taken:
            future.result(self._timeout_s)

    def weights_checksum(self) -> dict[str, int]:
        """See `BaseRollout`.

        Raises:
            RolloutError: two engines hold different weights.
        """
        first, *others = [
            future.result(self._timeout_s) for future in [e.call("weights_checksum") for e in self._engines]
        ]
        for index, other in enumerate(others, start=1):
            if other != first:
                name = next(name for name in {**first, **other} if first.get(name) != other.get(name))
                raise RolloutError(
                    f"Engine {index} holds other values of {name!r} than engine 0: they are of two policies."
                )
        checksum: dict[str, int] = first
        return checksum

    def close(self) -> None:
        """Ends the broadcast's group; the engines stay."""
        self._broadcast.close()


class EngineProcess:
    """A `StandaloneRollout` in a process of its own on this computer, called over a pipe.

    Args:
        make: makes the rollout there; importable, as everything that a new process is given.
        args: of ``make``.
        environment: variables of that process alone: ``CUDA_VISIBLE_DEVICES`` gives it other GPUs.
        timeout: seconds in which it must have started, and without a sign of life after which it is ended while it generates.

    Raises:
        RolloutError: it did not start.
    """

    def __init__(
        self,
        make: Callable[..., StandaloneRollout],
        *args: Any,
        environment: Mapping[str, str] | None = None,
        timeout: float = _DEFAULT_TIMEOUT_S,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._watch, self._timeout = EngineWatch(None, timeout), timeout
        self._pending: dict[int, tuple[Future[Any], OnFinished | None]] = {}
        self._lock, self._next = threading.Lock(), 0
        started: Future[Any] = Future()
        self._pending[-1] = (started, None)
        self.process = context.Process(target=_serve, args=(theirs, make, args), name="standalone-engine")
        with launch_environment(environment or {}):
            self.process.start()
        theirs.close()
        self._watch.begin([self.process], lambda: False)
        threading.Thread(target=self._listen, daemon=True, name="standalone-engine").start()
        self._watch.wait(started)

    def call(self, method: str, *args: Any, on_finished: OnFinished | None = None) -> Future[Any]:
        """See `Remote.call`.

        Args:
            on_finished: of ``generate``: called for each response as it comes, from the thread that listens.
        """
        future: Future[Any] = Future()
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._pending[number] = (future, on_finished)
            try:
                self._pipe.send((number, method, args))
            except OSError:  # The listening thread says what became of it.
                self._fail()
        return future

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, on_finished: OnFinished | None = None
    ) -> list[RolloutResponse]:
        """See `BaseRollout.generate`; ``on_finished`` is called from this thread.

        Raises:
            RolloutError: as there; the engine died.
        """
        arrived: queue.SimpleQueue[RolloutResponse | None] = queue.SimpleQueue()
        future = self.call("generate", requests, sampling, on_finished=arrived.put)
        future.add_done_callback(lambda _: arrived.put(None))
        heartbeat = Heartbeat(self._watch, lambda: self.call("answer_between_steps"), self._timeout)
        while True:
            try:
                response = arrived.get(timeout=GLANCE_S)
            except queue.Empty:
                if not future.done():
                    heartbeat.check()
                continue
            heartbeat.beat()
            if response is None:
                break
            if on_finished is not None:
                on_finished(response)
        responses: list[RolloutResponse] = future.result()
        return responses

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """See `BaseRollout.abort`."""
        self.call("abort", None if request_ids is None else list(request_ids))

    def check(self) -> None:
        """See `Remote.check`."""
        self._watch.check()

    def close(self) -> None:
        """Ends the engine."""
        if self.process.is_alive():
            self.call("close")
            self.process.join(20)
            if self.process.is_alive():
                self.process.kill()
        self.process.join(20)

    def _listen(self) -> None:
        while True:
            try:
                number, kind, value = self._pipe.recv()
            except (EOFError, OSError):
                self.process.join(5)
                self._fail()
                return
            future, on_finished = self._pending[number]
            if kind == "finished":
                if on_finished is not None:
                    try:
                        on_finished(value)
                    except Exception as error:  # noqa: BLE001  Raised by whoever waits for the call; others wait too.
                        self._pending[number] = (future, None)
                        if not future.done():
                            future.set_exception(error)
                continue
            del self._pending[number]
            if future.done():  # Given up by whoever waited, or its callback failed.
                continue
            if kind == "result":
                future.set_result(value)
            else:
                future.set_exception(value)

    def _fail(self) -> None:
        try:
            self._watch.check()
            death = RolloutError("The standalone engine closed its pipe.")
        except RolloutError as error:
            death = error
        while self._pending:
            _, (future, _) = self._pending.popitem()
            if not future.done():
                future.set_exception(death)


def _serve(pipe: Any, make: Callable[..., StandaloneRollout], args: Sequence[Any]) -> None:
    """The engine's process: each call in a thread, so that a pause or an abort comes through while it generates."""
    lock = threading.Lock()

    def answer(number: int, kind: str, value: Any) -> None:
        with lock:
            pipe.send((number, kind, value))

    try:
        rollout = make(*args)
    except Exception as error:  # noqa: BLE001  Raised in the trainer's process.
        answer(-1, "error", _portable(error))
        return
    answer(-1, "result", None)

    def run(number: int, method: str, given: Sequence[Any]) -> None:
        try:
            more = (
                {"on_finished": lambda response: answer(number, "finished", response)} if method == "generate" else {}
            )
            answer(number, "result", getattr(rollout, method)(*given, **more))
        except Exception as error:  # noqa: BLE001  Raised in the trainer's process.
            answer(number, "error", _portable(error))

    while True:
        try:
            number, method, given = pipe.recv()
        except EOFError:  # The trainer is gone.
            rollout.close()
            return
        if method == "close":
            rollout.close()
            answer(number, "result", None)
            return
        threading.Thread(target=run, args=(number, method, given), daemon=True).start()


def _portable(error: Exception) -> Exception:
    """As it can be raised in another process."""
    if isinstance(error, RolloutError):
        return RolloutError(str(error))
    return RolloutError("".join(traceback.format_exception_only(error)).strip())
