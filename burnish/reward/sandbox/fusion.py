"""Runs programs on a SandboxFusion server (https://github.com/bytedance/SandboxFusion, POST /run_code)."""

import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import random
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from burnish.reward.sandbox.limits import Kind, SandboxResult, SandboxSettings
from burnish.utils.errors import RewardError

_ATTEMPTS = 4
_FIRST_WAIT = 0.5
# Beyond the program's own limit: the way there and back, and the wait for a place.
_ANSWER_SECONDS = 30.0
_AGAIN = (408, 429, 500, 502, 503, 504)
_COMPILE_SECONDS = 10.0


def run(code: str, *, stdin: str = "", settings: SandboxSettings, language: str = "python") -> SandboxResult:
    """Runs a program there. What the server does not get done is tried again, then an error: never a score.

    Raises:
        RewardError: the server cannot be reached, fails, or answers something else than is documented.
    """
    assert settings.fusion_url is not None
    body = {
        "code": code,
        "language": language,
        "stdin": stdin,
        "compile_timeout": _COMPILE_SECONDS,
        "run_timeout": settings.timeout,
        "memory_limit_MB": settings.fusion_memory_limit_mb,
        "files": {},
        "fetch_files": [],
    }
    url = _run_code_url(settings.fusion_url)
    with _place(url, settings.fusion_concurrency):
        answer = _post(url, body, timeout=settings.timeout + _COMPILE_SECONDS + _ANSWER_SECONDS)
    return _read(answer, url, settings)


def _run_code_url(url: str) -> str:
    url = url.rstrip("/")
    return url if url.endswith("/run_code") else f"{url}/run_code"


def _post(url: str, body: dict[str, Any], timeout: float) -> Any:
    content = json.dumps(body).encode()
    problem = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_FIRST_WAIT * 2 ** (attempt - 1) * random.uniform(0.75, 1.25))
        request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                answer = json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                problem = f"status {error.code}: {error.read(300).decode(errors='replace')}"
            if error.code not in _AGAIN:
                break
            continue
        except (OSError, http.client.HTTPException, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
            continue
        # The server's own failure, not the program's.
        if isinstance(answer, dict) and answer.get("status") == "SandboxError":
            problem = f"SandboxError: {answer.get('message')}"
            continue
        return answer
    raise RewardError(f"reward.sandbox_fusion.url={url}: the sandbox gave no result, {problem}.")


def _read(answer: Any, url: str, settings: SandboxSettings) -> SandboxResult:
    if not isinstance(answer, dict) or answer.get("status") not in ("Success", "Failed"):
        raise _strange(answer, url)
    ran = answer.get("run_result") or answer.get("compile_result")
    if not isinstance(ran, dict) or "status" not in ran:
        raise _strange(answer, url)
    stdout, stderr = (str(ran.get(name) or "") for name in ("stdout", "stderr"))
    exit_code = ran.get("return_code")
    kind: Kind = "ok" if ran["status"] == "Finished" and exit_code == 0 else "error"
    if ran["status"] == "TimeLimitExceeded":
        kind = "timeout"
    elif stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        kind = "memory"
    elif max(len(stdout), len(stderr)) > settings.output_limit_kb * 1024:
        kind = "output"
    limit = settings.output_limit_kb * 1024
    return SandboxResult(
        stdout=stdout[:limit],
        stderr=stderr[:limit],
        exit_code=exit_code if kind in ("ok", "error") else None,
        kind=kind,
        seconds=float(ran.get("execution_time") or 0.0),
    )


def _strange(answer: Any, url: str) -> RewardError:
    return RewardError(
        f"reward.sandbox_fusion.url={url}: the answer is not one of a SandboxFusion server, which has status and "
        f"run_result: {json.dumps(answer)[:300]}"
    )


@contextlib.contextmanager
def _place(url: str, num_places: int) -> Iterator[None]:
    """One of ``num_places`` requests that all processes of this machine may have under way. A place is a locked file:
    the kernel gives it back when its process ends, however it ends."""
    name = hashlib.sha256(url.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"burnish-fusion-{os.getuid()}-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    order = random.sample(range(num_places), num_places)
    while True:
        for number in order:
            descriptor = os.open(folder / str(number), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            try:
                yield
            finally:
                os.close(descriptor)
            return
        time.sleep(0.02)
