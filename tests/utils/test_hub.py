"""The hub: asked once, in seconds, and where it does not answer the cache or a sentence."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from burnish.utils import hub
from burnish.utils.errors import ModelError

NAME = "org/model"
REPO = Path(__file__).resolve().parents[2]


def put_into_cache(cache: Path, name: str, files: dict[str, str]) -> Path:
    """A copy as the hub's library keeps it."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    for file, text in files.items():
        (snapshot / file).write_text(text)
    return snapshot


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of a process that may ask the hub and has not done so yet."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "_state", hub._State())
    return tmp_path / "cache"


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """What the hub was asked for; it cannot be reached."""
    urls: list[str] = []

    def refuse(url, timeout):
        urls.append(url)
        raise OSError("[Errno -2] Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)
    return urls


def test_without_hub_and_copy_the_error_names_the_ways_out_and_the_hub_is_asked_once(
    cache, asked, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in (NAME, NAME, "org/other"):
        with pytest.raises(ModelError) as caught:
            hub.check_model(name)
        for part in (
            f"{name}: the hub (https://huggingface.co) cannot be reached ([Errno -2] Name or service not known)",
            f"{cache}) has no copy of it",
            f"no folder of that name in {tmp_path}",
            "Name a folder with a model",
            f"hf download {name}",
            "HF_HUB_OFFLINE=1",
            "burnish model smollm2 DIR",
        ):
            assert part in str(caught.value)
    assert len(asked) == 1
    assert not constants.HF_HUB_OFFLINE


def test_a_copy_is_taken_without_asking_again_until_the_block_ends(cache, asked, caplog):
    put_into_cache(cache, NAME, {"config.json": "{}", "model.safetensors": ""})
    with hub.asking_again():
        hub.check_model(NAME)
        assert "the copy in the cache is used" in caplog.text
        assert (constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"]) == (True, "1")
        hub.check_model(NAME)
        assert len(asked) == 1
    assert (constants.HF_HUB_OFFLINE, os.environ.get("HF_HUB_OFFLINE")) == (False, None)
    hub.check_model(NAME)
    assert len(asked) == 2


def test_a_hub_that_still_does_not_answer_is_not_asked_by_the_libraries_either(cache, asked):
    put_into_cache(cache, NAME, {"config.json": "{}", "model.safetensors": ""})
    with hub.asking_again():
        hub.check_model(NAME)
        # The answer is too old by now, and a data set makes that be seen.
        hub._state.asked_at -= 1000
        with hub.offline_where_out_of_reach("org/rows", "dataset"):
            assert constants.HF_HUB_OFFLINE
        assert len(asked) == 2
        assert (constants.HF_HUB_OFFLINE, os.environ.get("HF_HUB_OFFLINE")) == (True, "1")


def test_who_runs_again_with_a_mended_network_is_not_told_of_the_old_one(cache, asked, monkeypatch):
    with hub.asking_again(), pytest.raises(ModelError, match="cannot be reached"):
        hub.check_model(NAME)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, timeout: None)
    with hub.asking_again():
        hub.check_model(NAME)


@pytest.mark.parametrize(
    ("files", "has_weights"),
    [
        ({}, False),
        ({"model.safetensors": ""}, True),
        ({"pytorch_model.bin": ""}, True),
        (
            {"model.safetensors.index.json": json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})},
            False,
        ),
        (
            {"model.safetensors.index.json": json.dumps({"weight_map": {"a": "1.safetensors"}}), "1.safetensors": ""},
            True,
        ),
    ],
)
def test_a_copy_without_all_of_its_weights_is_none_where_they_are_needed(cache, asked, files, has_weights):
    put_into_cache(cache, NAME, {"config.json": "{}", **files})
    with hub.asking_again():
        hub.check_model(NAME, weights=False)
        if has_weights:
            hub.check_model(NAME)
        else:
            with pytest.raises(ModelError, match="has a copy of it without its weights"):
                hub.check_model(NAME)


def test_a_user_who_says_offline_is_not_asked_for_the_network(cache, asked, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"org/model: the hub is not asked \(HF_HUB_OFFLINE or .*has no copy of it"):
        hub.check_model(NAME)
    put_into_cache(cache, NAME, {"config.json": "{}", "model.safetensors": ""})
    with hub.asking_again():
        hub.check_model(NAME)
    assert asked == []
    assert constants.HF_HUB_OFFLINE is True


@pytest.mark.parametrize("path", ["/no/where", "./model", "~/model", "a/b/c", "s3://bucket/model"])
def test_paths_are_left_to_who_opens_them(cache, asked, path):
    hub.check_model(path)
    assert asked == []


@pytest.mark.parametrize("name", ["org/no name", "org/" + "x" * 5000, "-org/model", "org/a..b"])
def test_what_is_no_name_at_all_says_nothing_of_the_hub(cache, asked, name):
    hub.check_model(name)
    assert asked == []
    with pytest.raises(ModelError, match="cannot be reached"):
        hub.check_model(NAME)


def test_a_folder_goes_before_the_hub(cache, asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    hub.check_model(NAME)
    assert asked == []


@pytest.fixture
def served():
    """A hub that answers as its attribute ``status`` says (None: not at all; 0: it breaks the connection off; of a list the
    first and then the next, the last one ever after), with the headers ``headers``, and counts the requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            server = self.server
            server.requests.append(self.path)
            status = server.status
            if isinstance(status, list):
                status = status.pop(0) if len(status) > 1 else status[0]
            if status is None:
                server.over.wait(60)
                return
            if status == 0:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self.send_response(status)
            for name, value in {"Content-Length": "0", **server.headers}.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.status, server.headers, server.over = [], None, {}, threading.Event()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()


def run(code: str, tmp_path: Path, server, **environment: str) -> str:
    """What a program prints whose hub is ``server``."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_OFFLINE"))},
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(REPO),
        # Not by way of a proxy, whatever this machine goes through otherwise.
        "no_proxy": "127.0.0.1",
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


CHECKS = """
from burnish.utils import hub
hub._SECONDS_TO_ASK_AGAIN, hub._SECONDS_OF_TROUBLE = 0.01, 0.1
from burnish.utils.errors import ModelError
for name in ("org/model", "org/other"):
    try:
        hub.check_model(name)
        print("left to the library")
    except ModelError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (None, "no answer within 3 s, which HF_HUB_ETAG_TIMEOUT sets"),
        (503, "it answers with status 503"),
        (404, None),
        (401, None),
        (429, None),
    ],
)
def test_silence_and_a_broken_server_are_told_and_a_refusal_is_left_to_the_library(served, tmp_path, status, said):
    served.status = status
    # A busy machine may take a while to answer; where it is not to answer, its silence is waited for.
    printed = run(CHECKS, tmp_path, served, HF_HUB_ETAG_TIMEOUT="3" if status is None else "120")
    if said is None:
        assert printed.count("left to the library") == 2
    else:
        assert printed.count(f"cannot be reached ({said})") == 2
    is_busy = status in (503, 429)
    assert (len(served.requests) > 1) == is_busy
    again = f"The hub is busy (it answers with status {status}) and is asked again for up to 0.1 s."
    assert printed.count(again) == printed.count("asked again") == is_busy


PATIENT = CHECKS.replace("0.01, 0.1", "0.01, 100.0")


@pytest.mark.parametrize("passing", [503, 500, 429, 0])
@pytest.mark.parametrize("then", [200, 404, 401])
def test_a_hub_that_is_busy_for_a_moment_is_asked_again(served, tmp_path, passing, then):
    served.status = [passing, passing, then]
    printed = run(PATIENT, tmp_path, served, HF_HUB_ETAG_TIMEOUT="120")
    assert printed.count("left to the library") == 2
    assert printed.count("The hub is busy") == 1
    assert len(served.requests) == 3


def test_the_hub_is_asked_again_as_late_as_it_wants_and_not_where_that_is_too_late(served, tmp_path):
    served.status, served.headers = [429, 503, 200], {"Retry-After": "1"}
    started = time.monotonic()
    assert "left to the library" in run(PATIENT, tmp_path, served, HF_HUB_ETAG_TIMEOUT="120")
    assert time.monotonic() - started >= 2
    assert len(served.requests) == 3
    served.requests.clear()
    served.status, served.headers = 503, {"Retry-After": "3600"}
    assert "(it answers with status 503)" in run(PATIENT, tmp_path, served, HF_HUB_ETAG_TIMEOUT="120")
    assert len(served.requests) == 1


def test_a_hub_that_is_not_there_is_asked_once(asked, cache):
    started = time.monotonic()
    with pytest.raises(ModelError):
        hub.check_model(NAME)
    assert len(asked) == 1
    assert time.monotonic() - started < hub._SECONDS_TO_ASK_AGAIN


LOADS = """
from burnish.model.load import load_config
from burnish.render import load_tokenizer
from burnish.utils import hub
hub._SECONDS_OF_TROUBLE = 0
ASK
print(len(load_tokenizer("org/model")), load_config("org/model").model_type)
"""


@pytest.mark.parametrize(
    "first",
    [
        'hub.check_model("org/model", weights=False)',
        pytest.param('load_config("org/model")', marks=pytest.mark.slow),
    ],
)
def test_a_copy_loads_with_one_request_to_a_hub_that_is_down(served, tmp_path, first):
    """Workers of other machines than the driver's load without having asked before."""
    served.status = 503
    model = REPO / "examples" / "tiny_model" / "model"
    texts = {file.name: file.read_text() for file in model.iterdir() if file.suffix in (".json", ".jinja")}
    put_into_cache(tmp_path / "home" / "hub", NAME, texts)
    printed = run(LOADS.replace("ASK", first), tmp_path, served, HF_HUB_ETAG_TIMEOUT="120")
    assert "llama" in printed
    assert "the copy in the cache is used" in printed
    assert len(served.requests) == 1
