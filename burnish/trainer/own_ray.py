"""The Ray of a run. Signals to the run's process group pass the processes by that the run has started for it, and they end with
the run however that ends. The end of the one on which all depends is noticed, whoever has started it. Ray keeps the folder of a
session for ever; that of the run's own goes with the run, unless there is something to look up in its logs."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from burnish.reward.process_group import Guard

_HEAD = "gcs_server"
"""Without it no call of Ray comes back; a minute later Ray ends the driver's process, in words of its own."""
_SECONDS_OF_SILENCE = 50.0
"""After which the head of a cluster that was joined is given up: it may be started again, and Ray waits a little longer."""
_SECONDS_BETWEEN_QUESTIONS = 2.0
_SECONDS_TO_CONNECT = 3.0
_ATTEMPTS_TO_REMOVE = 50
_SECONDS_BETWEEN_ATTEMPTS = 0.1
_FOLDER = "--session-dir="
"""How the head's argument begins that names the folder of the session."""
_LATEST = "session_latest"
"""Ray's link to the folder of the session that began last."""


class OwnRay:
    """The processes of a Ray that this process starts, each the leader of a process group of its own; or the head of a cluster
    that it joins.

    `timeout`, job schedulers and shells send SIGTERM to whole groups. In the group of the run, Ray's processes would end at
    once, and the run could save nothing any more.
    """

    def __init__(self) -> None:
        self._guard: Guard | None = None
        self._head: subprocess.Popen[bytes] | None = None
        self._address: str | None = None
        self._session: Path | None = None
        self._asked = self._answered = 0.0

    @property
    def has_head(self) -> bool:
        """Whether there is anything to lose."""
        return self._head is not None or self._address is not None

    @contextmanager
    def starting(self) -> Iterator[None]:
        """While the block runs `ray.init`. Where it joins a Ray that is there, no process is started, and none is taken."""
        from ray._private import services as of_ray

        services: Any = of_ray
        popen = getattr(services, "ConsolePopen", None)
        if popen is None:
            # Another version of Ray: its processes end with whatever signal reaches the group.
            yield
            return

        def start(command: Any, **options: Any) -> subprocess.Popen[bytes]:
            process = popen(command, **options, process_group=0)
            self.take(process)
            return process

        services.ConsolePopen = start
        try:
            yield
        finally:
            services.ConsolePopen = popen

    def take(self, process: subprocess.Popen[bytes]) -> None:
        """``process``, which leads a group, belongs to the run's Ray."""
        if self._guard is None:
            self._guard = Guard()
        self._guard.watch(process.pid)
        program, *arguments = process.args if isinstance(process.args, (list, tuple)) else [process.args]
        if str(program).endswith(_HEAD):
            self._head = process
            # Known from the beginning: Ray's start may fail or be interrupted, and then it tells nothing.
            for argument in map(str, arguments):
                if argument.startswith(_FOLDER):
                    self._session = Path(argument.removeprefix(_FOLDER))

    def has_session(self, folder: str) -> None:
        """Ray's files of the session are in ``folder``, which is the run's own where it has started the head."""
        if self._head is not None:
            self._session = Path(folder)

    @property
    def logs(self) -> str | None:
        """Where the logs of the run's own Ray are, in a sentence; None where Ray is not the run's own."""
        return None if self._session is None else f"The logs of the run's Ray are kept in {self._session / 'logs'}."

    def join(self, address: str) -> None:
        """The run uses the cluster whose head listens at ``address``."""
        self._address, self._answered = address, time.monotonic()

    def lost(self) -> str | None:
        """Why the run cannot go on with this Ray, in a sentence; None where it can."""
        head, address = self._head, self._address
        if address is not None:
            return self._silence(address, time.monotonic())
        if head is None or (status := head.poll()) is None:
            return None
        by = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return (
            f"Ray's process {_HEAD} ({head.pid}), without which no worker can be reached, {by}. "
            f"(`ray stop` ends every Ray of this machine, also those of runs.){f' {self.logs}' if self.logs else ''}"
        )

    def _silence(self, address: str, now: float) -> str | None:
        if now - self._asked < _SECONDS_BETWEEN_QUESTIONS:
            return None
        self._asked = now
        silence = silence_of(address)
        if silence is None:
            self._answered = now
        if now - self._answered < _SECONDS_OF_SILENCE:
            return None
        return (
            f"The head of the Ray cluster at {address} has not answered for {now - self._answered:.0f} s ({silence})."
        )

    def ending(self) -> None:
        """From here on its processes are meant to end."""
        self._head = self._address = None

    def close(self) -> None:
        """Ends what is left of it. May be called again."""
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.close()

    def remove_session(self) -> None:
        """Removes what Ray has left of the session on the disk, once its processes have ended."""
        folder, self._session = self._session, None
        if folder is None:
            return
        latest = folder.parent / _LATEST
        with suppress(OSError):
            # Of another run that has started since, the link leads to the folder of that one.
            if latest.readlink() == folder:
                latest.unlink()
        for _ in range(_ATTEMPTS_TO_REMOVE):
            # A process that is about to end may write its last line to a file of its own in a folder that was empty a moment ago.
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                return
            time.sleep(_SECONDS_BETWEEN_ATTEMPTS)


def silence_of(address: str) -> str | None:
    """Why nothing answers at ``host:port``; None where something does."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_SECONDS_TO_CONNECT):
            return None
    except ValueError:
        return "that is no host:port"
    except OSError as error:
        return str(error)
