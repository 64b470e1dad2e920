"""Starts a peer engine in the interpreter of its own environment and gives it work, turn by turn with burnish."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Work

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("vllm", "hf")
# What a peer that is not in burnish's own environment needs, and what people call it.
_PACKAGES = {"vllm": "vLLM", "trl": "TRL", "verl": "verl"}


class PeerError(RuntimeError):
    """A peer that cannot be started, or that failed at its work."""


def interpreter(peer: str) -> str:
    """The Python that has the engine called ``peer``: ``BURNISH_PEER_PYTHON``, its environment in .peers, or this one.

    Raises:
        PeerError: none of them has it.
    """
    named = os.environ.get("BURNISH_PEER_PYTHON")
    own = ROOT / ".peers" / peer / "bin" / "python"
    if named:
        return named
    if own.exists():
        return str(own)
    if peer in _PACKAGES and find_spec(peer) is None:
        raise PeerError(
            f"{_PACKAGES[peer]} is neither in .peers/{peer} nor importable here; `make bench-peers` installs it for a CPU, "
            f"and BURNISH_PEER_PYTHON names the Python of an environment that has it."
        )
    return sys.executable


class Peer:
    """A peer engine in a process of its own; a context manager.

    Attributes:
        facts: what it told of itself: ``versions``, ``start_seconds``.

    Args:
        name: what is before ``_engine`` in the name of a file beside this one.
        settings: see ``start`` of ``benchmarks/peers/<name>_engine.py``.
        log: where its stderr goes.

    Raises:
        PeerError: it did not start.
    """

    def __init__(self, name: str, settings: dict[str, Any], log: Path) -> None:
        self.name = name
        self._log = log
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [interpreter(name), "-m", f"benchmarks.peers.{name}_engine", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)},
            )
        self.facts = self._answer()

    def run(self, work: Work) -> dict[str, Any]:
        """Its answer: ``seconds``, ``tokens``, ``mean_log_prob``.

        Raises:
            PeerError: it failed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(work) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerError(f"The peer {self.name} has ended; its log is {self._log}.") from error
        return self._answer()

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise PeerError(f"The peer {self.name} ended with code {code} and no answer; its log is {self._log}.")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"The peer {self.name} failed: {answer['error']}. Its log is {self._log}.")
        return answer
