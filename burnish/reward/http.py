"""A small client of HTTP servers that speak JSON: retries, the server's own waiting times, keys that are never shown."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from burnish.reward.background import run_in_background
from burnish.utils import env
from burnish.utils.errors import ConfigError, RewardError

# Too busy, starting, restarting, or a proxy whose server is; 529 is said where a service is overloaded.
PASSING_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 529})
_LONGEST_BACKOFF_S = 60.0
# A server that asks for more (a daily quota, say) is not waited for.
LONGEST_WAIT_S = 300.0
_SHOWN = 300  # Characters of an answer that are shown in an error.
_LARGEST_ANSWER = 256 * 1024**2  # Bytes.


class RequestError(RewardError):
    """A request without a usable answer.

    Attributes:
        is_passing: asking again may help.
        is_timeout: there was no answer in time.
        retry_after: seconds that the server asks to wait; None where it says nothing.
    """

    def __init__(
        self, message: str, *, is_passing: bool = False, is_timeout: bool = False, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.is_passing = is_passing
        self.is_timeout = is_timeout
        self.retry_after = retry_after


class JsonClient:
    """Posts JSON to one address. It can be pickled, and used from any number of event loops.

    Args:
        url: http:// or https://.
        key: the configuration key that names the address, for messages.
        api_key_env: name of the environment variable that holds a key, sent as ``Authorization: Bearer``.
        timeout: seconds that one attempt may take, until its answer is read.
        max_attempts: how often a request is sent where the server is busy, fails or does not answer.
        retry_delay: seconds before the second attempt; twice as many before each further one, up to a minute. What
            the server asks for (``Retry-After``) is waited where it is longer, up to five minutes.

    Raises:
        ConfigError: this is no address, the variable is not set, or httpx2 is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str,
        api_key_env: str | None = None,
        timeout: float = 60.0,
        max_attempts: int = 3,
        retry_delay: float = 1.0,
    ) -> None:
        _import_httpx(key)
        self.url = _checked(url, key)
        self._shown_url = _without_password(self.url)
        self._api_key_env = api_key_env
        self.timeout, self.max_attempts, self.retry_delay = timeout, max_attempts, retry_delay
        if api_key_env is not None and not env.get(api_key_env):
            section = key.rpartition(".")[0]
            raise ConfigError(
                f"{section}.api_key_env={api_key_env if api_key_env.isidentifier() else '...'}: there is no environment "
                f"variable of that name, or it is empty. The key itself is never written into a configuration: "
                f"export it, and name the variable here."
            )
        self._clients: dict[asyncio.AbstractEventLoop, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_clients": {}}

    async def post(self, body: Mapping[str, Any] | bytes) -> Any:
        """The JSON that ``body``, as it is or as JSON already, is answered with.

        Raises:
            RequestError: none came, the server refuses, or what it sent is no JSON; says which, after how many attempts.
        """
        payload = body if isinstance(body, bytes) else to_json(body)
        for attempt in range(1, self.max_attempts + 1):
            try:
                return await self._attempt(payload)
            except RequestError as error:
                wait = self._wait(attempt, error.retry_after)
                if not error.is_passing or attempt == self.max_attempts or wait is None:
                    raise self._last(error, attempt) from None
                await asyncio.sleep(wait)
        raise AssertionError("there is at least one attempt")

    def post_now(self, body: Mapping[str, Any] | bytes) -> Any:
        """As `post`, for callers that are not asynchronous; it blocks them."""
        return run_in_background(self.post(body))

    async def aclose(self) -> None:
        """Closes the connections of the running event loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    async def _attempt(self, payload: bytes) -> Any:
        httpx = _import_httpx()
        try:
            async with (
                asyncio.timeout(self.timeout),
                self._client().stream("POST", self.url, content=payload) as answer,
            ):
                content = bytearray()
                async for chunk in answer.aiter_bytes():
                    content += chunk
                    if len(content) > _LARGEST_ANSWER:
                        raise RequestError(f"{self._shown_url} answers with more than {_LARGEST_ANSWER >> 20} MB.")
        except (TimeoutError, httpx.TimeoutException):
            raise RequestError(
                f"{self._shown_url} did not answer within {self.timeout:g} s.", is_passing=True, is_timeout=True
            ) from None
        except httpx.HTTPError as error:
            reason = self.hide(str(error)) or type(error).__name__
            raise RequestError(f"{self._shown_url} cannot be talked to: {reason}.", is_passing=True) from None
        if answer.status_code >= 300:
            raise self._refusal(answer.status_code, bytes(content), answer.headers)
        try:
            return json.loads(bytes(content))
        except (ValueError, RecursionError):
            shown = self.hide(content.decode(errors="replace"))[:_SHOWN]
            raise RequestError(f"{self._shown_url} did not answer in JSON but: {shown!r}.", is_passing=True) from None

    def _client(self) -> Any:
        """The connections of the running event loop; those of loops that are gone are forgotten."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            httpx = _import_httpx()
            self._clients = {other: client for other, client in self._clients.items() if not other.is_closed()}
            headers = {"Content-Type": "application/json"}
            if secret := self._secret():
                headers["Authorization"] = f"Bearer {secret}"
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            self._clients[loop] = httpx.AsyncClient(timeout=None, headers=headers, limits=limits)
        return self._clients[loop]

    def _secret(self) -> str:
        return (env.get(self._api_key_env) or "").strip() if self._api_key_env else ""

    def hide(self, text: str) -> str:
        """``text`` without the key, which some servers repeat in their errors."""
        secret = self._secret()
        return text.replace(secret, "***") if secret else text

    def _refusal(self, status: int, content: bytes, headers: Mapping[str, str]) -> RequestError:
        # Hidden before it is cut, which might leave the beginning of the key.
        said = _said(self.hide(content.decode(errors="replace"))).rstrip(".")
        sentence = f"{self._shown_url} answered {status}{f': {said}' if said else ''}."
        is_passing = status in PASSING_STATUSES
        return RequestError(
            sentence, is_passing=is_passing, retry_after=seconds_to_wait(headers) if is_passing else None
        )

    def _wait(self, attempt: int, retry_after: float | None) -> float | None:
        """Seconds before the next attempt; None where the server asks for too many."""
        if retry_after is not None and retry_after > LONGEST_WAIT_S:
            return None
        return max(backoff(self.retry_delay, attempt), (retry_after or 0.0) * random.uniform(1.0, 1.1))

    def _last(self, error: RequestError, attempts: int) -> RequestError:
        message = str(error) if attempts == 1 else f"{error} It was asked {attempts} times."
        return RequestError(
            message, is_passing=error.is_passing, is_timeout=error.is_timeout, retry_after=error.retry_after
        )


def backoff(delay: float, attempt: int) -> float:
    """Seconds after the ``attempt``-th try (from 1): ``delay``, twice as many each time, up to a minute; and up to half as
    much again, so that those who were refused together do not come back together."""
    return min(delay * 2 ** (attempt - 1), _LONGEST_BACKOFF_S) * random.uniform(1.0, 1.5)


def to_json(value: Any) -> bytes:
    """``value`` as strict JSON; numbers and arrays of NumPy as Python's.

    Raises:
        RequestError: something in it is no JSON, as a date, bytes or NaN; says what.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_of_numpy)
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"This cannot be sent as JSON: {error}.") from error


def _of_numpy(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def seconds_to_wait(headers: Mapping[str, str]) -> float | None:
    """What ``Retry-After`` says, as seconds or as a date; None where it says nothing that can be read."""
    said = headers.get("retry-after") or headers.get("Retry-After")
    if not said:
        return None
    try:
        seconds = float(said)
    except ValueError:
        try:
            when = parsedate_to_datetime(said)
        except ValueError:
            return None
        seconds = (
            (when if when.tzinfo else when.replace(tzinfo=UTC)) - datetime.fromtimestamp(time.time(), UTC)
        ).total_seconds()
    return max(0.0, seconds) if seconds < float("inf") else None


def _import_httpx(key: str = "reward.remote.url") -> Any:
    try:
        import httpx2
    except ImportError as error:
        raise ConfigError(
            f"{key}: asking servers for rewards needs httpx2, which is not installed. Install it: "
            f"`pip install 'burnish[reward-http]'`."
        ) from error
    return httpx2


def _checked(url: str, key: str) -> str:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(f"{key}={url} is no address of a server. One is written as http://host:8000/path.")
    return url


def _without_password(url: str) -> str:
    """The address without user, password and query, which may hold secrets."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _said(content: str) -> str:
    """The sentence in the body of an error, as OpenAI's API and FastAPI write it."""
    text = content.strip()
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return text[:_SHOWN]
    for name in ("error", "detail", "message"):
        inner = body.get(name) if isinstance(body, dict) else None
        inner = inner.get("message") if isinstance(inner, dict) else inner
        if isinstance(inner, str):
            return inner[:_SHOWN]
    return text[:_SHOWN]
