"""One thread drives the engine; what it samples is handed to the event loop once a round."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Protocol

from burnish.rollout.base import OnFinished, RolloutRequest, RolloutResponse
from burnish.rollout.server.errors import EngineStopped
from burnish.utils.errors import RolloutError

logger = logging.getLogger("burnish.rollout.server")

OnTokens = Callable[[str, Sequence[int], Sequence[float]], None]


class Session(Protocol):
    """An engine that has been opened: requests go in at any time, each round brings all of them forward."""

    def add(self, requests: Sequence[RolloutRequest]) -> None:
        """Queues requests, each with its own sampling parameters.

        Raises:
            RolloutError: a request that cannot be served; then none of them is queued.
        """
        ...

    def step(self) -> bool:
        """One round of prefilling, decoding and callbacks; False when nothing runs or waits."""
        ...


class ServableEngine(Protocol):
    """What the server needs of an engine."""

    def open_session(self, *, on_tokens: OnTokens, on_finished: OnFinished) -> AbstractContextManager[Session]:
        """The callbacks come from within ``Session.step``."""
        ...

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """See `BaseRollout.abort`."""
        ...


@dataclass(slots=True)
class Progress:
    """What one round brought for one request."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    response: RolloutResponse | None = None
    """Set when it is finished."""


class Submission:
    """What one client asked for: some requests that are answered together. Lives on the event loop's thread."""

    def __init__(self, driver: "EngineDriver", requests: Sequence[RolloutRequest], *, streams: bool) -> None:
        self.requests = requests
        self.streams = streams
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._driver = driver
        self._open = {request.request_id for request in requests}
        self._events: asyncio.Queue[Progress | Exception] = asyncio.Queue()

    async def progress(self) -> AsyncIterator[Progress]:
        """What comes of the requests until each is finished; without ``streams`` only their ends.

        Raises:
            EngineStopped: the engine failed meanwhile.
        """
        while self._open:
            event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            if event.response is not None:
                self._open.discard(event.request_id)
            yield event

    def close(self) -> None:
        """Nobody reads on: what is not finished is aborted."""
        self._driver.forget(self)

    def put(self, progress: Progress) -> None:
        """Called by the driver."""
        self._events.put_nowait(progress)

    def fail(self, error: Exception) -> None:
        """Called by the driver."""
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # Marks it as seen: a client that is gone waits for it no more.
        self._events.put_nowait(error)


@dataclass(frozen=True, slots=True)
class _Add:
    submission: Submission


@dataclass(frozen=True, slots=True)
class _Abort:
    request_ids: tuple[str, ...]


class EngineDriver:
    """Owns the engine's thread. A context manager: entering opens the engine's session, leaving ends it.

    ``submit``, ``forget``, ``abort_all`` and every ``Submission`` belong to the event loop's thread, the rest of this file's
    state to the engine's. What crosses over does so through ``_inbox`` one way and ``call_soon_threadsafe`` the other, so
    there are no locks, and a slow round of the engine never holds up the event loop.

    Raises:
        RolloutError: on entering, when the engine cannot open a session.
    """

    def __init__(self, engine: ServableEngine) -> None:
        self.failure: EngineStopped | None = None
        self._engine = engine
        self._thread = threading.Thread(target=self._run, name="burnish-engine", daemon=True)
        self._opened = threading.Event()
        self._inbox: SimpleQueue[_Add | _Abort | None] = SimpleQueue()
        self._cause: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._submissions: dict[str, Submission] = {}
        # The engine's thread alone: what this round brought, and how many tokens earlier rounds delivered of a stream.
        self._news: dict[str, Progress] = {}
        self._delivered: dict[str, int] = {}

    def __enter__(self) -> "EngineDriver":
        self._thread.start()
        self._opened.wait()
        if self.failure is not None:
            self._thread.join()
            raise self._cause if isinstance(self._cause, RolloutError) else self.failure
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inbox.put(None)
        self._thread.join()

    def submit(self, requests: Sequence[RolloutRequest], *, streams: bool) -> Submission:
        """Gives requests to the engine; ``await submission.accepted`` before the client is answered.

        Args:
            streams: whether tokens are wanted as they come, not only finished responses.

        Raises:
            EngineStopped: the engine failed before.
        """
        # Before the look at `failure`: the engine's thread sets that first and then looks for a loop to tell.
        self._loop = asyncio.get_running_loop()
        if self.failure is not None:
            raise self.failure
        submission = Submission(self, requests, streams=streams)
        self._submissions.update({request.request_id: submission for request in requests})
        self._inbox.put(_Add(submission))
        return submission

    def forget(self, submission: Submission) -> None:
        """Aborts what is not finished of a submission; harmless when all of it is."""
        open_ids = tuple(
            request.request_id
            for request in submission.requests
            if self._submissions.pop(request.request_id, None) is not None
        )
        if open_ids:
            self._inbox.put(_Abort(open_ids))

    def abort_all(self) -> None:
        """Ends every open answer soon, with what it has and the reason ``abort``."""
        if self._submissions:
            self._inbox.put(_Abort(tuple(self._submissions)))

    # The engine's thread.

    def _run(self) -> None:
        try:
            with self._engine.open_session(on_tokens=self._note_tokens, on_finished=self._note_finished) as session:
                self._opened.set()
                self._serve(session)
            self._stop(EngineStopped("The server is being shut down."))
        except BaseException as error:
            if self._opened.is_set():
                logger.exception("The engine failed; the server answers every request by an error from now on:")
            self._cause = error
            self._stop(EngineStopped(f"The engine failed: {error or type(error).__name__}"))
        finally:
            self._opened.set()

    def _serve(self, session: Session) -> None:
        busy = False
        while True:
            for command in self._commands(wait=not busy):
                if command is None:
                    return
                if isinstance(command, _Add):
                    self._add(session, command.submission)
                else:
                    self._engine.abort(command.request_ids)
            busy = session.step()
            self._deliver()

    def _commands(self, *, wait: bool) -> list[_Add | _Abort | None]:
        commands = [self._inbox.get()] if wait else []
        while True:
            try:
                commands.append(self._inbox.get_nowait())
            except Empty:
                return commands

    def _add(self, session: Session, submission: Submission) -> None:
        if submission.streams:
            self._delivered.update({request.request_id: 0 for request in submission.requests})
        try:
            session.add(submission.requests)
        except RolloutError as error:
            for request in submission.requests:
                self._delivered.pop(request.request_id, None)
            self._tell(self._refuse, submission, error)
        else:
            self._tell(_accept, submission)

    def _note_tokens(self, request_id: str, token_ids: Sequence[int], log_probs: Sequence[float]) -> None:
        if request_id in self._delivered:
            progress = self._news.setdefault(request_id, Progress(request_id))
            progress.token_ids.extend(token_ids)
            progress.log_probs.extend(log_probs)

    def _note_finished(self, response: RolloutResponse) -> None:
        # The response has all tokens, whether or not the engine reported the last ones before.
        delivered = self._delivered.pop(response.request_id, 0)
        self._news[response.request_id] = Progress(
            response.request_id, response.token_ids[delivered:], response.log_probs[delivered:], response
        )

    def _deliver(self) -> None:
        if not self._news:
            return
        news = list(self._news.values())
        self._news = {}
        for progress in news:
            if progress.response is None:
                self._delivered[progress.request_id] += len(progress.token_ids)
        self._tell(self._hand_out, news)

    def _stop(self, failure: EngineStopped) -> None:
        self.failure = failure
        self._tell(self._fail_all, failure)

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        """Has the event loop call ``function``; none is there before the first submission or after the server's end."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # It is closed: nobody listens any more.
                self._loop.call_soon_threadsafe(function, *args)

    # The event loop's thread.

    def _hand_out(self, news: Sequence[Progress]) -> None:
        for progress in news:
            finished = progress.response is not None
            get = self._submissions.pop if finished else self._submissions.get
            submission = get(progress.request_id, None)
            if submission is not None:
                submission.put(progress)

    def _refuse(self, submission: Submission, error: RolloutError) -> None:
        for request in submission.requests:
            self._submissions.pop(request.request_id, None)
        submission.fail(error)

    def _fail_all(self, failure: EngineStopped) -> None:
        submissions = dict.fromkeys(self._submissions.values())
        self._submissions.clear()
        for submission in submissions:
            submission.fail(failure)


def _accept(submission: Submission) -> None:
    if not submission.accepted.done():
        submission.accepted.set_result(None)
