"""What every engine in this process keeps track of: asleep or awake, busy or idle, whose weights, what to abort."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from burnish.model.lora import has_adapters
from burnish.rollout.base import WeightStream
from burnish.rollout.weights import load_weights
from burnish.utils.errors import RolloutError


class Lifecycle:
    """One engine's state. ``abort``, ``pause`` and ``resume`` may be called from any thread, the rest from the one that
    uses the engine, or while it is paused."""

    def __init__(self, *, shares_storage: bool) -> None:
        self.policy_version = 0
        self.num_updates = 0
        """Of ``update_weights`` so far."""
        self.needs_base = not shares_storage
        """Whether the next ``update_weights`` must bring the whole model: a later one may bring adapters alone."""
        self._shares_storage = shares_storage
        self._asleep = False
        self._broken_update = False
        self._idle = threading.Lock()
        self._running: set[str] = set()
        self._lock = threading.Lock()
        self._aborted: set[str] = set()
        self._generating_thread: int | None = None
        self._go = threading.Event()
        self._go.set()
        self._still = threading.Event()
        self._still.set()

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
    def generating(self, request_ids: Iterable[str] = ()) -> Iterator[None]:
        """While these requests run, and those of `enlist`, ``abort`` knows them.

        Raises:
            RolloutError: the engine is asleep, busy, or its weights are of no one policy.
        """
        self._check_usable()
        if self._generating_thread is not None:
            raise RolloutError("generate was called while the rollout engine is generating; it is paused, not free.")
        with self.exclusive("generate"):
            with self._lock:
                self._aborted.clear()
                self._running = set(request_ids)
                self._generating_thread = threading.get_ident()
                self._still.clear()
            try:
                yield
            finally:
                with self._lock:
                    self._running = set()
                    self._generating_thread = None
                    self._still.set()

    def _check_usable(self) -> None:
        if self._asleep:
            raise RolloutError("The rollout engine is asleep and cannot generate; call wake_up() first.")
        if self._broken_update:
            raise RolloutError(
                "The last update_weights failed half-way, so the rollout's weights are of no one policy; update them "
                "again."
            )

    def enlist(self, request_ids: Iterable[str], hand_over: Callable[[], None]) -> None:
        """These requests run too from now on; ``hand_over`` gives them to the generating thread, before any ``abort``."""
        with self._lock:
            self._running.update(request_ids)
            hand_over()

    def discharge(self, request_id: str) -> None:
        """This request is answered; an ``abort`` that came too late is not for another one of its name."""
        with self._lock:
            self._running.discard(request_id)
            self._aborted.discard(request_id)

    def abort(self, request_ids: Iterable[str] | None) -> None:
        """Notes the running ones of these requests; None: all of them."""
        with self._lock:
            self._aborted.update(self._running if request_ids is None else self._running.intersection(request_ids))

    def take_aborts(self) -> set[str]:
        """The requests that are to be aborted since the last call."""
        with self._lock:
            taken, self._aborted = self._aborted, set()
        return taken

    def pause(self) -> None:
        """Stops generating before its next round, and returns once it stands still; at once in the generating thread."""
        self._go.clear()
        if self._generating_thread != threading.get_ident():
            self._still.wait()

    def resume(self) -> None:
        """Ends ``pause``."""
        with self._lock:
            if self._generating_thread is not None:
                # Here and not when that thread wakes up: a ``pause`` in between must wait for it.
                self._still.clear()
            self._go.set()

    @property
    def is_paused(self) -> bool:
        """Whether nothing is generated until ``resume``."""
        return not self._go.is_set()

    def stand_still_while_paused(self) -> bool:
        """Called by the generating thread between rounds: lets others in until ``resume``.

        Returns:
            Whether it was paused.

        Raises:
            RolloutError: it was resumed asleep, or after an update that failed.
        """
        if self._go.is_set():
            return False
        self._idle.release()
        self._still.set()
        try:
            self._go.wait()
        finally:  # Also where Ctrl-C ends the wait: `exclusive` releases it.
            self._idle.acquire()
        self._check_usable()
        return True

    def update_weights(self, module: nn.Module, stream: WeightStream, version: int) -> None:
        """Checks the stream, copies it where the storage is not shared, and takes over the version."""
        with self.updating(version, keeps_copy=not self._shares_storage) as needed_base:
            has_base = has_adapters(module) and not needed_base
            load_weights(module, stream, copy=not self._shares_storage, has_base=has_base)

    @contextmanager
    def updating(self, version: int, *, keeps_copy: bool = True) -> Iterator[bool]:
        """While the weights are replaced by those of policy ``version``; the caller gets whether the base must be among them.

        Where the body raises, the engine's copy is of no one policy, and generating is refused until the next update.

        Raises:
            RolloutError: the engine is generating or being updated.
        """
        with self.exclusive("update_weights"):
            needed_base, self.needs_base = self.needs_base, keeps_copy
            self._broken_update = keeps_copy
            yield needed_base
            self._broken_update = self.needs_base = False
            self.policy_version = version
            self.num_updates += 1

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


class OnLifecycle:
    """The members of `burnish.rollout.base.BaseRollout` that an engine's `Lifecycle` answers alone."""

    _lifecycle: Lifecycle

    @property
    def policy_version(self) -> int:
        """The version of the weights it samples from."""
        return self._lifecycle.policy_version

    @property
    def needs_base(self) -> bool:
        """See `BaseRollout`."""
        return self._lifecycle.needs_base

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """See `BaseRollout.abort`."""
        self._lifecycle.abort(request_ids)
