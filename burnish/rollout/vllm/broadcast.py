"""How weights reach engines with which the trainer shares no memory, on other GPUs or other computers: by broadcast.

The trainer is rank 0 of a group of its own, beside whatever groups both sides train and decode in; gloo where the weights are on
a CPU, NCCL where they are on GPUs. What a bucket holds travels through the group's store, and no side enters a collective before
the store says that all others are about to, so that an engine that died or never came is named and nobody waits for ever.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from burnish.rollout.base import WeightStream
from burnish.rollout.vllm.transports import TwoBuckets, cut
from burnish.utils.env import interface_towards
from burnish.utils.errors import RolloutError

Check = Callable[[], None]
"""Raises where waiting has become pointless."""

# A worker waits so much longer than the sender.
_GRACE_S = 5.0


class _Local:
    """Memory that only this process sees; see `burnish.rollout.vllm.transports.Bucket`."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.address: list[Any] = []

    def close(self) -> None:
        """Nothing to do."""


class WeightBroadcast:
    """The trainer's side.

    Args:
        num_receivers: workers of all engines together: ranks 1 to ``num_receivers`` of the group.
        device: where the buckets are: "cpu" for gloo, "cuda" for NCCL.
        host: this computer's address, as the engines reach it.
        port: 0 takes a free one.
        timeout_s: for each step of an update.
    """

    def __init__(
        self,
        num_receivers: int,
        device: torch.device | str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        self._device = torch.device(device)
        self._ranks = range(1, num_receivers + 1)
        self._timeout_s = timeout_s
        self._store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        self._collective: _Collective | None = None
        self._group, self._num_updates = 0, 0
        self.address: dict[str, Any] = {
            "host": host,
            "port": self._store.port,
            "world_size": num_receivers + 1,
            "backend": "nccl" if self._device.type == "cuda" else "gloo",
            "timeout_s": timeout_s,
        }
        """What the engines are told; plain, since it crosses processes."""

    def send(self, stream: WeightStream, bucket_bytes: int, *, dtype: torch.dtype, check: Check | None = None) -> None:
        """Sends a stream to all receivers, each of which must be in ``take_broadcast`` or come to it; reads it to its end.

        Args:
            dtype: that floating-point tensors are cast to.
            check: called while it waits.

        Raises:
            RolloutError: a receiver did not come, died, or could not take what was sent.
        """
        check = check or (lambda: None)
        update = f"update/{self._num_updates}"
        self._num_updates += 1
        num_buckets = 0
        try:
            self._meet(update, check)
            buckets = TwoBuckets(bucket_bytes, dtype, lambda num_bytes: _Local(num_bytes, self._device))
            underway: list[Check] = []
            for bucket, items in buckets.fill(stream):
                if underway:
                    underway.pop()()  # Before its bucket is filled anew.
                self._store.set(f"{update}/items/{num_buckets}", json.dumps([len(bucket.tensor), items]))
                self._await([f"{update}/ready/{num_buckets}/{rank}" for rank in self._ranks], check)
                assert self._collective is not None
                end = items[-1][3] + _num_bytes(items[-1])
                underway.append(self._collective.broadcast(bucket.tensor[:end], check))
                num_buckets += 1
            if underway:
                underway.pop()()
        except BaseException as error:
            # The receivers may stand anywhere: they are told where that is still possible, and the group is made anew.
            said = json.dumps(f"{type(error).__name__}: {error}")
            self._store.set(f"{update}/items/{num_buckets}", said)
            self._dismiss(said)
            self._disband()
            raise
        self._store.set(f"{update}/items/{num_buckets}", json.dumps(None))
        self._await(done := [f"{update}/done/{rank}" for rank in self._ranks], check)
        failures = [self._store.get(name).decode() for name in done]
        self._forget(update, num_buckets)
        if failed := [text for text in failures if text]:
            raise RolloutError(failed[0])

    def close(self) -> None:
        """Ends the group."""
        self._disband()

    def _meet(self, update: str, check: Check) -> None:
        """All receivers are there, and in one group with this side."""
        self._await(here := [f"here/{rank}" for rank in self._ranks], check)
        known = {int(self._store.get(name)) for name in here}
        if self._collective is None or known != {self._group}:
            self._disband()
        for rank in self._ranks:
            self._store.delete_key(f"here/{rank}")
            self._store.set(f"go/{rank}", json.dumps([update, self._group]))
        if self._collective is None:
            store = dist.PrefixStore(f"group/{self._group}", self._store)
            self._collective = _collective(self.address, store, 0, self._device)

    def _dismiss(self, said: str) -> None:
        """Those that came and wait for the others are told why they wait in vain."""
        for rank in self._ranks:
            if self._store.delete_key(f"here/{rank}"):
                self._store.set(f"go/{rank}", said)

    def _disband(self) -> None:
        self._group += 1
        if self._collective is not None:
            self._collective.close()
            self._collective = None

    def _await(self, names: list[str], check: Check) -> None:
        """All of these keys are in the store."""
        deadline, pause = time.monotonic() + self._timeout_s, 0.0002
        while not self._store.check(names):
            check()
            if time.monotonic() > deadline:
                missing = [name.rsplit("/", 1)[1] for name in names if not self._store.check([name])]
                raise RolloutError(
                    f"Engine worker {', '.join(missing)} of {len(self._ranks)} gave no sign for {self._timeout_s:g} s while "
                    f"the weights were sent to it (waiting for {names[0].split('/')[-2]!r}). It is dead, hangs, or was not "
                    f"asked to receive."
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    def _forget(self, update: str, num_buckets: int) -> None:
        for index in range(num_buckets + 1):
            self._store.delete_key(f"{update}/items/{index}")
        for rank in self._ranks:
            self._store.delete_key(f"{update}/done/{rank}")
            for index in range(num_buckets):
                self._store.delete_key(f"{update}/ready/{index}/{rank}")


def _num_bytes(item: Any) -> int:
    _, dtype, shape, _ = item
    return int(torch.Size(shape).numel()) * getattr(torch, dtype).itemsize


class BroadcastReceiver:
    """One worker's side.

    Args:
        address: of the sender, `WeightBroadcast.address`.
        rank: of this worker in the sender's group, from 1.
        device: of this worker.
    """

    def __init__(self, address: dict[str, Any], rank: int, device: torch.device | str) -> None:
        self._address, self._rank, self._device = address, rank, torch.device(device)
        # Longer than the sender waits for another worker, so that this one hears who did not come.
        self._timeout = timedelta(seconds=address["timeout_s"] + _GRACE_S)
        self._store = dist.TCPStore(
            address["host"], address["port"], is_master=False, wait_for_workers=False, timeout=self._timeout
        )
        self._collective: _Collective | None = None
        self._group = -1

    def receive(self, take: Callable[[list[tuple[str, Tensor]]], Any]) -> None:
        """Takes one whole stream.

        Args:
            take: gets the tensors of a bucket by name; they hold until it returns.

        Raises:
            RolloutError: the sender is gone or broke off; else what ``take`` raised, after the stream's end.
        """
        update = self._meet()
        failure: BaseException | None = None
        buffer, index = torch.empty(0, dtype=torch.uint8, device=self._device), 0
        while True:
            message = self._read(f"{update}/items/{index}")
            if isinstance(message, str):
                self._broken_off(message)
            if message is None:
                break
            size, items = message
            if len(buffer) < size:
                buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            assert self._collective is not None
            self._store.set(f"{update}/ready/{index}/{self._rank}", "")
            self._collective.broadcast(buffer[: items[-1][3] + _num_bytes(items[-1])], lambda: None)()
            index += 1
            if failure is None:
                try:
                    take(cut(buffer, items))
                except Exception as error:  # noqa: BLE001  Raised at the end: others are still in the collectives.
                    failure = error
                _synchronise(self._device)
        self._store.set(f"{update}/done/{self._rank}", "" if failure is None else str(failure) or repr(failure))
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Leaves the group; the next stream makes another one."""
        self._group = -1
        if self._collective is not None:
            self._collective.close()
            self._collective = None

    def _meet(self) -> str:
        """The name of the update that comes, in one group with its sender."""
        self._store.delete_key(f"go/{self._rank}")
        self._store.set(f"here/{self._rank}", str(self._group))
        message = self._read(f"go/{self._rank}")
        if isinstance(message, str):
            self._broken_off(message)
        update, group = message
        if group != self._group:
            self.close()
            store = dist.PrefixStore(f"group/{group}", self._store)
            self._collective = _collective(self._address, store, self._rank, self._device)
            self._group = group
        return str(update)

    def _broken_off(self, why: str) -> NoReturn:
        self.close()
        raise RolloutError(f"The trainer broke off sending its weights ({why}).")

    def _read(self, name: str) -> Any:
        try:
            self._store.wait([name], self._timeout)
            return json.loads(self._store.get(name))
        except RuntimeError as error:  # torch's store errors: a timeout, or the sender is gone.
            self.close()
            raise RolloutError(
                f"The trainer at {self._address['host']}:{self._address['port']} sent no weights for "
                f"{self._timeout.total_seconds():g} s, or is gone: {str(error).splitlines()[0]}"
            ) from error


class _Collective(Protocol):
    def broadcast(self, tensor: Tensor, check: Check) -> Check:
        """Begins to bring rank 0's bytes [bytes] to all; what it returns waits for the end."""
        ...

    def close(self) -> None: ...


def _collective(address: dict[str, Any], store: dist.Store, rank: int, device: torch.device) -> _Collective:
    make = _Nccl if address["backend"] == "nccl" else _Gloo
    return make(address, store, rank, device)


class _Gloo:
    def __init__(self, address: dict[str, Any], store: dist.Store, rank: int, device: torch.device) -> None:
        group: Any = dist.ProcessGroupGloo
        options = group._Options()
        interface = interface_towards(address["host"])
        options._devices = [group.create_device(interface=interface) if interface else group.create_default_device()]
        options._timeout = timedelta(seconds=address["timeout_s"])
        self._group = group(store, rank, address["world_size"], options)

    def broadcast(self, tensor: Tensor, check: Check) -> Check:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        work = self._group.broadcast([tensor], options)

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                check()  # Who died is said better by whoever watches it.
                raise RolloutError(f"The broadcast of the weights broke off: {str(error).splitlines()[0]}") from error

        return wait

    def close(self) -> None:
        self._group = None


class _Nccl:
    """vLLM's own thin NCCL communicator, which needs no default process group and disturbs none."""

    def __init__(self, address: dict[str, Any], store: dist.Store, rank: int, device: torch.device) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        index = torch.cuda.current_device() if device.index is None else device.index
        self._device, self._timeout_s = torch.device("cuda", index), address["timeout_s"]
        group = StatelessProcessGroup(rank=rank, world_size=address["world_size"], store=store)
        self._communicator = PyNcclCommunicator(group, device=self._device)
        if self._communicator.disabled:
            raise RolloutError(
                "vLLM found no NCCL library to broadcast the weights with (VLLM_NCCL_SO_PATH), or VLLM_DISABLE_PYNCCL is set."
            )
        self._stream = torch.cuda.Stream(self._device)

    def broadcast(self, tensor: Tensor, check: Check) -> Check:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device):
            self._communicator.broadcast(tensor, src=0, stream=self._stream)
            done = self._stream.record_event()

        def wait() -> None:
            deadline, pause = time.monotonic() + self._timeout_s, 0.00005
            while not done.query():  # And not ``synchronize``: NCCL waits for a dead rank for ever.
                check()
                if time.monotonic() > deadline:
                    raise RolloutError(f"The broadcast of the weights did not end within {self._timeout_s:g} s.")
                time.sleep(pause)
                pause = min(2 * pause, 0.005)

        return wait

    def close(self) -> None:
        communicator = self._communicator
        if communicator.disabled:
            return
        communicator.available, communicator.disabled = False, True  # vLLM's own ``destroy`` has nothing to do then.

        def abort() -> None:
            # Not vLLM's ``destroy``: before 0.22 or so it waits for a broadcast that a dead rank will never end.
            with torch.cuda.device(self._device):
                communicator.nccl.lib.ncclCommAbort(communicator.comm)

        thread = threading.Thread(target=abort, daemon=True, name="nccl-abort")
        thread.start()
        thread.join(5.0)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
