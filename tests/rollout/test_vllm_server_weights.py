"""Weights for servers elsewhere: files in a shared folder, developer endpoints, and proof that they arrived."""

import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from burnish.rollout.base import SamplingParams
from burnish.utils.errors import ConfigError, RolloutError
from burnish.utils.fingerprint import fingerprint
from tests.rollout.fake_api_server import FakeApi
from tests.rollout.test_vllm_server import SAMPLING, requests_of, rollout_at

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.ones(3, dtype=torch.bfloat16)}
RESET = "/reset_prefix_cache?reset_running_requests=true"


class FakeWorker:
    """What a server's worker does with ``collective_rpc``."""

    def __init__(self, api: FakeApi) -> None:
        self.api, self.held, self.versions = api, {}, []
        self.dtype, self.error, self.spoils = "torch.float32", None, False
        api.routes |= {
            "/collective_rpc": lambda body: (200, {"results": [getattr(self, body["method"])(*body["args"])]}),
            "/pause?mode=keep": lambda _: (200, {}),
            "/resume": lambda _: (200, {}),
            RESET: lambda _: (200, None),
        }

    def served(self, folder):
        assert Path(folder).is_dir()
        return {"dtype": self.dtype}

    def take_files(self, folder, names, version):
        if self.error:
            return {"burnish_error": self.error}
        for name in names:
            with safe_open(Path(folder) / name, framework="pt") as file:
                self.held |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        self.versions.append(version)
        return {}

    def served_fingerprints(self):
        return {name: str(int(fingerprint(tensor)) + self.spoils) for name, tensor in self.held.items()}


@pytest.fixture
def api():
    fake = FakeApi()
    with fake.running() as url:
        fake.url = url
        yield fake


def test_without_a_folder_the_servers_keep_their_weights_until_training_would_need_others(api, caplog):
    engine = rollout_at(api.url)
    engine.update_weights(iter(WEIGHTS.items()), version=0)
    engine.update_weights(iter(WEIGHTS.items()), version=7)
    assert "taken for those of the policy: nothing proves it" in caplog.text
    assert engine.weights_checksum() is None
    assert engine.generate(requests_of(3), SAMPLING)[0].policy_version == 7
    with pytest.raises(
        RolloutError, match=r"cannot be given the weights of policy 8: .*server\.weights_dir is not set"
    ):
        engine.update_weights(iter(WEIGHTS.items()), version=8)
    assert "/collective_rpc" not in api.paths


def test_the_whole_stream_is_read_where_nothing_is_done_with_it(api):
    stream = iter(WEIGHTS.items())
    rollout_at(api.url).update_weights(stream, version=0)
    assert next(stream, None) is None


def test_weights_arrive_in_the_engines_dtype_while_the_server_stands_still_and_the_folder_is_left_empty(api, tmp_path):
    worker = FakeWorker(api)
    engine = rollout_at(api.url, weights_dir=str(tmp_path / "new"))
    engine.update_weights(iter(WEIGHTS.items()), version=3)
    assert {name: tensor.dtype for name, tensor in worker.held.items()} == dict.fromkeys(WEIGHTS, torch.float32)
    assert torch.equal(worker.held["a.weight"], WEIGHTS["a.weight"])
    assert worker.versions == [3]
    order = ["/pause?mode=keep", "/collective_rpc", RESET, "/resume"]
    assert api.paths[-4:] == order
    assert list((tmp_path / "new").iterdir()) == []
    expected = {name: int(fingerprint(tensor.float())) for name, tensor in WEIGHTS.items()}
    assert engine.weights_checksum() == expected
    assert engine.generate(requests_of(3), SAMPLING)[0].policy_version == 3


def test_what_a_killed_run_has_left_of_a_handover_goes_with_a_later_one_and_nothing_else(api, tmp_path):
    FakeWorker(api)

    def killed_in_the_midst():
        yield "a.weight", WEIGHTS["a.weight"]
        os.kill(os.getpid(), signal.SIGKILL)

    def run():
        rollout_at(api.url, weights_dir=str(tmp_path)).update_weights(killed_in_the_midst(), version=3)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    own = tmp_path / "policy-final"
    own.mkdir()
    os.utime(own, (1, 1))
    engine = rollout_at(api.url, weights_dir=str(tmp_path))
    # It may be another run's, which is at it.
    engine.update_weights(iter(WEIGHTS.items()), version=4)
    assert left.is_dir()
    os.utime(left, (1, 1))
    engine.update_weights(iter(WEIGHTS.items()), version=5)
    assert [path.name for path in tmp_path.iterdir()] == ["policy-final"]


def test_large_models_go_in_several_files(api, tmp_path, monkeypatch):
    monkeypatch.setattr("burnish.rollout.vllm.server_weights._FILE_BYTES", 16)
    worker = FakeWorker(api)
    engine = rollout_at(api.url, weights_dir=str(tmp_path))
    tensors = {f"{k}": torch.full((3,), float(k)) for k in range(5)}
    engine.update_weights(iter(tensors.items()), version=1)
    assert {name: float(tensor[0]) for name, tensor in worker.held.items()} == {f"{k}": float(k) for k in range(5)}
    sent = next(body for body in api.posted if body and body.get("method") == "take_files")
    assert len(sent["args"][1]) == 3


def test_what_the_servers_worker_refuses_is_told_and_nothing_is_sampled_before_the_next_update(api, tmp_path):
    worker = FakeWorker(api)
    engine = rollout_at(api.url, weights_dir=str(tmp_path))
    worker.error = "The weight stream holds 'c', which vLLM's model does not have."
    with pytest.raises(RolloutError, match=r"127.*holds 'c', which vLLM's model does not have"):
        engine.update_weights(iter(WEIGHTS.items()), version=1)
    assert api.paths[-1] == "/resume"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RolloutError, match="failed half-way"):
        engine.generate(requests_of(3), SAMPLING)
    worker.error = None
    engine.update_weights(iter(WEIGHTS.items()), version=2)
    assert len(engine.generate(requests_of(3), SAMPLING)) == 1


def test_a_server_that_keeps_what_it_computed_with_the_old_weights_is_refused(api, tmp_path):
    FakeWorker(api)
    engine = rollout_at(api.url, weights_dir=str(tmp_path))
    api.routes[RESET] = lambda _: (200, {"success": False})
    with pytest.raises(RolloutError, match="could not forget the keys and values"):
        engine.update_weights(iter(WEIGHTS.items()), version=1)
    assert api.paths[-1] == "/resume"


def test_servers_that_hold_different_weights_are_named(api, tmp_path):
    other = FakeApi()
    with other.running() as url:
        FakeWorker(api)
        theirs = FakeWorker(other)
        engine = rollout_at(api.url, url, weights_dir=str(tmp_path))
        engine.update_weights(iter(WEIGHTS.items()), version=1)
        assert engine.weights_checksum() is not None
        theirs.spoils = True
        with pytest.raises(RolloutError, match=rf"{url} holds other values of 'a.weight' than {api.url}"):
            engine.weights_checksum()


def test_a_server_without_the_endpoints_is_refused_before_anything_is_sampled(api, tmp_path):
    with pytest.raises(RolloutError, match=r"no developer endpoints: start it with VLLM_SERVER_DEV_MODE=1"):
        rollout_at(api.url, weights_dir=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_server_without_the_extension_is_refused_too(api, tmp_path):
    api.routes["/collective_rpc"] = lambda _: (500, {"error": {"message": "no attribute 'served'"}})
    with pytest.raises(RolloutError, match=r"no attribute 'served'.*--worker-extension-cls burnish"):
        rollout_at(api.url, weights_dir=str(tmp_path))


def test_another_dtype_or_a_folder_that_cannot_be_is_refused(api, tmp_path):
    worker = FakeWorker(api)
    worker.dtype = "torch.bfloat16"
    with pytest.raises(
        RolloutError, match=r"computes in torch.bfloat16, but .* torch.float32. Start it with --dtype float32"
    ):
        rollout_at(api.url, weights_dir=str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"server\.weights_dir=.*file"):
        rollout_at(api.url, weights_dir=str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("kind", "words"), [("raw", "--logprobs-mode processed_logprobs. Training needs"), ("policy", "")]
)
def test_training_wants_the_log_probs_of_its_own_sampling(api, tmp_path, monkeypatch, kind, words):
    FakeWorker(api)
    api.log_prob = (lambda body: -1.0) if kind == "raw" else (lambda body: -body["temperature"])
    config = {"temperature": 0.7}
    made = SimpleNamespace(make=lambda: rollout_with(config, api.url, tmp_path))
    if words:
        with pytest.raises(ConfigError, match=words):
            made.make()
    else:
        made.make()
    config |= {"temperature": 1.0, "top_p": 0.9}
    with pytest.raises(ConfigError, match=r"reports one of the two. Leave top_p"):
        made.make()


def rollout_with(sampling, url, folder):
    """With these keys of ``rollout``."""
    from burnish.config import RolloutConfig
    from burnish.rollout.vllm.server import ServerRollout

    config = RolloutConfig(name="vllm", mode="server", **sampling)
    config.server.url, config.server.weights_dir = [url], str(folder)
    text = SimpleNamespace(max_position_embeddings=None)
    return ServerRollout(
        config,
        model_path="model",
        model_config=SimpleNamespace(get_text_config=lambda decoder: text),
        vocab_size=50,
        dtype=torch.float32,
    )


def test_greedy_validation_needs_no_more_than_raw_log_probs(api, tmp_path):
    FakeWorker(api)
    engine = rollout_at(api.url, weights_dir=str(tmp_path))
    (response,) = engine.generate(requests_of(3), SamplingParams(max_new_tokens=2, temperature=0.0))
    assert response.log_probs == [-1.0, -1.0]
