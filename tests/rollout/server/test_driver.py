"""The engine's thread: many clients in one batch, a failure that everyone hears of, an end that leaves nothing behind."""

import asyncio
import threading
import time

import httpx2
import pytest

from burnish.rollout.base import RolloutRequest, SamplingParams
from burnish.rollout.server.driver import EngineDriver
from burnish.rollout.server.errors import EngineStopped
from burnish.utils.errors import RolloutError
from tests.rollout.server.fake_engine import FakeEngine
from tests.rollout.server.serving import events_of, ids_of, listening, says, serving

COMPLETIONS = "/v1/completions"
A = ids_of("a")


def request(name: str) -> RolloutRequest:
    return RolloutRequest(name, [1], "0", sampling=SamplingParams(max_new_tokens=5))


async def post(app, count: int, **body) -> list[httpx2.Response]:
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        return await asyncio.gather(*(client.post(COMPLETIONS, json={"prompt": "x", **body}) for _ in range(count)))


def slowly(request: RolloutRequest) -> list[int]:
    """A script of many rounds, each of which takes its time."""
    time.sleep(0.01)
    return A * 199


def wait_until(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def test_requests_of_many_clients_run_in_one_batch():
    with serving(says("hello")) as server:
        server.engine.may_go.clear()
        opener = threading.Timer(0.3, server.engine.may_go.set)
        opener.start()
        responses = asyncio.run(post(server.app, 20, n=2))
        opener.join()
    assert {response.status_code for response in responses} == {200}
    # Some came in before the engine stood still, none waits for another's end.
    assert server.engine.most_at_once >= 38
    assert len({response.json()["id"] for response in responses}) == 20


def test_a_request_that_comes_later_joins_those_that_run():
    entered = threading.Event()

    def script(request):
        entered.set()
        return A * (150 if request.sample_index == 0 and len(request.prompt_ids) == 1 else 1)

    with serving(script) as server, listening(server) as url, httpx2.Client(base_url=url, timeout=30) as client:
        long = threading.Thread(target=lambda: client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 150}))
        long.start()
        assert entered.wait(30)
        short = httpx2.post(url + COMPLETIONS, json={"prompt": "xyz", "max_tokens": 1}, timeout=30)
        long.join()
    assert short.json()["choices"][0]["text"] == "a"


@pytest.mark.parametrize("error", [RolloutError("The logits are not finite."), ValueError("a bug")])
def test_a_failed_engine_answers_open_requests_by_500_and_is_not_healthy(error, caplog):
    with serving(says("hello")) as server:
        server.engine.fail_with = error
        (response,) = asyncio.run(post(server.app, 1))
        assert response.status_code == 500
        assert str(error) in response.json()["error"]["message"]
        assert response.json()["error"]["type"] == "server_error"
        health = server.call("GET", "/health")
        assert health.status_code == 503
        assert str(error) in health.json()["error"]["message"]
        (later,) = asyncio.run(post(server.app, 1))
        assert later.status_code == 503
    assert not server.engine.is_open
    assert "The engine failed" in caplog.text


def test_a_stream_that_the_engine_fails_ends_with_the_error():
    with serving(says("hello")) as server:

        def script(request):
            if server.engine.most_at_once:
                server.engine.fail_with = RolloutError("The logits are not finite.")
            return A * 5

        server.engine.script = script
        (response,) = asyncio.run(post(server.app, 1, stream=True))
    events = response.text.strip().split("\n\n")
    assert "The logits are not finite." in events[-1]
    assert events[-1].startswith('data: {"error":')
    assert "[DONE]" not in response.text


def test_a_session_that_cannot_be_opened_is_the_drivers_own_error():
    class Full(FakeEngine):
        def open_session(self, **callbacks):
            raise RolloutError("The cache does not fit.")

    with pytest.raises(RolloutError, match="The cache does not fit"), EngineDriver(Full(says("a"))):
        pass


def test_leaving_ends_the_thread_and_fails_what_is_open():
    engine = FakeEngine(says("hello"))

    async def run() -> None:
        with EngineDriver(engine) as driver:
            engine.may_go.clear()
            submission = driver.submit([request("a")], streams=False)
            await submission.accepted
            threading.Timer(0.05, engine.may_go.set).start()
        assert isinstance(driver.failure, EngineStopped)
        with pytest.raises(EngineStopped, match="shut down"):
            # It may have come to its end before, but then not to all of it.
            async for _ in submission.progress():
                pass
        with pytest.raises(EngineStopped):
            driver.submit([request("b")], streams=False)

    asyncio.run(run())
    assert not engine.is_open


def test_closing_a_finished_submission_aborts_nothing():
    with serving(says("hello")) as server:
        server.complete(prompt="x")
        server.stream(COMPLETIONS, prompt="x")
        server.complete(prompt="x")
    assert server.engine.aborted == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_has_its_requests_aborted(stream):
    """Through a real connection, that is closed while the engine samples."""
    with serving(slowly) as server, listening(server) as url:
        body = {"prompt": "x", "n": 3, "stream": stream}
        # All rounds take 6 seconds. Who reads a stream goes away by himself, whenever its first line comes.
        timeout = httpx2.Timeout(30) if stream else httpx2.Timeout(30, read=2)
        with (
            httpx2.Client(base_url=url, timeout=timeout) as client,
            client.stream("POST", COMPLETIONS, json=body) if stream else pytest.raises(httpx2.ReadTimeout) as response,
        ):
            if stream:
                next(response.iter_lines())
            else:
                client.post(COMPLETIONS, json=body)
        assert server.engine.ended_by_abort.wait(30)
        wait_until(lambda: len(server.engine.finished) == 3)
        names = {request.request_id for request in server.engine.received}
        assert set(server.engine.aborted) == names
        assert {response.finish_reason for response in server.engine.finished} == {"abort"}
        # The others go on.
        assert (
            httpx2.post(url + COMPLETIONS, json={"prompt": "x", "max_tokens": 2}).json()["choices"][0]["text"] == "aa"
        )


def test_a_client_that_goes_away_before_the_engine_took_its_request_leaves_nothing_running():
    with serving(says("a" * 150, ends=False)) as server, listening(server) as url:
        server.engine.may_go.clear()
        with httpx2.Client(base_url=url, timeout=httpx2.Timeout(30, read=0.2)) as client:
            for stream in (True, False):
                with pytest.raises(httpx2.ReadTimeout):
                    client.post(COMPLETIONS, json={"prompt": "x", "stream": stream})
        # Both are in the engine's hands or in the driver's, as are the words that nobody waits for them.
        wait_until(lambda: not server.driver._submissions)
        server.engine.may_go.set()
        wait_until(lambda: len(server.engine.finished) == len(server.engine.received) == 2)
        assert {response.finish_reason for response in server.engine.finished} == {"abort"}


def test_a_bug_in_an_answer_is_500_for_that_client_alone(monkeypatch):
    with serving(says("a")) as server:
        with monkeypatch.context() as patch:
            patch.setattr("burnish.rollout.server.responses.Answer.whole", lambda self, ends: 1 / 0)
            (response,) = asyncio.run(post(server.app, 1))
            assert response.status_code == 500
            assert response.json()["error"]["type"] == "server_error"
        server.complete(prompt="x")
        assert server.call("GET", "/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_the_server_ends_open_answers_with_what_they_have(stream, caplog):
    answers = []
    with serving(slowly) as server:
        with listening(server) as url:
            body = {"prompt": "x", "stream": stream, "return_token_ids": True}
            client = threading.Thread(
                target=lambda: answers.append(httpx2.post(url + COMPLETIONS, json=body, timeout=30))
            )
            client.start()
            wait_until(lambda: server.engine.most_at_once)
        client.join()
    (response,) = answers
    choices = [e["choices"][0] for e in events_of(response.text)] if stream else response.json()["choices"]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    assert choices[-1]["finish_reason"] == "abort"
    assert tokens == server.engine.finished[0].token_ids == A * len(tokens)
    assert caplog.text == ""


def test_open_answers_may_end_in_the_time_that_the_end_of_the_server_gives_them():
    answers = []
    with serving(slowly) as server:
        with listening(server, grace=30) as url:
            body = {"prompt": "x", "max_tokens": 20}
            client = threading.Thread(
                target=lambda: answers.append(httpx2.post(url + COMPLETIONS, json=body, timeout=30))
            )
            client.start()
            wait_until(lambda: server.engine.most_at_once)
        client.join()
    assert answers[0].json()["choices"][0]["finish_reason"] == "length"
