"""The client of SandboxFusion against a real server."""

import json
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from burnish.reward import sandbox
from burnish.reward.functions.code import compute_score
from burnish.reward.sandbox import SandboxSettings, fusion
from burnish.utils.errors import RewardError
from tests.reward.http_server import Reply, serving


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "_FIRST_WAIT", 0.01)


def finished(stdout: str = "", code: int = 0, status: str = "Finished", stderr: str = "") -> Reply:
    ran = {"status": status, "execution_time": 0.5, "return_code": code, "stdout": stdout, "stderr": stderr}
    overall = "Success" if code == 0 and status == "Finished" else "Failed"
    return Reply(body={"status": overall, "message": "", "compile_result": None, "run_result": ran, "files": {}})


def really_run(body: dict[str, Any], _: int) -> Reply:
    """What a server does, without its walls: for programs of these tests only."""
    done = subprocess.run([sys.executable, "-c", body["code"]], input=body["stdin"], capture_output=True, text=True)
    return finished(done.stdout, done.returncode, stderr=done.stderr)


def settings(url: str, **limits: Any) -> SandboxSettings:
    return SandboxSettings(fusion_url=url, **limits)


def test_a_program_is_sent_as_the_server_documents() -> None:
    with serving(lambda body, _: finished("hi\n")) as server:
        result = sandbox.run(
            "print('hi')", stdin="x", settings=settings(server.url, timeout=3.0, fusion_memory_limit_mb=99)
        )
    assert (result.stdout, result.exit_code, result.kind, result.seconds) == ("hi\n", 0, "ok", 0.5)
    body = server.requests[0][0]
    assert body["path"] == "/run_code"
    assert (body["code"], body["language"], body["stdin"]) == ("print('hi')", "python", "x")
    assert (body["run_timeout"], body["memory_limit_MB"]) == (3.0, 99)


def test_what_the_server_says_of_the_program_is_its_kind() -> None:
    replies = {
        "timeout": finished(status="TimeLimitExceeded"),
        "error": finished(code=1, stderr="ValueError"),
        "memory": finished(code=1, stderr="Traceback\nMemoryError\n"),
        "output": finished("x" * 3000),
    }
    for kind, reply in replies.items():
        with serving(lambda body, _, reply=reply: reply) as server:
            result = sandbox.run("", settings=settings(server.url + "/run_code", output_limit_kb=1))
        assert result.kind == kind
        assert len(result.stdout) <= 1024


def test_a_server_that_recovers_is_asked_again() -> None:
    failing = [Reply(status=503), Reply(body={"status": "SandboxError", "message": "full"}), Reply(raw=b"{")]
    with serving(lambda body, number: failing[number - 1] if number <= 3 else finished("ok")) as server:
        assert sandbox.run("", settings=settings(server.url)).stdout == "ok"
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(status=500), "status 500"),
        (Reply(status=404), "status 404"),
        (Reply(body={"status": "SandboxError", "message": "full"}), "full"),
        (Reply(body=["?"]), "not one of a SandboxFusion server"),
        (Reply(body={"status": "Success"}), "not one of a SandboxFusion server"),
    ],
)
def test_a_server_that_fails_is_an_error_and_never_a_score(reply: Reply, words: str) -> None:
    with serving(lambda body, _: reply) as server, pytest.raises(RewardError, match=words) as caught:
        compute_score("```python\n1\n```", ["assert True"], sandbox=settings(server.url))
    assert "reward.sandbox_fusion.url" in str(caught.value)


def test_nobody_listens() -> None:
    with pytest.raises(RewardError, match="gave no result"):
        sandbox.run("", settings=settings("http://127.0.0.1:9"))


def test_tests_of_code_are_run_there() -> None:
    truth = {"inputs": [[1], [2]], "outputs": [2, 5], "fn_name": "f"}
    with serving(really_run) as server:
        result = compute_score("```python\ndef f(x): return 2 * x\n```", truth, sandbox=settings(server.url))
    assert (result["score"], result["num_tests"]) == (0.5, 2)
    assert json.loads(server.requests[0][0]["stdin"])["code"].startswith("def f")
    assert len(server.requests) == 1


def test_no_more_requests_than_allowed_are_under_way() -> None:
    def answer(body: Any, _: int) -> Reply:
        time.sleep(0.1)
        return finished()

    with serving(answer) as server:
        chosen = settings(server.url, fusion_concurrency=2)
        threads = [threading.Thread(target=sandbox.run, args=("",), kwargs={"settings": chosen}) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(server.requests) == 6
    assert server.most_at_once == 2
