"""A real HTTP server for tests, whose answers a test writes."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """What is answered: ``body`` as JSON, or ``raw`` bytes as they are."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    announced: int | None = None
    """Content-Length, where it is not that of what is sent."""


@dataclass
class Server:
    """``requests``: what came, in order: (body, headers, time)."""

    url: str
    answer: Callable[[dict[str, Any], int], Reply]
    requests: list[tuple[Any, dict[str, str], float]] = field(default_factory=list)
    most_at_once: int = 0
    _at_once: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def handle(self, body: Any, headers: dict[str, str]) -> Reply:
        with self._lock:
            self.requests.append((body, headers, time.monotonic()))
            number = len(self.requests)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return self.answer(body, number)
        finally:
            with self._lock:
                self._at_once -= 1


@contextmanager
def serving(answer: Callable[[Any, int], Reply]) -> Iterator[Server]:
    """A server that answers the n-th request (from 1) with ``answer(body, n)``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = server.handle({"path": self.path, **body}, {k.lower(): v for k, v in self.headers.items()})
            content = reply.raw if reply.raw is not None else json.dumps(reply.body).encode()
            try:
                self.send_response(reply.status)
                self.send_header("Content-Length", str(reply.announced or len(content)))
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)
                if reply.announced:
                    self.close_connection = True
            except OSError:
                self.close_connection = True  # The client did not wait.

        def log_message(self, *args: Any) -> None:
            pass

    class Quick(ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

    with Quick(("127.0.0.1", 0), Handler) as http:
        server = Server(f"http://127.0.0.1:{http.server_address[1]}", answer)
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield server
        http.shutdown()
        thread.join()
