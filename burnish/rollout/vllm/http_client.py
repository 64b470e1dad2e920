"""A client of an HTTP server that speaks JSON: plain answers, and answers that come in pieces and can be broken off."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from burnish.utils.errors import ConfigError, RolloutError

# Too busy, starting, restarting, or a proxy whose server is.
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_CONNECT_S = 30.0
_SHOWN = 400  # Characters of an answer that are shown in an error.


class Interrupted(RolloutError):
    """There was no whole answer: no connection, a broken one, a server that is too busy. Asking again may help.

    Attributes:
        is_hopeless: asking again will not: there is no such host.
    """

    def __init__(self, message: str, *, is_hopeless: bool = False) -> None:
        super().__init__(message)
        self.is_hopeless = is_hopeless


class Refused(RolloutError):
    """The server answered that it will not do this."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Call:
    """One exchange while it goes on; ``end`` may be called from another thread."""

    is_ended: bool = False
    connection: socket.socket | None = None

    def end(self) -> None:
        """Breaks the exchange off: whoever reads its answer gets `Interrupted`."""
        self.is_ended = True
        if (open_socket := self.connection) is not None:
            with suppress(OSError):  # It is over already.
                open_socket.shutdown(socket.SHUT_RDWR)


class Client:
    """One server. Every call has a connection of its own, so calls may come from any number of threads.

    Args:
        url: ``http://host:port``, perhaps with a path; ``/v1`` at its end is that of the API and left out.
        api_key: sent as ``Authorization: Bearer ...``.
        key: the configuration key that names the address, for messages.

    Raises:
        ConfigError: this is no address.
    """

    def __init__(self, url: str, api_key: str | None = None, key: str = "rollout.server.url") -> None:
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(f"{key}={url}: {error}. An address is written as http://host:8000.") from error
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"{key}={url} is no address of a server. One is written as http://host:8000.")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._host, self._port = host, port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = {"Connection": "close"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})

    def get(self, path: str, timeout: float) -> Any:
        """The JSON at ``path``; None where the answer is empty.

        Raises:
            Interrupted, Refused: there is none.
        """
        return self._whole("GET", path, None, timeout)

    def post(self, path: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
        """What is answered to ``body``; None where the answer is empty.

        Raises:
            Interrupted, Refused: there is none.
        """
        return self._whole("POST", path, body, timeout)

    def stream(self, path: str, body: Mapping[str, Any], call: Call, timeout: float) -> Iterator[Any]:
        """The events (server-sent, JSON) that ``body`` is answered with, up to ``[DONE]``.

        Args:
            call: what ends it from another thread.
            timeout: seconds for all of it.

        Raises:
            Interrupted: it did not come to its end, or the call was ended.
            Refused: the server will not answer this.
        """
        deadline = time.monotonic() + timeout
        with self._answer("POST", path, body, call, timeout) as answer:
            while line := answer.readline():
                data = line.strip().removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data:
                    if data == b"[DONE]":
                        return
                    yield self._parsed(data, path)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                if call.connection is not None:
                    call.connection.settimeout(left)
        raise Interrupted(f"{self.url} broke its answer to {path} off.")

    def _whole(self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float) -> Any:
        with self._answer(method, path, body, Call(), timeout) as answer:
            content = answer.read()
        return self._parsed(content, path) if content.strip() else None

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, call: Call, timeout: float
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer, its head read. What goes wrong on the way is raised, in sentences, from the block too."""
        connection = self._connection(min(timeout, _CONNECT_S))
        headers = self._headers | ({} if body is None else {"Content-Type": "application/json"})
        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        try:
            connection.connect()
            connection.sock.settimeout(timeout)
            call.connection = connection.sock  # The connection itself forgets it when the answer says that it closes.
            if call.is_ended:
                raise Interrupted("The call was ended before it began.")
            connection.request(method, self._path + path, body=content, headers=headers)
            answer = connection.getresponse()
            if answer.status >= 300:
                raise self._refusal(answer.status, answer.read(), path)
            yield answer
        except (OSError, http.client.HTTPException) as error:
            hopeless = isinstance(error, socket.gaierror | ssl.SSLError)
            # The sentence tells it all; of an error that burnish did not foresee the command line shows the traceback.
            raise Interrupted(self._weather(error, path, timeout), is_hopeless=hopeless) from None
        finally:
            call.connection = None
            connection.close()

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout)

    def _parsed(self, content: bytes, path: str) -> Any:
        try:
            return json.loads(content)
        except ValueError as error:
            shown = content[:_SHOWN].decode(errors="replace")
            raise Refused(f"{self.url}{path} did not answer in JSON but: {shown!r}.", 200) from error

    def _refusal(self, status: int, content: bytes, path: str) -> RolloutError:
        sentence = f"{self.url}{path} answered {status} {http.client.responses.get(status, '')}".rstrip()
        said = _said(content)
        sentence += f": {said}" if said else "."
        return Interrupted(sentence) if status in _PASSING else Refused(sentence, status)

    def _weather(self, error: Exception, path: str, timeout: float) -> str:
        if isinstance(error, TimeoutError):
            return f"{self.url}{path} sent nothing for {timeout:g} s."
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return f"{self.url} cannot be talked to: {reason}."


def _said(content: bytes) -> str:
    """The sentence in the body of an error, as OpenAI's API and FastAPI write it."""
    text = content.decode(errors="replace").strip()
    try:
        body = json.loads(text)
    except ValueError:
        return text[:_SHOWN]
    for name in ("error", "detail", "message"):
        inner = body.get(name) if isinstance(body, dict) else None
        if isinstance(inner, dict) and isinstance(inner.get("message"), str):
            return str(inner["message"])[:_SHOWN]
        if isinstance(inner, str):
            return inner[:_SHOWN]
    return text[:_SHOWN]


def asked_again(ask: Callable[[], Any], attempts: int, delay: float, may_go_on: Callable[[float], bool]) -> Any:
    """What ``ask`` returns, asked up to ``attempts`` times where it is `Interrupted`.

    Args:
        delay: seconds between two attempts.
        may_go_on: waits that long; False: nobody wants the answer any more.

    Raises:
        Interrupted: the last time too; or nobody wants it.
    """
    for attempt in range(1, attempts + 1):
        try:
            return ask()
        except Interrupted as error:
            if error.is_hopeless or attempt == attempts or not may_go_on(delay):
                raise
    raise AssertionError("there is at least one attempt")
