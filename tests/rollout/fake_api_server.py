"""An HTTP server that speaks OpenAI's API as a test says: right by default, and wrong in one way or another."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCAB = 50


class FakeApi:
    """``POST /v1/completions`` answers ``prompt[0] + 1, prompt[0] + 2, ...``; every place may be replaced.

    Attributes:
        card: what ``/v1/models`` lists.
        log_prob: of a token, from the request's temperature and whether it is truncated.
        on_request: called with (number, body) before a completion is answered; it may sleep, or return a (status, body).
        change: applied to each choice that is sent.
        cut_after: choices after which an answer breaks off.
    """

    def __init__(self) -> None:
        self.card: dict[str, Any] = {"id": "model", "owned_by": "vllm", "max_model_len": 64}
        self.log_prob: Callable[[dict], float] = lambda body: -1.0
        self.on_request: Callable[[int, dict], tuple[int, Any] | None] = lambda number, body: None
        self.change: Callable[[dict], dict] = lambda choice: choice
        self.cut_after: Callable[[int], int | None] = lambda number: None
        self.routes: dict[str, Callable[[Any], tuple[int, Any]]] = {}
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.paths: list[str] = []
        self.posted: list[Any] = []
        self.broken_off = threading.Event()
        self.lock = threading.Lock()
        self.max_at_once = self._at_once = 0

    @property
    def asked(self) -> list[dict]:
        """The completions that were asked for as responses are."""
        return [body for body in self.bodies if body.get("stream")]

    @contextmanager
    def running(self) -> Iterator[str]:
        """Gives its address."""
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                api.answer(self, None)

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = self.rfile.read(length)
                if len(body) < length:  # The client has given up between its header and this.
                    self.close_connection = True
                    return
                api.answer(self, json.loads(body) if body else None)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()

    def answer(self, http: BaseHTTPRequestHandler, body: Any) -> None:
        with self.lock:
            self.paths.append(http.path)
            self.posted.append(body)
            self.headers.append(dict(http.headers))
        if http.path in self.routes:
            self._send(http, *self.routes[http.path](body))
        elif http.path == "/v1/models":
            self._send(http, 200, {"data": [self.card]})
        elif http.path == "/v1/completions":
            self._complete(http, body)
        else:
            self._send(http, 404, {"detail": "Not Found"})

    def _complete(self, http: BaseHTTPRequestHandler, body: dict) -> None:
        with self.lock:
            self.bodies.append(body)
            number = len(self.asked)
            self._at_once += 1
            self.max_at_once = max(self.max_at_once, self._at_once)
        try:
            instead = self.on_request(number, body)
        finally:
            # Before the first byte of an answer: a client may ask again as soon as it has the last one.
            with self.lock:
                self._at_once -= 1
        if instead is not None:
            self._send(http, *instead)
        elif body.get("stream"):
            self._stream(http, body, number)
        else:
            (choice,) = self._choices(body)
            self._send(http, 200, {"choices": [choice]})

    def _choices(self, body: dict) -> Iterator[dict]:
        """One for each token, the last with the reason."""
        prompt = body["prompt"]
        first = prompt[0] if isinstance(prompt, list) else 0
        for place in range(body["max_tokens"]):
            token = (first + 1 + place) % VOCAB
            stops = token in body.get("stop_token_ids", ())
            last = stops or place == body["max_tokens"] - 1
            choice = {
                "index": 0,
                "text": "",
                "token_ids": [token],
                "logprobs": {"token_logprobs": [self.log_prob(body)]},
                "finish_reason": ("stop" if stops else "length") if last else None,
                "stop_reason": token if stops else None,
            }
            if place == 0:
                choice["prompt_token_ids"] = prompt if isinstance(prompt, list) else [1, 2, 3]
            yield self.change(choice)
            if last:
                break

    def _stream(self, http: BaseHTTPRequestHandler, body: dict, number: int) -> None:
        http.send_response(200)
        http.send_header("Content-Type", "text/event-stream")
        http.send_header("Transfer-Encoding", "chunked")
        http.end_headers()
        cut = self.cut_after(number)
        try:
            for place, choice in enumerate(self._choices(body)):
                if place == cut:
                    http.close_connection = True
                    http.connection.close()
                    return
                event = choice if "error" in choice else {"choices": [choice]}
                self._chunk(http, f"data: {json.dumps(event)}\n\n")
            self._chunk(http, "data: [DONE]\n\n")
            http.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.broken_off.set()

    def _chunk(self, http: BaseHTTPRequestHandler, text: str) -> None:
        http.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())
        http.wfile.flush()

    def _send(self, http: BaseHTTPRequestHandler, status: int, body: Any) -> None:
        content = b"" if body is None else (body if isinstance(body, bytes) else json.dumps(body).encode())
        try:
            http.send_response(status)
            http.send_header("Content-Type", "application/json")
            http.send_header("Content-Length", str(len(content)))
            http.end_headers()
            http.wfile.write(content)
        except OSError:
            self.broken_off.set()


def waits_until(event: threading.Event) -> Callable[[int, dict], None]:
    """For ``on_request``: responses wait for ``event``, the questions at the start do not."""

    def wait(number: int, body: dict) -> None:
        if body.get("stream"):
            event.wait(20)

    return wait


def slowly(seconds: float) -> Callable[[dict], dict]:
    """For ``change``: that long before each token."""

    def wait(choice: dict) -> dict:
        time.sleep(seconds)
        return choice

    return wait
