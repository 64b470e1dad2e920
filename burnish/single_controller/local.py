"""``LocalWorkerGroup``: a group of one worker in the driver's own process. Nothing starts, and ``pdb`` works."""

import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from burnish.protocol import DataProto
from burnish.single_controller.futures import RankFuture, ReadyFuture
from burnish.single_controller.heartbeat import Beat
from burnish.single_controller.host import WorkerHost
from burnish.single_controller.resource_pool import ResourcePool
from burnish.single_controller.sharding import Shard
from burnish.single_controller.worker import WorkerContext
from burnish.single_controller.worker_group import Call, RayClassWithInitArgs, WorkerGroup
from burnish.utils import progress, stacks
from burnish.utils.errors import ResourceError, StalledError, WorkerError
from burnish.utils.foreign_code import Caught


class LocalWorkerGroup(WorkerGroup):
    """The interface of ``RayWorkerGroup`` with the worker in this process.

    Batches are passed by reference, with containers of their own: keys that one side adds or removes do not show on the
    other. A call that is not waited for has run when it returns.

    Args:
        resource_pool: a pool of one process; it only says that one is enough.
        ray_cls_with_init: the worker's class and arguments.
        name_prefix: what messages call the group; the class's name where it is empty.
        stage_timeout: seconds that a call may take to get further (see `burnish.utils.progress`). Enforced on the main thread,
            and as soon as Python code runs: native code that hangs cannot be interrupted from its own process.
        stack_folder: where it is written in which code the process stands when it gets no further.
        collective_timeout: nothing waits for it in a group of one.

    Raises:
        ResourceError: the pool has more than one process.
        WorkerError: the worker cannot be made.
    """

    def __init__(
        self,
        resource_pool: ResourcePool | None,
        ray_cls_with_init: RayClassWithInitArgs,
        name_prefix: str = "",
        stage_timeout: float | None = None,
        stack_folder: str | None = None,
        collective_timeout: float | None = None,
    ) -> None:
        if resource_pool is not None and resource_pool.world_size != 1:
            raise ResourceError(
                f"The local controller runs one process, but the pool has {resource_pool.world_size}. "
                f"Set trainer.controller=ray."
            )
        super().__init__(1, ray_cls_with_init, name_prefix)
        self._process_name = self.name
        self._stage_timeout = stage_timeout
        self._stack_folder = stack_folder
        self._host = WorkerHost()
        with self._guarded("__init__"):
            self._host.construct(WorkerContext(), ray_cls_with_init)

    def _group_of_role(self, role: str, ray_cls_with_init: RayClassWithInitArgs) -> Self:
        group = copy.copy(self)
        # The colocated class has no registered methods, so the copy carries no method of another role.
        WorkerGroup.__init__(group, 1, ray_cls_with_init, role, role)
        return group

    def _submit(self, method_name: str, calls: list[Call]) -> list[RankFuture]:
        if self._host.closed:
            raise WorkerError(f"{method_name} cannot run, since {self.name} was shut down.")
        ((args, kwargs),) = calls
        own_args = [_own_containers(value) for value in args]
        own_kwargs = {key: _own_containers(value) for key, value in kwargs.items()}
        with self._guarded(method_name):
            result = self._host.invoke(self.role, method_name, *own_args, **own_kwargs)
        return [ReadyFuture(_own_containers(result))]

    @contextmanager
    def _guarded(self, stage: str) -> Iterator[None]:
        """Names the worker in errors, and ends the stage when its time is over."""
        alarm = _Alarm(self._stage_timeout, lambda frame: self._stalled(stage, frame))
        with alarm, Caught() as caught:
            yield
        if alarm.rang is not None and caught.error is alarm.rang:
            raise alarm.rang
        if caught.error is not None:
            kind = type(caught.error).__name__
            raise WorkerError(
                f"{self.name} rank 0 of 1 (the driver's process) failed in {stage}: {kind}: {caught.error}"
            ) from caught.error

    def _stalled(self, stage: str, frame: FrameType | None) -> StalledError:
        where = f" It stands at {stacks.place(frame)}." if frame is not None else ""
        if self._stack_folder is not None:
            where += f" Stacks: {stacks.write(self._stack_folder, f'{self.name} rank 0', stacks.of_this_process())}."
        return StalledError(
            f"{self.name} rank 0 of 1 (the driver's process) got no further in {stage} for {self._stage_timeout:g} s "
            f"(trainer.stage_timeout).{where}"
        )

    def beats(self) -> dict[str, Beat]:
        """See `WorkerGroup.beats`."""
        return {f"{self._process_name} rank 0": self._host.pulse.beat()}

    def idle_seconds(self) -> float | None:
        """See `WorkerGroup.idle_seconds`."""
        return progress.idle_seconds()

    def dump_stacks(self) -> dict[str, Path]:
        """See `WorkerGroup.dump_stacks`."""
        if self._stack_folder is None:
            return {}
        name = f"{self._process_name} rank 0"
        text = stacks.of_tree(os.getpid()) or stacks.of_this_process()
        return {name: stacks.write(self._stack_folder, name, text)}

    def shutdown(self) -> None:
        """Drops the worker, with all its roles. May be called again."""
        self._host.close()


def _own_containers(value: Any) -> Any:
    if isinstance(value, DataProto):
        return copy.copy(value)
    if isinstance(value, Shard):
        return Shard(copy.copy(value.data), value.num_padding)
    return value


class _Alarm:
    """Raises an error on the main thread when the block gets no further for too long; does nothing on other threads.

    Args:
        error: makes the error, of the frame that runs.
    """

    def __init__(self, seconds: float | None, error: Callable[[FrameType | None], StalledError]) -> None:
        self._seconds = seconds
        self._error = error
        self._active = seconds is not None and threading.current_thread() is threading.main_thread()
        self.rang: StalledError | None = None

    def _ring(self, signum: int, frame: FrameType | None) -> None:
        assert self._seconds is not None
        rest = self._seconds - min(progress.idle_seconds(), time.monotonic() - self._began)
        if rest > 0.001:
            signal.setitimer(signal.ITIMER_REAL, rest)
            return
        # Once more later: the code that is interrupted may take the error for one of its own and go on.
        signal.setitimer(signal.ITIMER_REAL, self._seconds)
        self.rang = self._error(frame)
        raise self.rang

    def __enter__(self) -> None:
        self._began = time.monotonic()
        if self._active:
            self._previous = signal.signal(signal.SIGALRM, self._ring)
            self._timer = signal.setitimer(signal.ITIMER_REAL, self._seconds or 0.0)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._active:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, self._previous)
            rest, interval = self._timer
            if rest:
                # One of the caller's own, as of a test runner, goes on.
                passed = time.monotonic() - self._began
                signal.setitimer(signal.ITIMER_REAL, max(0.001, rest - passed), interval)
