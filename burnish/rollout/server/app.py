"""The endpoints: /health, /v1/models, /v1/completions, /v1/chat/completions."""

import asyncio
import contextlib
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from burnish.rollout.base import RolloutRequest
from burnish.rollout.server.driver import EngineDriver, Progress, Submission
from burnish.rollout.server.errors import ApiError, EngineStopped
from burnish.rollout.server.prompts import ServedModel, engine_requests
from burnish.rollout.server.protocol import ApiRequest, ChatRequest, CompletionRequest, parse_request
from burnish.rollout.server.responses import Answer
from burnish.utils.errors import RolloutError

_MAX_BODY_BYTES = 64 * 2**20
_CLIENT_GONE = 499  # Nobody reads it.

_Result = TypeVar("_Result")


def build_app(driver: EngineDriver, model: ServedModel, *, api_key: str | None = None) -> FastAPI:
    """The server as an ASGI application. The driver must have been entered, and is left by whoever did.

    Args:
        api_key: what clients must send as ``Authorization: Bearer ...``; None: nothing is asked for.
    """
    # The pages that FastAPI makes load scripts from elsewhere, and would be open without the key.
    app = FastAPI(title="burnish", docs_url=None, redoc_url=None, openapi_url=None)
    server = _Server(driver, model)
    api = APIRouter(prefix="/v1", dependencies=[Depends(_key_check(api_key))] if api_key is not None else [])
    api.add_api_route("/models", server.models, methods=["GET"])
    api.add_api_route("/models/{name:path}", server.one_model, methods=["GET"])
    api.add_api_route("/completions", server.completions, methods=["POST"], response_model=None)
    api.add_api_route("/chat/completions", server.chat_completions, methods=["POST"], response_model=None)
    app.add_api_route("/health", server.health, methods=["GET"], response_model=None)
    app.include_router(api)
    app.add_exception_handler(ApiError, _answer_api_error)
    app.add_exception_handler(EngineStopped, _answer_engine_stopped)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_exception_handler(Exception, _answer_unforeseen)
    return app


class _Server:
    def __init__(self, driver: EngineDriver, model: ServedModel) -> None:
        self._driver = driver
        self._model = model
        self._started = int(time.time())
        # A long prompt must not hold up the event loop, nor two threads render with one tokenizer.
        self._renderer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="burnish-render")

    async def health(self) -> Response:
        if self._driver.failure is not None:
            return _error_response(ApiError(str(self._driver.failure), status=503))
        return JSONResponse({"status": "ok"})

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model_card()]}

    async def one_model(self, name: str) -> dict[str, Any]:
        self._check_model(name)
        return self._model_card()

    async def completions(self, http: Request) -> Response:
        return await self._answer(http, parse_request(CompletionRequest, await _read_json(http)))

    async def chat_completions(self, http: Request) -> Response:
        return await self._answer(http, parse_request(ChatRequest, await _read_json(http)))

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "burnish",
            "max_model_len": self._model.max_length,
        }

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model.name:
            raise ApiError(
                f"There is no model {name!r:.200} here; the server has {self._model.name!r}.",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def _answer(self, http: Request, request: CompletionRequest | ChatRequest) -> Response:
        self._check_model(request.model)
        if self._driver.failure is not None:
            raise ApiError(str(self._driver.failure), status=503)
        request_id = f"{'chatcmpl' if isinstance(request, ChatRequest) else 'cmpl'}-{secrets.token_hex(12)}"
        loop = asyncio.get_running_loop()
        requests = await loop.run_in_executor(self._renderer, engine_requests, request, self._model, request_id)
        answer = Answer(request, self._model, request_id, int(time.time()), requests)
        if request.stream:
            submission = await self._submit(http, request, requests)
            return _EventStream(_events(answer, submission), submission)
        return JSONResponse(await _while_connected(http, self._collect(answer, requests)))

    async def _submit(self, http: Request, request: ApiRequest, requests: Sequence[RolloutRequest]) -> Submission:
        """Once the engine has taken it: before that, an error still has a status of its own."""
        submission = self._driver.submit(requests, streams=True)
        try:
            await _while_connected(http, _accepted(submission))
        except BaseException:
            submission.close()
            raise
        return submission

    async def _collect(self, answer: Answer, requests: Sequence[RolloutRequest]) -> dict[str, Any]:
        submission = self._driver.submit(requests, streams=False)
        try:
            await _accepted(submission)
            ends: list[Progress] = [progress async for progress in submission.progress()]
        finally:
            submission.close()
        return answer.whole(ends)


async def _accepted(submission: Submission) -> None:
    try:
        await submission.accepted
    except EngineStopped:
        raise
    except RolloutError as error:
        raise ApiError(str(error)) from error


async def _events(answer: Answer, submission: Submission) -> AsyncIterator[str]:
    """Server-sent events."""
    try:
        async for progress in submission.progress():
            for chunk in answer.chunks(progress):
                yield _event(chunk)
    except EngineStopped as error:
        yield _event(ApiError(str(error), status=500).body())
        return
    options = answer.request.stream_options
    if options is not None and options.include_usage:
        yield _event(answer.usage_chunk())
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"


class _EventStream(StreamingResponse):
    """Ends the submission however the stream ends: sent to its end, broken off by the client, or by the server's end."""

    def __init__(self, events: AsyncIterator[str], submission: Submission) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._submission = submission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._submission.close()


async def _while_connected(http: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of ``work``, which is cancelled when the client goes away.

    Raises:
        ClientDisconnect: it went away.
    """
    working, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(http))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, gone):
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _read_json(http: Request) -> Any:
    """The body, which has to be JSON by its header too: a web page can send other kinds across sites unasked."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            f"The body's Content-Type is {kind or 'missing'!r:.100}; send JSON with the header Content-Type: "
            f"application/json.",
            status=415,
        )
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise ApiError(f"The body is larger than {_MAX_BODY_BYTES // 2**20} MiB.", status=413)
    try:
        content = json.loads(body, parse_constant=_refuse_constant)
        if b"\\u" in body:
            # Half of a surrogate pair is JSON, but no text that could be tokenized.
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(f"The body is not valid JSON: {error}") from error
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _key_check(api_key: str) -> Callable[[Request], Awaitable[None]]:
    expected = api_key.encode()

    async def check(http: Request) -> None:
        scheme, _, given = http.headers.get("authorization", "").partition(" ")
        # In constant time, so that how long it takes tells nothing about the key. Header bytes arrive as Latin-1.
        if not (hmac.compare_digest(given.strip().encode("latin-1"), expected) and scheme.lower() == "bearer"):
            raise ApiError(
                "The API key is missing or wrong: send it as Authorization: Bearer KEY.",
                status=401,
                code="invalid_api_key",
            )

    return check


def _error_response(error: ApiError) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _answer_api_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error)


async def _answer_engine_stopped(http: Request, error: Exception) -> Response:
    return _error_response(ApiError(str(error), status=500))


async def _answer_http_exception(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {
        404: f"There is no {http.url.path} here. There are /v1/completions, /v1/chat/completions, /v1/models and /health.",
        405: f"{http.url.path} does not take {http.method}.",
    }.get(error.status_code, str(error.detail))
    return _error_response(ApiError(message, status=error.status_code))


async def _answer_nobody(http: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)


async def _answer_unforeseen(http: Request, error: Exception) -> Response:
    return _error_response(ApiError("The server failed at this request; its log says why.", status=500))
