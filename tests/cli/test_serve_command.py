"""``burnish serve``: from the command to answers over HTTP, and mistakes as sentences."""

import importlib.util
import logging
import os
import re
import signal
import socket
import subprocess
import sys

import httpx2
import pytest

from burnish.cli import serve
from burnish.cli.serve import ServeOptions, run_serve
from burnish.utils.errors import ConfigError, ModelError, ResourceError
from tests.cli.test_command_line import PROBE
from tests.conftest import REPO


def options(**changes) -> ServeOptions:
    defaults = {
        "model": "nowhere",
        "host": "127.0.0.1",
        "port": 0,
        "api_key": None,
        "served_model_name": None,
        "device": "cpu",
        "dtype": "auto",
        "max_num_seqs": None,
        "max_model_len": None,
        "gpu_memory_utilization": None,
        "chat_template": None,
        "trust_remote_code": False,
    }
    return ServeOptions(**{**defaults, **changes})


@pytest.fixture
def served(monkeypatch):
    """What would be served, instead of serving it."""
    calls = []
    monkeypatch.setattr(serve, "_serve", lambda *args: calls.append(args))
    monkeypatch.delenv("BURNISH_API_KEY", raising=False)
    return calls


@pytest.mark.parametrize("argv", [["serve", "--help"], ["--help"]])
def test_help_loads_neither_torch_nor_the_web_framework(argv):
    heavy = '("torch", "transformers", "ray", "fastapi", "starlette", "uvicorn")'
    code = PROBE.format(argv=["burnish", *argv], module="burnish").replace('("torch", "transformers", "ray")', heavy)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, timeout=60)
    assert "STATUS 0 HEAVY []" in done.stdout, done.stderr
    assert "serve" in done.stdout


def test_without_the_extra_the_command_says_what_to_install(monkeypatch, served):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    with pytest.raises(ConfigError, match=r"uvicorn, which is not installed: pip install 'burnish\[serve\]'"):
        run_serve(options())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float16"}, "--dtype=float16"),
        ({"max_num_seqs": 0}, "--max-num-seqs=0"),
        ({"max_model_len": 1}, "--max-model-len=1"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization=1.5"),
        ({"api_key": ""}, "empty"),
    ],
)
def test_an_option_that_cannot_be_is_named(served, changes, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        run_serve(options(**changes))
    assert served == []


def test_a_taken_port_is_said_before_anything_is_loaded(served):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ResourceError, match="in use"):
            run_serve(options(port=other.getsockname()[1]))
    assert served == []


@pytest.mark.parametrize(
    ("host", "key", "warned"), [("0.0.0.0", None, True), ("0.0.0.0", "k", False), ("127.0.0.1", None, False)]
)
def test_an_open_address_without_a_key_is_warned_of(served, caplog, host, key, warned):
    with caplog.at_level(logging.WARNING):
        run_serve(options(host=host, api_key=key))
    assert ("no API key" in caplog.text) == warned


def test_the_key_may_come_from_the_environment_and_the_option_goes_before(served, monkeypatch):
    monkeypatch.setenv("BURNISH_API_KEY", "from-the-environment")
    run_serve(options())
    run_serve(options(api_key="given"))
    assert [call[1] for call in served] == ["from-the-environment", "given"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "/no/such/model"}, "There is no model folder /no/such/model"),
        ({"device": "gpu"}, "--device=gpu"),
        ({"device": "meta"}, "--device=meta"),
        ({"max_model_len": 5000}, "512 positions"),
    ],
)
def test_a_model_that_cannot_be_served_is_a_sentence(tiny_model_path, changes, words):
    with pytest.raises((ConfigError, ModelError), match=re.escape(words)):
        run_serve(options(**{"model": tiny_model_path, **changes}))


def test_an_engine_that_does_not_fit_names_the_options(tiny_model_path):
    with pytest.raises(ResourceError, match="--gpu-memory-utilization"):
        run_serve(options(model=tiny_model_path, gpu_memory_utilization=1e-6))


def test_the_command_serves_the_model_until_it_is_stopped():
    command = [sys.executable, "-m", "burnish", "serve", "examples/tiny_model/model", "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "BURNISH_API_KEY": "k", "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, cwd=REPO, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in server.stderr if line.startswith("Serving"))
        url = re.search(r"http://127\.0\.0\.1:\d+/v1", line)[0]
        body = {"model": "examples/tiny_model/model", "messages": [{"role": "user", "content": "3+4="}]}
        headers = {"Authorization": "Bearer k"}
        with httpx2.Client(base_url=url, timeout=60) as client:
            assert client.post("/chat/completions", json=body).status_code == 401
            answer = client.post("/chat/completions", json={**body, "temperature": 0}, headers=headers).json()
            stream = client.post("/chat/completions", json={**body, "stream": True}, headers=headers).text
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert stream.endswith("data: [DONE]\n\n")
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 130
        assert "The server has ended." in server.stderr.read()
    finally:
        if server.poll() is None:
            server.kill()
        server.wait()
        server.stderr.close()
