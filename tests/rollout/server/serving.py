"""The server over a fake engine: in process for most tests, at a real port for those about connections."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from burnish.rollout.base import RolloutRequest
from burnish.rollout.server.app import build_app
from burnish.rollout.server.driver import EngineDriver
from burnish.rollout.server.listen import HttpServer
from burnish.rollout.server.prompts import ServedModel
from tests.render.fake_tokenizers import byte_tokenizer
from tests.rollout.server.fake_engine import FakeEngine

MAX_LENGTH = 200
TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def says(text: str, *, ends: bool = True) -> Callable[[RolloutRequest], Sequence[int]]:
    """A script: the same text in answer to everything, with an end-of-sequence token."""
    tokens = [*ids_of(text), *([EOS] if ends else [])]
    return lambda request: tokens


def served_model(tokenizer=TOKENIZER, name: str = "fake") -> ServedModel:
    return ServedModel(
        name=name, tokenizer=tokenizer, eos_token_ids=(EOS,), max_length=MAX_LENGTH, vocab_size=len(tokenizer)
    )


@dataclass
class Server:
    """What a test talks to."""

    engine: FakeEngine
    driver: EngineDriver
    app: Any

    def call(self, method: str, path: str, **how: Any) -> httpx2.Response:
        """One call, in process."""

        async def run() -> httpx2.Response:
            transport = httpx2.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **how)

        return asyncio.run(asyncio.wait_for(run(), 30))

    def complete(self, **body: Any) -> dict[str, Any]:
        return answer(self.call("POST", "/v1/completions", json=body))

    def chat(self, **body: Any) -> dict[str, Any]:
        return answer(self.call("POST", "/v1/chat/completions", json=body))

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        response = self.call("POST", path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response.text)


def answer(response: httpx2.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return response.json()


def events_of(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream that came to its end."""
    *events, end, nothing = text.split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


@contextmanager
def serving(script, *, tokenizer=TOKENIZER, api_key: str | None = None, **engine: Any) -> Iterator[Server]:
    fake = FakeEngine(script, tokenizer=tokenizer, **engine)
    with EngineDriver(fake) as driver:
        try:
            yield Server(fake, driver, build_app(driver, served_model(tokenizer), api_key=api_key))
        finally:
            fake.may_go.set()


@contextmanager
def listening(server: Server, grace: float = 0.5) -> Iterator[str]:
    """The server at a free port of this machine; gives its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        runner = HttpServer(server.app, server.driver, grace=grace)
        thread = threading.Thread(target=runner.run, args=([listener],))
        thread.start()
        try:
            while not runner.started:
                assert thread.is_alive()
                time.sleep(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            runner.should_exit = True
            thread.join()
