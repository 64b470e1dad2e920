"""Reward functions that processes load from this file by its path: some misbehave, by what the row asks of them."""

import asyncio
import functools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time


def act(do="return", value=0.0, seconds=0.0, **_):
    if do == "sleep":
        time.sleep(seconds)
    elif do == "regex":
        re.match("(a+)+$", "a" * 40 + "b")
    elif do == "raise":
        raise ValueError(f"no {value}")
    elif do == "exit":
        sys.exit(3)
    elif do == "_exit":
        os._exit(3)
    elif do == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif do == "fork":
        os.fork()
    elif do == "unpicklable":
        return lambda: value
    elif do == "memory":
        return len(bytearray(1 << 30))
    elif do == "print":
        os.write(1, b"\x00\x01 not a message\n")
        print("said", value)  # noqa: T201
        print("complained", value, file=sys.stderr)  # noqa: T201
    elif do == "out of memory score":
        with open("/proc/self/oom_score_adj") as file:
            return int(file.read())
    elif do == "pid":
        return os.getpid()
    elif do == "modules":
        return sorted(sys.modules)
    elif do == "cuda":
        raise RuntimeError(f"No CUDA GPUs are available ({os.environ['CUDA_VISIBLE_DEVICES']!r})")
    elif do == "leave a child":
        return leave_children(seconds)
    elif do == "hang with a child":
        leave_children(seconds, value)
        time.sleep(seconds)
    return value


def leave_children(seconds, path=None):
    inside = subprocess.Popen(["sleep", str(seconds)])
    outside = subprocess.Popen(["sleep", str(seconds)], start_new_session=True)
    if path:
        with open(path, "w") as file:
            file.write(f"{inside.pid} {outside.pid}")
    return inside.pid, outside.pid


async def act_async(do="return", value=0.0, seconds=0.0, **row):
    if do == "sleep":
        await asyncio.sleep(seconds)
        return value
    if do == "block":
        time.sleep(seconds)
    if do == "stubborn":
        while True:
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                continue
    return act(do, value, seconds, **row)


def with_alarm(value, **_):
    def ring(*_):
        raise TimeoutError("the alarm rang")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(1)
    try:
        time.sleep(value)
    finally:
        signal.alarm(0)
    return value


def _twice(value):
    return 2 * value


def with_a_pool_of_its_own(value, **_):
    with multiprocessing.Pool(2) as pool:
        return sum(pool.map(_twice, [value, value]))


class Scorer:
    def __init__(self):
        self.calls = 0

    def __call__(self, value=0.0, **_):
        self.calls += 1
        return value + 10


class AsyncScorer:
    async def __call__(self, value=0.0, **_):
        await asyncio.sleep(0)
        return value + 20


def makes(bonus):
    def closure(value=0.0, **_):
        return value + bonus

    return closure


of_lambda = lambda value=0.0, **_: value + 30  # noqa: E731
of_partial = functools.partial(act, do="return")
of_closure = makes(40)
