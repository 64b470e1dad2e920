"""A call on the processes of a group: waits for it, and names who failed, where and why."""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError, RayError, RayTaskError

from burnish.single_controller.futures import RankFuture
from burnish.single_controller.ray.processes import Processes
from burnish.utils.errors import StalledError, WorkerDiedError, WorkerError

# When a process dies, its peers' collectives fail too, and their errors may arrive first.
_SECONDS_FOR_OTHER_FAILURES = 2.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class PendingCall:
    """A method that runs on ranks 0, 1, ... of a group.

    Args:
        name: what messages call the group.
        stage: the method.
        refs: the result of each rank.
        timeout: seconds that the group may take to get further (see `burnish.utils.progress`); without limit if None. Processes
            that were not heard yet have so long to answer.
        timeout_key: what sets ``timeout``, for the message.
        upstream: the calls whose results are arguments of this one.
    """

    def __init__(
        self,
        processes: Processes,
        name: str,
        stage: str,
        refs: Sequence[ObjectRef],
        timeout: float | None = None,
        timeout_key: str = "trainer.stage_timeout",
        upstream: Sequence["PendingCall"] = (),
    ) -> None:
        self.refs = list(refs)
        self._processes = processes
        self._name = name
        self._stage = stage
        self._timeout = timeout
        self._timeout_key = timeout_key
        self._upstream = upstream
        self._results: list | None = None

    def results(self) -> list:
        """Waits for every rank, but not when one has failed: then the whole group is ended.

        Raises:
            WorkerError: a rank raised, died or did not answer in time; the cause is chained.
        """
        if self._results is None:
            self._results = self._wait()
        return self._results

    def _wait(self) -> list:
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        results: dict[ObjectRef, Any] = {}
        pending = self.refs
        while pending:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, pending = ray.wait(pending, num_returns=1, timeout=remaining)
            if not done:
                deadline = time.monotonic() + self._rest(pending)
            for ref in done:
                try:
                    results[ref] = ray.get(ref)
                except RayError as error:
                    self._fail(ref, error, pending)
        return [results[ref] for ref in self.refs]

    def _rest(self, pending: list[ObjectRef]) -> float:
        """Seconds that are left, since a process got further meanwhile."""
        assert self._timeout is not None
        idle = self._processes.idle_seconds()
        if idle is None or idle >= self._timeout:
            self._fail_late(pending)
        return self._timeout - idle

    def _fail(self, ref: ObjectRef, error: RayError, pending: list[ObjectRef]) -> NoReturn:
        """Ends the group and raises the failure that explains the others: a death before an exception."""
        failures = {ref: error}
        if pending and not isinstance(error, RayActorError):
            done, _ = ray.wait(pending, num_returns=len(pending), timeout=_SECONDS_FOR_OTHER_FAILURES)
            failures |= self._failures(done)
        first = next((ref for ref, error in failures.items() if isinstance(error, RayActorError)), ref)
        for call in self._upstream:
            call.raise_if_failed()
        others = [self.refs.index(other) for other in failures if other is not first]
        also = (
            f" (Also failed, perhaps for that reason: ranks {', '.join(map(str, sorted(others)))}.)" if others else ""
        )
        error = failures[first]
        kind = WorkerDiedError if isinstance(error, RayActorError) else WorkerError
        self._raise(f"{self._explain(first, error)}{also}", error, kind)

    def _fail_late(self, pending: list[ObjectRef]) -> NoReturn:
        for call in self._upstream:
            call.raise_if_failed()
            call.raise_if_unfinished()
        ranks = sorted(self.refs.index(ref) for ref in pending)
        written = self._processes.dump_stacks(ranks)
        silent = "; ".join(self._processes.describe(rank) + _standing(written.get(rank)) for rank in ranks)
        where = f" Stacks: {', '.join(str(file) for file, _ in written.values())}." if written else ""
        self._raise(
            f"{self._name} got no further in {self._stage} for {self._timeout:g} s ({self._timeout_key}). "
            f"No answer from: {silent}.{where}",
            None,
            StalledError,
        )

    def raise_if_failed(self) -> None:
        """Raises the call's failure if there is one by now; does not wait."""
        done, _ = ray.wait(self.refs, num_returns=len(self.refs), timeout=0)
        for ref, error in self._failures(done).items():
            kind = WorkerDiedError if isinstance(error, RayActorError) else WorkerError
            self._raise(self._explain(ref, error), error, kind)

    def raise_if_unfinished(self) -> None:
        """Raises if a rank has not answered yet; does not wait."""
        _, pending = ray.wait(self.refs, num_returns=len(self.refs), timeout=0)
        if pending:
            self._fail_late(pending)

    def _failures(self, done: list[ObjectRef]) -> dict[ObjectRef, RayError]:
        failures = {}
        for ref in done:
            try:
                ray.get(ref)
            except RayError as error:
                failures[ref] = error
        return failures

    def _explain(self, ref: ObjectRef, error: RayError) -> str:
        who = f"{self._name} {self._processes.describe(self.refs.index(ref))}"
        if isinstance(error, RayActorError):
            return f"{who} died in {self._stage}: {_reason(error)}"
        cause = _cause(error)
        return f"{who} failed in {self._stage}: {type(cause).__name__}: {cause}"

    def _raise(self, message: str, error: RayError | None, kind: type[WorkerError]) -> NoReturn:
        failure, cause = kind(message), _cause(error) if error is not None else None
        if isinstance(error, RayTaskError) and cause is not None:
            # Ray's text is the remote traceback, coloured.
            cause.add_note(f"In the worker's process:\n{_COLOUR.sub('', str(error))}")
        self._processes.failure = failure
        self._processes.kill()
        raise failure from cause


def _reason(error: RayActorError) -> str:
    """Why a process died, as far as Ray knows, in its words."""
    # Its last line is the reason; those before it are its own numbers of the process, and what follows is advice for clusters.
    reason = _COLOUR.sub("", str(error)).strip().splitlines()[-1]
    return reason.split(" If the process was killed by the kernel OOM killer")[0]


def _standing(written: tuple[Path, str | None] | None) -> str:
    return f", which stands at {written[1]}" if written is not None and written[1] else ""


def _cause(error: RayError) -> BaseException:
    """The exception that the worker raised, or else Ray's own."""
    cause = getattr(error, "cause", None)
    if not isinstance(error, RayTaskError) or not isinstance(cause, BaseException):
        return error
    return cause


class RayFuture(RankFuture):
    """The result of one rank of a :class:`PendingCall`. On another process it is the bare object reference."""

    def __init__(self, call: PendingCall, rank: int) -> None:
        self.call = call
        self._rank = rank

    def get(self) -> Any:
        """Waits for the whole call, so that a rank that hangs since another failed is noticed."""
        return self.call.results()[self._rank]

    def __reduce__(self) -> tuple[Callable, tuple]:
        return _RemoteFuture, (self.call.refs[self._rank],)


class _RemoteFuture(RankFuture):
    """A :class:`RayFuture` in the process of another worker."""

    def __init__(self, ref: ObjectRef) -> None:
        self._ref = ref

    def get(self) -> Any:
        return ray.get(self._ref)
