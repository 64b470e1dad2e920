"""The main of a reward process: calls the reward function for the rows that its driver sends.

Messages are pickles behind their length, over one socket; standard output and error stay the function's own. From the
driver: the hello (a dict), then (row id, row as bytes). To the driver: ("ready", is_async) or ("failed", error,
traceback) once, then (row id, kind, value as bytes, error, traceback, seconds) for each row.
"""

import asyncio
import contextlib
import ctypes
import inspect
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
from typing import Any

from burnish.reward.outcome import one_line
from burnish.reward.travel import is_async, unpack
from burnish.utils import stacks
from burnish.utils.console import readers_may_leave

_LENGTH = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1
_OUT_OF_MEMORY_SCORE = 500
"""As if the process held half of the machine's memory more than it does."""

Frame = tuple[Any, ...]


def frame(message: Any) -> bytes:
    """A message as it goes over the socket."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def take_frames(buffer: bytearray) -> list[Any]:
    """The whole messages at the start of ``buffer``, which keeps the rest."""
    messages, start = [], 0
    while len(buffer) - start >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer, start)
        end = start + _LENGTH.size + length
        if len(buffer) < end:
            break
        messages.append(pickle.loads(memoryview(buffer)[start + _LENGTH.size : end]))
        start = end
    del buffer[:start]
    return messages


def main(fd: int) -> None:
    """Serves the driver at the other end of the socket ``fd`` until it hangs up."""
    try:
        # What a function prints must not fail since the run's terminal was closed.
        with readers_may_leave():
            _serve_driver(fd)
    except ConnectionError:
        os._exit(0)  # It hung up in the midst of a message.


def _serve_driver(fd: int) -> None:
    os.set_inheritable(fd, False)
    link = socket.socket(fileno=fd)
    buffer = bytearray()
    hello, *early = _receive(link, buffer)
    _die_with_the_driver(hello["driver"])
    _die_before_the_driver()
    stacks.make_visible()
    try:
        if hello["memory_limit_mb"] is not None:
            _limit_memory(hello["memory_limit_mb"])
        function = unpack(hello["function"])
        runs_async = is_async(function)
    except BaseException as error:  # noqa: BLE001  the user's file may raise anything
        link.sendall(frame(("failed", one_line(error), _trace(error))))
        return
    link.sendall(frame(("ready", runs_async)))
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    if runs_async:
        loop.run_until_complete(_serve_async(link, buffer, early, function, hello["timeout"]))
    else:
        _serve(link, buffer, early, function, loop)


def _serve(link: socket.socket, buffer: bytearray, messages: list[Any], function: Any, loop: Any) -> None:
    me = os.getpid()
    while True:
        for row_id, row in messages:
            answer = _call(function, row, loop)
            if os.getpid() != me:
                os._exit(0)  # The function forked, and this is the child.
            link.sendall(frame((row_id, *answer)))
        messages = _receive(link, buffer)


def _call(function: Any, row: bytes, loop: asyncio.AbstractEventLoop) -> Frame:
    started = time.perf_counter()
    try:
        value = function(**pickle.loads(row))
        if inspect.isawaitable(value):
            value = loop.run_until_complete(_wait_for(value))
        return _returned(value, started)
    except BaseException as error:  # noqa: BLE001  also SystemExit: the next row is somebody else's
        return _raised(error, started)
    finally:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)  # An alarm of this row must not ring in the next one.


async def _wait_for(value: Any) -> Any:
    return await value


async def _serve_async(link: socket.socket, buffer: bytearray, early: list[Any], function: Any, timeout: Any) -> None:
    link.setblocking(False)
    loop = asyncio.get_running_loop()
    sending = asyncio.Lock()
    running: set[asyncio.Task[None]] = set()

    async def one(row_id: int, row: bytes) -> None:
        started = time.perf_counter()
        call = loop.create_task(_wait_for(_begin(function, row)))
        done, _ = await asyncio.wait({call}, timeout=timeout)
        if not done:
            call.cancel()
            answer: Frame = ("timeout", None, None, "", time.perf_counter() - started)
        else:
            error = asyncio.CancelledError() if call.cancelled() else call.exception()
            answer = _raised(error, started) if error is not None else _returned(call.result(), started)
        async with sending:
            await loop.sock_sendall(link, frame((row_id, *answer)))

    messages = early
    while True:
        for row_id, row in messages:
            task = loop.create_task(one(row_id, row))
            running.add(task)
            task.add_done_callback(running.discard)
        data = await loop.sock_recv(link, 1 << 18)
        if not data:
            os._exit(0)
        buffer += data
        messages = take_frames(buffer)


async def _begin(function: Any, row: bytes) -> Any:
    value = function(**pickle.loads(row))
    return await value if inspect.isawaitable(value) else value


def _receive(link: socket.socket, buffer: bytearray) -> list[Any]:
    while True:
        messages = take_frames(buffer)
        if messages:
            return messages
        data = link.recv(1 << 18)
        if not data:
            os._exit(0)  # The driver hung up; threads of the function's must not keep the process.
        buffer += data


def _returned(value: Any, started: float) -> Frame:
    seconds = time.perf_counter() - started
    try:
        return "returned", pickle.dumps(value, pickle.HIGHEST_PROTOCOL), None, "", seconds
    except Exception as error:  # noqa: BLE001  objects of others, whose pickling may raise anything
        said = f"RewardError: what the reward function returned cannot be sent back: {one_line(error)}"
        return "raised", None, said, _trace(error), seconds


def _raised(error: BaseException, started: float) -> Frame:
    return "raised", None, one_line(error), _trace(error), time.perf_counter() - started


def _trace(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001  an exception whose own text raises
        return type(error).__name__


def _die_with_the_driver(driver: int) -> None:
    """The system ends this process when the driver's thread that started it ends."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != driver:
        os._exit(0)  # It was gone before it could be asked.


def _die_before_the_driver() -> None:
    """Where memory runs out the system ends this process, and what it has started, rather than the driver or a worker that
    holds a model. One that holds most of the machine by itself still goes first."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
        if int(file.read()) < _OUT_OF_MEMORY_SCORE:
            file.seek(0)
            file.write(str(_OUT_OF_MEMORY_SCORE))


def _limit_memory(megabytes: int) -> None:
    import resource

    # Memory that the process writes to, not addresses that libraries reserve.
    resource.setrlimit(resource.RLIMIT_DATA, (megabytes << 20, megabytes << 20))
