import asyncio
import pickle
import socket
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import numpy as np
import pytest

from burnish.reward.http import JsonClient, RequestError, seconds_to_wait, to_json
from burnish.utils.errors import ConfigError
from tests.reward.http_server import Reply, serving


def client(url, **settings):
    return JsonClient(url, key="reward.remote.url", **({"retry_delay": 0.01, "timeout": 5.0} | settings))


def in_turn(*replies):
    return lambda body, number: replies[min(number, len(replies)) - 1]


def test_json_goes_there_and_back_also_from_callers_that_are_not_asynchronous():
    with serving(lambda body, number: Reply({"got": body})) as server:
        there = client(server.url + "/score")
        assert there.post_now({"text": "−5 €"}) == {"got": {"path": "/score", "text": "−5 €"}}
        # In another loop, and in another process's copy.
        again = pickle.loads(pickle.dumps(there))
        assert asyncio.run(again.post({"a": 1}))["got"]["a"] == 1
        assert asyncio.run(again.post({"a": 2}))["got"]["a"] == 2


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_a_busy_or_broken_server_is_asked_again(status):
    with serving(in_turn(Reply(status=status), Reply(status=status), Reply({"ok": 1}))) as server:
        assert client(server.url).post_now({}) == {"ok": 1}
        assert len(server.requests) == 3


def test_a_server_that_stays_broken_is_given_up_after_max_attempts():
    with (
        serving(in_turn(Reply({"error": {"message": "no GPU left"}}, 500))) as server,
        pytest.raises(RequestError, match=r"answered 500: no GPU left\. It was asked 2 times\.") as error,
    ):
        client(server.url, max_attempts=2).post_now({})
    assert len(server.requests) == 2
    assert error.value.is_passing


def test_a_refusal_is_not_repeated():
    with (
        serving(in_turn(Reply({"detail": "no such field: rows"}, 422))) as server,
        pytest.raises(RequestError, match="answered 422: no such field: rows") as error,
    ):
        client(server.url).post_now({})
    assert len(server.requests) == 1
    assert not error.value.is_passing


def test_the_server_says_how_long_to_wait():
    with serving(in_turn(Reply(status=429, headers={"Retry-After": "0.4"}), Reply({}))) as server:
        client(server.url).post_now({})
        assert server.requests[1][2] - server.requests[0][2] >= 0.4


def test_who_asks_to_wait_until_tomorrow_is_not_waited_for():
    with (
        serving(in_turn(Reply(status=429, headers={"Retry-After": "86400"}))) as server,
        pytest.raises(RequestError, match="answered 429") as error,
    ):
        client(server.url).post_now({})
    assert len(server.requests) == 1
    assert error.value.retry_after == 86400


def test_retry_after_is_a_number_or_a_date():
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert seconds_to_wait({"retry-after": "2"}) == 2
    assert 25 < seconds_to_wait({"Retry-After": soon}) <= 30
    assert seconds_to_wait({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0
    assert [seconds_to_wait({"retry-after": said}) for said in ("soon", "", "inf", "nan")] == [None] * 4
    assert seconds_to_wait({}) is None


def test_a_slow_server_costs_its_time_limit():
    def slow(body, number):
        time.sleep(1.5)
        return Reply({})

    with serving(slow) as server:
        started = time.monotonic()
        with pytest.raises(RequestError, match=r"did not answer within 0\.2 s") as error:
            client(server.url, timeout=0.2, max_attempts=1).post_now({})
        assert time.monotonic() - started < 1.2
    assert error.value.is_timeout


def test_nobody_there():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with pytest.raises(RequestError, match=rf"127\.0\.0\.1:{port} cannot be talked to: .*It was asked 2 times"):
        client(f"http://127.0.0.1:{port}", max_attempts=2).post_now({})


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(raw=b'{"results": [', announced=500), "cannot be talked to"),
        (Reply(raw=b'{"results": ['), "did not answer in JSON"),
        (Reply(raw=b"<html>busy</html>"), "did not answer in JSON but: '<html>"),
        (Reply(raw=b"\xff\xfe"), "did not answer in JSON"),
        (Reply(raw=b""), "did not answer in JSON but: ''"),
        (Reply(status=302, headers={"Location": "http://elsewhere"}), "answered 302"),
    ],
)
def test_what_is_no_answer_is_said(reply, message):
    with serving(in_turn(reply)) as server, pytest.raises(RequestError, match=message):
        client(server.url, max_attempts=1).post_now({})


def test_a_broken_answer_is_asked_for_again():
    with serving(in_turn(Reply(raw=b'{"a": ', announced=99), Reply({"a": 1}))) as server:
        assert client(server.url).post_now({}) == {"a": 1}


def test_the_key_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-planted-secret\n")
    with serving(in_turn(Reply({"error": "Incorrect API key: sk-planted-secret"}, 401))) as server:
        there = client(server.url, api_key_env="JUDGE_KEY")
        with pytest.raises(RequestError, match=r"answered 401: Incorrect API key: \*\*\*") as error:
            there.post_now({})
    assert server.requests[0][1]["authorization"] == "Bearer sk-planted-secret"
    assert b"sk-planted" not in pickle.dumps(there)
    assert "sk-planted" not in repr(error.value)


@pytest.mark.parametrize(
    "reply", [Reply({"error": "x" * 290 + "sk-planted-secret"}, 401), Reply(raw=b"x" * 290 + b"sk-planted-secret")]
)
def test_no_beginning_of_the_key_is_left_where_an_answer_is_cut(monkeypatch, reply):
    monkeypatch.setenv("JUDGE_KEY", "sk-planted-secret")
    with serving(in_turn(reply)) as server, pytest.raises(RequestError) as error:
        client(server.url, api_key_env="JUDGE_KEY", max_attempts=1).post_now({})
    assert "sk-pl" not in str(error.value)


def test_a_key_must_be_in_the_environment(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"reward\.remote\.api_key_env=NO_SUCH_KEY: there is no environment variable"):
        client("http://h", api_key_env="NO_SUCH_KEY")
    # Who writes the key itself there does not find it in the error.
    with pytest.raises(ConfigError) as error:
        client("http://h", api_key_env="sk-planted-secret")
    assert "planted" not in str(error.value)


def test_a_password_in_the_address_is_not_shown():
    with serving(in_turn(Reply(status=404))) as server:
        url = server.url.replace("http://", "http://user:hidden@") + "/x?token=hidden"
        with pytest.raises(RequestError) as error:
            client(url).post_now({})
    assert "hidden" not in str(error.value)
    assert "/x answered 404" in str(error.value)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h/x", "http://", "http://h:port/", "", "http://[::1"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match=r"reward\.remote\.url=.* is no address of a server"):
        client(url)


def test_only_json_is_sent():
    assert to_json({"a": np.float64(0.5), "b": np.array([1, 2])}) == b'{"a":0.5,"b":[1,2]}'
    for value in (float("nan"), datetime.now(UTC), b"x", "\ud800"):
        with pytest.raises(RequestError, match="cannot be sent as JSON"):
            to_json({"value": value})
