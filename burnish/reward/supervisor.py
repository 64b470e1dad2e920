"""The thread behind `RewardPool`: starts reward processes, hands them rows, stops those that take too long."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import selectors
import socket
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Hashable
from typing import Any

from burnish.reward.outcome import Outcome, one_line
from burnish.reward.pool_worker import frame, take_frames
from burnish.reward.process_group import Guard, kill_tree
from burnish.reward.reward_process import Settings, Task, Worker, how_it_ended, spawn
from burnish.utils import progress

logger = logging.getLogger(__name__)

_AHEAD = 0.02
"""Seconds of work that a process holds at most, so that it need not wait for the next row, and few rows wait for a stuck
one."""
_MOST_AHEAD = 32
_GRACE = 1.0
"""Seconds that an asynchronous function gets to end a row by itself before its process is killed."""
_TICK = 0.1


class Supervisor:
    """Owns the processes; everything but `submit` and `close` happens on its own thread, which lives as long as they do:
    the system ends a reward process together with the thread that started it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._mark = uuid.uuid4().hex
        self.changed = threading.Condition()
        """Guards what follows, and tells of outcomes."""
        self.outcomes: dict[Hashable, Outcome] = {}
        self.pending: set[Hashable] = set()
        self.failure: tuple[str, str] | None = None
        """Why no process can start, and its traceback."""
        self.started = False
        self.closed = False
        self._new: deque[Task] = deque()
        self._queue: deque[Task] = deque()
        self._workers: list[Worker] = []
        self._next_id = 0
        self._mean_seconds: float | None = None
        self._told_of_timeout = False
        self._selector = selectors.DefaultSelector()
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        self._selector.register(self._ear, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="reward pool", daemon=True)
        self._thread.start()

    # --- called from any thread

    def submit(self, key: Hashable, row: bytes | Outcome) -> None:
        """A row on its way, or what became of it already."""
        with self.changed:
            self.pending.add(key)
            if isinstance(row, Outcome):
                self.outcomes[key] = row
                self.changed.notify_all()
                return
            self._new.append(Task(key, row))
            ring = len(self._new) == 1
        if ring:
            self._ring()

    def close(self) -> None:
        """Kills the processes with all that they started, and waits for the thread to end."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self._ring()
        # Garbage is collected on any thread, this one too.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # A full pipe rings too; a closed one has nobody to wake.
            self._bell.send(b"!")

    # --- the thread

    def _run(self) -> None:
        guard: Guard | None = None
        try:
            guard = self._guard = Guard(self._mark)
            for _ in range(self.settings.num_workers):
                self._start()
            while not self.closed and self.failure is None:
                self._step()
        except Exception as error:
            logger.exception("The reward pool failed.")
            self._fail(f"the reward pool itself failed: {one_line(error)}", "")
        finally:
            for worker in list(self._workers):
                self._stop(worker)
            if guard is not None:
                guard.close()
            self._selector.close()
            self._bell.close()
            self._ear.close()

    def _step(self) -> None:
        with self.changed:
            self._queue.extend(self._new)
            self._new.clear()
        for worker in self._workers:
            self._hand_out(worker)
        for entry, mask in self._selector.select(self._patience()):
            if entry.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._ear.recv(4096)
            elif entry.data in self._workers:
                if mask & selectors.EVENT_WRITE:
                    self._send(entry.data)
                if mask & selectors.EVENT_READ:
                    self._read(entry.data)
        self._check_time()

    def _patience(self) -> float | None:
        if all(worker.ready and not worker.tasks for worker in self._workers):
            return 5.0
        return _TICK

    def _start(self) -> None:
        process, ours = spawn(self._mark)
        self._guard.watch(process.pid)
        worker = Worker(process, ours, time.monotonic())
        self._workers.append(worker)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        settings = self.settings
        hello = {
            "function": settings.function,
            "timeout": settings.timeout,
            "memory_limit_mb": settings.memory_limit_mb,
        }
        worker.outbox += frame(hello | {"driver": os.getpid()})
        self._send(worker)

    def _stop(self, worker: Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.link)
        kill_tree(worker.process)
        self._guard.forget(worker.process.pid)
        worker.link.close()

    def _hand_out(self, worker: Worker) -> None:
        if not worker.ready or any(task.alone for task in worker.tasks.values()):
            return
        room = self._room(worker) - len(worker.tasks)
        before = len(worker.outbox)
        while room > 0 and self._queue:
            if self._queue[0].alone and worker.tasks:
                break
            task = self._queue.popleft()
            # A synchronous function starts on a row when it has answered the one before.
            task.started = time.monotonic()
            worker.tasks[self._next_id] = task
            worker.outbox += frame((self._next_id, task.row))
            self._next_id += 1
            room -= 1
            if task.alone:
                break
        if len(worker.outbox) > before:
            self._send(worker)

    def _room(self, worker: Worker) -> int:
        if worker.runs_async:
            return self.settings.concurrency
        if self._mean_seconds is None:
            return 1
        return max(1, min(_MOST_AHEAD, int(_AHEAD / max(self._mean_seconds, 1e-6))))

    def _send(self, worker: Worker) -> None:
        try:
            sent = worker.link.send(worker.outbox)
            del worker.outbox[:sent]
        except BlockingIOError:
            pass
        except OSError:
            worker.outbox.clear()  # It is gone, which reading tells.
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outbox else 0)
        self._selector.modify(worker.link, wanted, worker)

    def _read(self, worker: Worker) -> bool:
        """Whether there was anything to hear."""
        try:
            data = worker.link.recv(1 << 20)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._died(worker)
            return False
        worker.inbox += data
        for message in take_frames(worker.inbox):
            if message[0] == "ready":
                worker.ready, worker.runs_async = True, message[1]
                with self.changed:
                    self.started = True
                    self.changed.notify_all()
            elif message[0] == "failed":
                self._fail(message[1], message[2])
            else:
                self._answered(worker, *message)
        return True

    def _answered(
        self,
        worker: Worker,
        row_id: int,
        kind: Any,
        value: bytes | None,
        error: str | None,
        trace: str,
        seconds: float,
    ) -> None:
        task = worker.tasks.pop(row_id, None)
        if task is None:
            return
        self._mean_seconds = seconds if self._mean_seconds is None else 0.9 * self._mean_seconds + 0.1 * seconds
        if not worker.runs_async and worker.tasks:
            next(iter(worker.tasks.values())).started = time.monotonic()
        if kind == "timeout":
            self._finish(task, self._timeout(seconds))
            return
        read: Any = None
        if value is not None:
            try:
                read = pickle.loads(value)
            except Exception as unreadable:  # noqa: BLE001  objects of others, whose unpickling may raise anything
                error = f"RewardError: what the reward function returned cannot be read here: {one_line(unreadable)}"
                kind = "raised"
        self._finish(task, Outcome(read, error, trace, kind, seconds))

    def _finish(self, task: Task, outcome: Outcome) -> None:
        progress.tick()
        with self.changed:
            self.outcomes[task.key] = outcome
            self.changed.notify_all()

    def _timeout(self, seconds: float) -> Outcome:
        said = f"TimeoutError: it took longer than {self.settings.timeout_key}={self.settings.timeout:g} seconds and was stopped"
        if not self._told_of_timeout:
            # Where every response takes so long, a stage takes hours before its failures are told together.
            self._told_of_timeout = True
            logger.warning(
                "The reward function %s was given up on a response. %s. Further ones are counted.",
                self.settings.name,
                said,
            )
        return Outcome(error=said, kind="timeout", seconds=seconds)

    def _check_time(self) -> None:
        now, limit = time.monotonic(), self.settings.timeout
        for worker in list(self._workers):
            if worker.process.poll() is not None:
                # A child that it forked may hold the socket open, so that reading does not tell.
                while worker in self._workers and self._read(worker):
                    pass
                self._died(worker)
            elif not worker.ready and now - worker.started > self.settings.start_timeout:
                self._fail(f"a reward process was not ready after {self.settings.start_timeout:g} seconds", "")
            elif limit is not None and worker.tasks:
                first = next(iter(worker.tasks.values()))
                allowed = limit + _GRACE if worker.runs_async else limit
                if now - first.started > allowed:
                    # What it said meanwhile counts: this thread may have been kept from listening.
                    while worker in self._workers and self._read(worker):
                        pass
                    if worker in self._workers and next(iter(worker.tasks.values()), None) is first:
                        self._lost(worker, self._timeout(now - first.started))
                else:
                    # Its own limit ends it: to wait that long is no hang.
                    progress.tick()

    def _died(self, worker: Worker) -> None:
        if worker not in self._workers:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(timeout=5)
        how = how_it_ended(worker.process.returncode, self.settings.memory_limit_mb)
        if not worker.ready:
            if self.failure is None:
                self._fail(f"a reward process {how} while it loaded the function", "")
            return
        first = next(iter(worker.tasks.values()), None)
        seconds = time.monotonic() - first.started if first else 0.0
        self._lost(worker, Outcome(error=f"ProcessDied: its reward process {how}", kind="died", seconds=seconds))

    def _lost(self, worker: Worker, outcome: Outcome) -> None:
        """The process is ended; ``outcome`` is that of the row that it was at, the others are given to others."""
        self._stop(worker)
        tasks = list(worker.tasks.values())
        if worker.runs_async and len(tasks) > 1:
            # Any of them may have done it: each is repeated in a process where it is alone.
            for task in tasks:
                task.alone = True
            self._queue.extend(tasks)
        elif tasks:
            self._finish(tasks[0], outcome)
            self._queue.extendleft(reversed(tasks[1:]))
        self._start()

    def _fail(self, error: str, trace: str) -> None:
        with self.changed:
            self.failure = (error, trace)
            self.changed.notify_all()
