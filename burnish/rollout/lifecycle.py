"""What every engine in this process keeps track of: asleep or awake, busy or idle, whose weights, what to abort."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from burnish.rollout.base import RolloutRequest, WeightStream
from burnish.rollout.weights import load_weights
from burnish.utils.errors import RolloutError


class Lifecycle:
    """One engine's state. ``abort`` may be called from any thread, the rest from the one that uses the engine."""

    def __init__(self, *, shares_storage: bool) -> None:
        self.policy_version = 0
        self._shares_storage = shares_storage
        self._asleep = False
        self._broken_update = False
        self._idle = threading.Lock()
        self._running: frozenset[str] = frozenset()
        self._aborted: deque[str] = deque()

    @contextmanager
    def exclusive(self, what: str) -> Iterator[None]:
        """One of generate, update_weights and sleep at a time.

        Raises:
            RolloutError: another one is going on.
        """
        if not self._idle.acquire(blocking=False):
            raise RolloutError(f"{what} was called while the rollout engine is generating or updating its weights.")
        try:
            yield
        finally:
            self._idle.release()

    @contextmanager
    def generating(self, requests: Sequence[RolloutRequest]) -> Iterator[None]:
        """While these requests run, ``abort`` knows them.

        Raises:
            RolloutError: the engine is asleep, busy, or its weights are of no one policy.
        """
        if self._asleep:
            raise RolloutError("The rollout engine is asleep and cannot generate; call wake_up() first.")
        if self._broken_update:
            raise RolloutError(
                "The last update_weights failed half-way, so the rollout's weights are of no one policy; update them "
                "again."
            )
        with self.exclusive("generate"):
            self._aborted.clear()
            self._running = frozenset(request.request_id for request in requests)
            try:
                yield
            finally:
                self._running = frozenset()

    def abort(self, request_ids: Iterable[str] | None) -> None:
        """Notes the running ones of these requests; None: all of them."""
        self._aborted.extend(self._running if request_ids is None else self._running.intersection(request_ids))

    def take_aborts(self) -> set[str]:
        """The requests that are to be aborted since the last call."""
        return {self._aborted.popleft() for _ in range(len(self._aborted))}

    def update_weights(self, module: nn.Module, stream: WeightStream, version: int) -> None:
        """Checks the stream, copies it where the storage is not shared, and takes over the version."""
        with self.exclusive("update_weights"):
            self._broken_update = not self._shares_storage
            load_weights(module, stream, copy=not self._shares_storage)
            self._broken_update = False
            self.policy_version = version

    def sleep(self, level: int) -> None:
        """From now on generating is refused.

        Raises:
            RolloutError: a level other than 1 or 2.
        """
        if level not in (1, 2):
            raise RolloutError(f"sleep(level={level}): the level is 1 or 2.")
        self._asleep = True

    def wake_up(self) -> None:
        """Ends ``sleep``."""
        self._asleep = False
