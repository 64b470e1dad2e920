"""Requests that come and go while others run, as a server needs it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from burnish.rollout.base import OnFinished, RolloutRequest, RolloutResponse
from burnish.rollout.native.generation import Generation, OnTokens
from burnish.rollout.native.scheduler import Sequence as RunningSequence
from burnish.utils.errors import RolloutError

if TYPE_CHECKING:
    from burnish.rollout.native.engine import NativeRollout


class RolloutSession:
    """Requests that are added while others run, as a server needs it. Opened, stepped and closed in one thread.

    Use as a context manager; inside it the engine generates for nobody else. ``on_tokens`` gets (request id, token ids,
    log-probs) of each window, ``on_finished`` every response; both from ``step``.
    """

    def __init__(self, engine: NativeRollout, on_tokens: OnTokens | None, on_finished: OnFinished | None) -> None:
        self._engine = engine
        self._on_tokens, self._on_finished = on_tokens, on_finished
        self._stack = ExitStack()
        self._inbox: deque[RunningSequence] = deque()
        self._names: set[str] = set()
        self._lock = threading.Lock()
        self._generation: Generation | None = None

    def __enter__(self) -> Self:
        engine = self._engine
        self._stack.enter_context(engine._lifecycle.generating())
        try:
            self._stack.enter_context(engine._runner.inference())
            self._stack.enter_context(engine._holding_copies(engine.max_length, engine.max_num_seqs, None))
            self._generation = engine._generation(engine.max_length, engine.max_num_seqs, self._finish, self._on_tokens)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._generation = None
        engine = self._engine
        if kind is not None or engine._config.free_cache_engine:
            engine._free_cache()
        self._stack.close()

    def add(self, requests: Sequence[RolloutRequest]) -> None:
        """These run as soon as there is room; each brings its own ``sampling``. From any thread.

        Raises:
            RolloutError: a request that cannot be served, or whose id is in use.
        """
        engine = self._engine
        for request in requests:
            if request.sampling is None:
                raise RolloutError(f"Request {request.request_id!r} has no sampling parameters of its own.")
        engine._check(requests, None)
        names = [request.request_id for request in requests]
        with self._lock:
            taken = self._names.intersection(names)
            if taken:
                raise RolloutError(f"Request {min(taken)!r} is running already; every request needs an id of its own.")
            self._names.update(names)
        arrived = [RunningSequence(request, request.sampling) for request in requests if request.sampling]
        engine._lifecycle.enlist(names, partial(self._inbox.extend, arrived))

    def step(self) -> bool:
        """One round: prefill what fits, a window of decode steps, callbacks. Where it raises, the session is to be closed.

        Returns:
            False when nothing runs and nothing waits.
        """
        assert self._generation is not None, "a session is used inside its with block"
        self._generation.round(self._take_inbox)
        return not (self._generation.done and not self._inbox)

    def _take_inbox(self) -> list[RunningSequence]:
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def _finish(self, response: RolloutResponse) -> None:
        with self._lock:
            self._names.discard(response.request_id)
        if self._on_finished is not None:
            self._on_finished(response)
