"""The server at a socket, until a signal ends it."""

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from burnish.rollout.server.driver import EngineDriver

_BACKLOG = 2048


class HttpServer(uvicorn.Server):
    """Answers until it is told to exit, by a signal where it runs in the main thread; a second signal does not wait.

    Args:
        app, driver: from `build_app`, and what that got.
        when_ready: called once it listens.
        grace: seconds that open answers have to end then; those that have not are aborted, and say so.
    """

    def __init__(
        self, app: FastAPI, driver: EngineDriver, *, when_ready: Callable[[], None] = lambda: None, grace: float = 3.0
    ) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", backlog=_BACKLOG))
        self._driver = driver
        self._when_ready = when_ready
        self._grace = grace

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn: begins to listen."""
        await super().startup(sockets)
        self._when_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn: waits until every connection is closed."""
        timer = asyncio.get_running_loop().call_later(self._grace, self._driver.abort_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
