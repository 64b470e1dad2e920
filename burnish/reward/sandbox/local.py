"""Runs Python programs on this machine, shut off from it by the kernel's namespaces."""

import functools
import json
import math
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from burnish.reward.sandbox.limits import MEBIBYTE, Kind, SandboxResult, SandboxSettings

_INSIDE = Path(__file__).parent / "inside"
# Of the host, what a Python program needs to start; it is seen, not written to.
_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d",
    "/etc/alternatives", "/etc/localtime",
)  # fmt: skip
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    # Programs that print a set give the same answer each time.
    "PYTHONHASHSEED": "0",
    # Libraries that start a thread for each core would meet the limits on processes and memory.
    **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")},
}
_MAX_OPEN_FILES = 128
# For the processes of the sandbox itself, before the program starts, on a machine that is busy.
_START_SECONDS = 60.0
_END_SECONDS = 10.0
# What the sandbox's own interpreter shares with the program's counts as memory of both.
_SHARED_MB = 64


def run(code: str, *, stdin: str = "", settings: SandboxSettings) -> SandboxResult:
    """Runs a Python program in a new sandbox, all of which is gone when this returns.

    Where the kernel allows no namespaces the result is "refused", unless ``settings.allow_unsafe``.
    """
    result = _run(code, stdin, settings, namespaces=True)
    if result.kind == "refused" and settings.allow_unsafe:
        return _run(code, stdin, settings, namespaces=False)
    return result


@functools.cache
def refusal() -> str | None:
    """Why programs cannot be shut off from this machine; None where they can. Tried once for each process."""
    tried = _run("print('in')", "", SandboxSettings(timeout=30.0), namespaces=True)
    if tried.kind == "ok" and tried.stdout == "in\n":
        return None
    return tried.stderr.strip() or f"a program in it ended with {tried.kind}"


def _run(code: str, stdin: str, settings: SandboxSettings, *, namespaces: bool) -> SandboxResult:
    folder = None if namespaces else tempfile.mkdtemp(prefix="burnish-sandbox-")
    job = json.dumps(_job(code, settings, folder)).encode()
    descriptors: list[int] = []
    try:
        job_read, job_write = os.pipe()
        report_read, report_write = os.pipe()
        descriptors += [job_read, job_write, report_read, report_write]
        launcher = subprocess.Popen(
            # Absolute, and isolated: neither variables nor files of the working folder change what runs as root.
            [sys.executable, "-I", "-S", str(_INSIDE), str(job_read), str(report_write)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(job_read, report_write),
            env=_ENVIRONMENT,
        )
        for descriptor in (job_read, report_write):
            os.close(descriptor)
            descriptors.remove(descriptor)
        with launcher:
            try:
                descriptors.remove(job_write)
                return _Talk(launcher, report_read, settings).until_end(job_write, job, stdin)
            finally:
                _end(launcher)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _job(code: str, settings: SandboxSettings, folder: str | None) -> dict[str, Any]:
    """What `inside/__main__.py` reads. ``folder``: where the program runs if it is not shut off."""
    memory = settings.memory_limit_mb * MEBIBYTE
    disk = settings.disk_limit_mb * MEBIBYTE
    return {
        "parent": os.getpid(),
        "namespaces": folder is None,
        "folder": folder,
        "code": code,
        # -P -s: nothing is imported from the folder or the home of whoever runs it.
        "argv": [sys.executable, "-P", "-s", "-B", "main.py"],
        "environment": _ENVIRONMENT if folder is None else {**_ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
        "read_only": _read_only(),
        "memory_bytes": memory + _SHARED_MB * MEBIBYTE,
        "disk_bytes": disk,
        "max_processes": settings.max_processes,
        "limits": {
            "RLIMIT_CPU": math.ceil(settings.timeout),
            "RLIMIT_AS": memory,
            "RLIMIT_FSIZE": disk,
            "RLIMIT_NOFILE": _MAX_OPEN_FILES,
            "RLIMIT_NPROC": settings.max_processes,
            "RLIMIT_CORE": 0,
            "RLIMIT_MSGQUEUE": 0,
        },
    }


def _read_only() -> list[str]:
    """Paths of the host that are seen in the sandbox: the system's programs and libraries, and this Python with the
    packages that are installed beside it."""
    roots = {sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)}
    inner = [path for path in sorted(roots) if not any(path.startswith(root + "/") for root in ("/usr", *roots))]
    return [*_SYSTEM, *(path for path in inner if path not in _SYSTEM)]


class _Talk:
    """Everything that goes in and out of a sandbox, all at once, until it ends or a limit is passed."""

    def __init__(self, launcher: Any, report: int, settings: SandboxSettings) -> None:
        self._settings = settings
        self._begun = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._sinks: dict[int, bytearray] = {}
        self._sources: dict[int, memoryview] = {}
        self._report = report
        self._stdin = launcher.stdin
        self._started: float | None = None
        self._stdout, self._stderr = launcher.stdout.fileno(), launcher.stderr.fileno()
        for descriptor in (self._stdout, self._stderr, report):
            self._sinks[descriptor] = bytearray()
            self._register(descriptor, selectors.EVENT_READ)

    def until_end(self, job_descriptor: int, job: bytes, stdin: str) -> SandboxResult:
        # A pipe of its own for the job, so that the program's stdin holds nothing but its input.
        self._send(job_descriptor, job)
        self._send(os.dup(self._stdin.fileno()), stdin.encode("utf-8", "surrogatepass"))
        self._stdin.close()
        ended: Kind | None = None
        while ended is None and self._open():
            left = self._deadline() - time.monotonic()
            if left <= 0:
                ended = "timeout"
            for key, _ in self._selector.select(min(max(left, 0.0), 0.5)):
                self._move(key.fd)
                ended = ended or self._over_limit(key.fd)
        for descriptor in list(self._sources):
            self._close_source(descriptor)
        self._selector.close()
        return self._result(ended)

    def _open(self) -> bool:
        """Until the report says how the program ended; what it printed before is in the pipes by then."""
        if b'"exit"' in self._sinks[self._report] or b'"refused"' in self._sinks[self._report]:
            for descriptor in (self._stdout, self._stderr):
                while descriptor in self._selector.get_map() and self._move(descriptor):
                    if self._over_limit(descriptor):
                        break
            return False
        return self._report in self._selector.get_map()

    def _deadline(self) -> float:
        if self._started is None and b'"ready"' in self._sinks[self._report]:
            self._started = time.monotonic()
        if self._started is None:
            return self._begun + _START_SECONDS
        return self._started + self._settings.timeout

    def _register(self, descriptor: int, event: int) -> None:
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, event)

    def _send(self, descriptor: int, content: bytes) -> None:
        self._sources[descriptor] = memoryview(content)
        self._register(descriptor, selectors.EVENT_WRITE)

    def _move(self, descriptor: int) -> bool:
        """One read or write; False where there is nothing more."""
        if descriptor in self._sources:
            return self._write(descriptor)
        try:
            content = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if not content:
            self._selector.unregister(descriptor)
            return False
        self._sinks[descriptor] += content
        return True

    def _write(self, descriptor: int) -> bool:
        try:
            self._sources[descriptor] = self._sources[descriptor][os.write(descriptor, self._sources[descriptor]) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:
            self._sources[descriptor] = memoryview(b"")
        if not self._sources[descriptor]:
            self._close_source(descriptor)
            return False
        return True

    def _close_source(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        del self._sources[descriptor]
        os.close(descriptor)

    def _over_limit(self, descriptor: int) -> Kind | None:
        if descriptor in (self._stdout, self._stderr):
            return "output" if len(self._sinks[descriptor]) > self._settings.output_limit_kb * 1024 else None
        return None

    def _result(self, ended: Kind | None) -> SandboxResult:
        limit = self._settings.output_limit_kb * 1024
        outputs = [self._sinks[descriptor] for descriptor in (self._stdout, self._stderr)]
        if ended is None and any(len(output) > limit for output in outputs):
            ended = "output"
        stdout, stderr = (bytes(output[:limit]).decode("utf-8", "replace") for output in outputs)
        report: dict[str, Any] = {}
        for line in self._sinks[self._report].decode().splitlines():
            report |= json.loads(line)
        exit_code = report.get("exit") if ended is None else None
        kind = ended or _kind(report, stderr)
        if kind == "refused":
            stderr = (
                f"The kernel does not allow a sandbox: {report.get('refused') or stderr.strip() or 'it did not start'}."
            )
        return SandboxResult(
            stdout=stdout,
            stderr=stderr,
            exit_code=exit_code,
            kind=kind,
            seconds=time.monotonic() - (self._started or self._begun),
        )


def _kind(report: dict[str, Any], stderr: str) -> Kind:
    if "refused" in report or "ready" not in report:
        return "refused"
    if report.get("killed") == "memory":
        return "memory"
    exit_code = report.get("exit")
    if exit_code == 0:
        return "ok"
    # SIGXCPU, or SIGKILL by the kernel where the program ignores it: the limit on processor time.
    if exit_code == -24:
        return "timeout"
    last = stderr.rstrip().rpartition("\n")[2]
    return "memory" if last.startswith("MemoryError") else "error"


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Ends the sandbox; returns when all its processes are gone."""
    launcher.terminate()
    try:
        launcher.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        # The first process of the sandbox dies with its launcher, and all others with it.
        launcher.kill()
        launcher.wait()
