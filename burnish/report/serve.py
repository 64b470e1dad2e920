"""``burnish report --serve``: the same page over HTTP, of runs that go on.

It listens to this computer only, answers reads only, and only under its own address, so that no web page that is open in the same
browser can read a run through it.
"""

import hashlib
import re
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from burnish.report.choose import MOST_ROWS, Chosen, pack, pick
from burnish.report.html import page, script_safe
from burnish.report.payload import describe, load_pieces, payload
from burnish.report.read import RunFolder
from burnish.utils.errors import ConfigError

HOST = "127.0.0.1"
# Number of the run, kind, step.
_CHUNK = re.compile(r"/chunk/([0-9]{1,9})/([a-z]+)/([0-9]{1,18})")
_NAMES = ("127.0.0.1", "localhost", "[::1]")


class LiveReport:
    """What is served: the runs as they are now. Nothing of a step's responses is kept but the index.

    Args:
        runs: read on at every request for data.
        tokenizer: see `burnish.report.html.write_report`.
        refresh_s: seconds between two looks of an open page.
    """

    def __init__(self, runs: Sequence[RunFolder], tokenizer: str | None = None, refresh_s: float = 4.0) -> None:
        self.runs = runs
        self._tokenizer = tokenizer
        self._pieces = [load_pieces(run, tokenizer) for run in runs]
        self._lock = threading.Lock()
        self._data: dict[str, Any] | None = None
        self._version = ""
        self._refresh_s = refresh_s

    def data(self) -> tuple[str, dict[str, Any]]:
        """The version of the page's data, and the data; the same version means the same data but for how the runs stand."""
        with self._lock:
            changed = [run.refresh() for run in self.runs]
            for number, run in enumerate(self.runs):
                # The tokenizer may come with the first checkpoint.
                self._pieces[number] = self._pieces[number] or load_pieces(run, self._tokenizer)
            if any(changed) or self._data is None:
                entries = [describe(run, _all_of(run, MOST_ROWS // len(self.runs))) for run in self.runs]
                data = payload(entries, live=True, tokens_have_text=any(self._pieces))
                self._data = data | {"refresh_s": self._refresh_s}
                self._version = hashlib.sha256(script_safe(entries).encode()).hexdigest()[:16]
            return self._version, self._data

    def statuses(self) -> list[dict[str, Any]]:
        """How the runs stand. A run that falls silent writes nothing, so this changes without any new data."""
        return [run.status() for run in self.runs]

    def chunk(self, number: int, kind: str, step: int) -> str | None:
        """The responses of a step, packed; None where there are none."""
        if not 0 <= number < len(self.runs):
            return None
        run = self.runs[number]
        with self._lock:
            kept = _all_of(run, MOST_ROWS // len(self.runs)).get(kind)
            if kept is None or step not in kept.rows:
                return None
            try:
                return pack(run.dumps[kind].whole(step, kept.rows[step], self._pieces[number]))
            except OSError:
                # Removed since the last look.
                return None


def _all_of(run: RunFolder, most_rows: int) -> dict[str, Chosen]:
    """All responses that were dumped, up to so many that a browser shows them well."""
    chosen = {}
    for kind, dumps in run.dumps.items():
        num_steps = len(dumps.index) or 1
        rows = {step: pick(rows, float("inf"), max(4, most_rows // num_steps)) for step, rows in dumps.index.items()}
        chosen[kind] = Chosen(rows=rows)
    return chosen


class _Handler(BaseHTTPRequestHandler):
    report: LiveReport
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        try:
            address = urlsplit(self.path)
        except ValueError:
            return self._answer(400, "text/plain", b"This is no address.")
        host = self.headers.get("Host", "")
        if host.rpartition(":")[0] not in _NAMES and host not in _NAMES:
            # A page elsewhere whose name was made to lead here.
            return self._answer(403, "text/plain", b"This report is for this computer only.")
        if address.path == "/":
            _, data = self.report.data()
            return self._answer(200, "text/html; charset=utf-8", page(data, {}))
        if address.path == "/data.json":
            version, data = self.report.data()
            found: dict[str, Any] = {"version": version, "statuses": self.report.statuses()}
            if parse_qs(address.query).get("version") != [version]:
                found["data"] = data
            return self._answer(200, "application/json", script_safe(found).encode())
        if found_chunk := _CHUNK.fullmatch(address.path):
            chunk = self.report.chunk(int(found_chunk[1]), found_chunk[2], int(found_chunk[3]))
            if chunk is not None:
                return self._answer(200, "text/plain", chunk.encode())
        return self._answer(404, "text/plain", b"There is no such page.")

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not told."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is nothing to tell of."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def serve_report(
    runs: Sequence[RunFolder], port: int, *, tokenizer: str | None = None, refresh_s: float = 4.0
) -> ThreadingHTTPServer:
    """A server of the page, bound and not yet serving: ``serve_forever`` runs it, ``server_address`` tells its port.

    Args:
        port: to listen at; 0 takes a free one.
        tokenizer, refresh_s: see `LiveReport`.

    Raises:
        ConfigError: the port is taken.
    """
    handler = type("Handler", (_Handler,), {"report": LiveReport(runs, tokenizer, refresh_s)})
    try:
        return _Server((HOST, port), handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port={port} cannot be listened at: {error}. --port=0 takes a free one.") from error
