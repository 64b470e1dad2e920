"""A headless Chromium, driven over its debugging pipe: opens pages, presses keys, and tells what went wrong in them."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

BINARY = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
_PATIENCE_S = 120.0


class Chromium:
    """One browser; a context manager.

    Args:
        profile: an empty folder for its files.
    """

    def __init__(self, profile: Path) -> None:
        assert BINARY is not None
        command_in, self._write = os.pipe()
        self._read, command_out = os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4.
        shell = f'exec "$0" "$@" 3<&{command_in} 4>&{command_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, BINARY, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(command_in, command_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_in)
        os.close(command_out)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Sends a command of the DevTools protocol and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer."
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium has ended."
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def open(
        self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False, phone: bool = False
    ) -> "Page":
        """A new page at ``url``, when it has drawn itself."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            session,
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.call("Emulation.setEmulatedMedia", session, features=[scheme, motion])
        page = Page(self, session)
        self.call("Page.navigate", session, url=url)
        page.wait("document.documentElement?.dataset.ready === 'true'")
        return page


class Page:
    """A page of `Chromium`."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self.browser = browser
        self.session = session

    def run(self, script: str) -> Any:
        """The value of an expression, awaited where it is a promise."""
        result = self.browser.call(
            "Runtime.evaluate", self.session, expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in result, f"{script}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until the expression is true."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.02)

    def fill(self, selector: str, value: str | int) -> None:
        """Sets a field, as a user does who types or chooses."""
        self.run(
            f"""(() => {{
                const field = document.querySelector({json.dumps(selector)});
                field.value = {json.dumps(value)};
                field.dispatchEvent(new Event(field.tagName === "SELECT" ? "change" : "input"));
            }})()"""
        )

    def click(self, selector: str, text: str = "") -> None:
        """Clicks the first element that has the text in it."""
        self.run(
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            f".find((element) => element.textContent.includes({json.dumps(text)})).click()"
        )

    def texts(self, selector: str) -> list[str]:
        """What all elements say."""
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((element) => element.textContent)")

    def press(self, key: str) -> None:
        """Presses and lets go of a key that is no letter."""
        for kind in ("keyDown", "keyUp"):
            self.browser.call("Input.dispatchKeyEvent", self.session, type=kind, key=key, code=key)

    def mouse(self, kind: str, x: float, y: float, buttons: int = 0) -> None:
        """A mouse event: mouseMoved, mousePressed, mouseReleased."""
        button = "left" if buttons or kind == "mouseReleased" else "none"
        self.browser.call(
            "Input.dispatchMouseEvent", self.session, type=kind, x=x, y=y, button=button, buttons=buttons, clickCount=1
        )

    def screenshot(self, path: Path | None = None, *, whole: bool = False) -> bytes:
        """What is seen, or the whole page, as PNG."""
        data = self.browser.call("Page.captureScreenshot", self.session, format="png", captureBeyondViewport=whole)[
            "data"
        ]
        png = base64.b64decode(data)
        if path is not None:
            path.write_bytes(png)
        return png

    def _mine(self, method: str) -> list[dict[str, Any]]:
        return [
            event["params"]
            for event in self.browser.events
            if event.get("sessionId") == self.session and event.get("method") == method
        ]

    def complaints(self) -> list[str]:
        """Errors and warnings of scripts, of the console and of the browser."""
        errors = [str(event["exceptionDetails"]) for event in self._mine("Runtime.exceptionThrown")]
        errors += [
            str(event["args"])
            for event in self._mine("Runtime.consoleAPICalled")
            if event["type"] in ("error", "warning", "assert")
        ]
        errors += [
            str(event["entry"])
            for event in self._mine("Log.entryAdded")
            if event["entry"]["level"] in ("error", "warning")
        ]
        return errors

    def requests(self) -> list[str]:
        """Addresses that were asked for, but for those inside the page itself."""
        urls = [event["request"]["url"] for event in self._mine("Network.requestWillBeSent")]
        return [url for url in urls if not url.startswith("data:")]
