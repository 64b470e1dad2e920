"""Which cluster a run joins, what its processes are told, and what its nodes lack."""

import json
import re
import socket
from pathlib import Path

import pytest

from burnish.single_controller.ray.nodes import NodeFacts
from burnish.trainer.cluster import check_ray_init, pool_spec, ray_address, ray_init_kwargs
from burnish.trainer.cluster_nodes import Needs, compare, marked_folder, needs_of
from burnish.utils import env, hub
from burnish.utils.errors import ConfigError, ResourceError
from tests.e2e.runs import TINY, tiny_config

INIT = "ray_kwargs.ray_init"


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch, tmp_path):
    for name in ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def config(tmp_path, *overrides):
    return tiny_config(tmp_path / "run", "trainer.controller=ray", "trainer.n_gpus_per_node=1", *overrides)


def test_a_cluster_is_found_as_ray_finds_it(tmp_path, monkeypatch):
    named, auto = config(tmp_path, f"{INIT}.address=a:1"), config(tmp_path, f"{INIT}.address=auto")
    plain, local = config(tmp_path), config(tmp_path, f"{INIT}.address=local")
    assert [ray_address(each) for each in (named, auto, plain, local)] == ["a:1", "auto", None, None]
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("b:2\n")
    assert [ray_address(each) for each in (named, auto, plain, local)] == ["a:1", "b:2", "b:2", None]
    monkeypatch.setenv("RAY_ADDRESS", "c:3")
    assert [ray_address(each) for each in (named, auto, plain, local)] == ["a:1", "c:3", "c:3", None]


def test_the_file_of_the_cluster_is_where_ray_looks_for_it(tmp_path, monkeypatch):
    from ray._common.utils import get_ray_address_file

    for name, value in {"RAY_TMPDIR": None, "TMPDIR": "/b"}.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
        assert str(env.ray_cluster_file()) == get_ray_address_file(None)
    monkeypatch.delenv("TMPDIR")
    assert str(env.ray_cluster_file()) == get_ray_address_file(None)
    (tmp_path / "ray_current_cluster").write_text("own:1")
    assert ray_address(config(tmp_path, f"{INIT}._temp_dir={tmp_path}")) == "own:1"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("auto", "address=auto: no Ray cluster runs here.*ray start --head"),
        ("ray://head:10001", "Ray's client, through which no run can be driven.*ray job submit"),
        ("http://head:8265", "to which jobs are submitted.*ray job submit --address http://head:8265 -- burnish train"),
        ("127.0.0.1:1", r"does not answer \(.*refused.*\)\. Is it up\?.*address=local"),
        ("nonsense", r"does not answer \(that is no host:port\)"),
    ],
)
def test_an_address_that_no_run_can_use_is_answered_at_once(tmp_path, monkeypatch, address, said):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ResourceError, match=said):
        check_ray_init(config(tmp_path))


def test_of_a_cluster_that_is_there_nothing_can_be_chosen_any_more(tmp_path, listening):
    check_ray_init(config(tmp_path, f"{INIT}.num_cpus=8"))
    check_ray_init(config(tmp_path, f"{INIT}.address='{listening}'"))
    for key, value in {"num_cpus": "8", "num_gpus": "1", "object_store_memory": "1000"}.items():
        with pytest.raises(ResourceError, match=rf"{INIT}\.{key}={value} cannot be chosen any more.*address=local"):
            check_ray_init(config(tmp_path, f"{INIT}.address='{listening}'", f"{INIT}.{key}={value}"))


def test_workers_get_the_drivers_settings_of_networks_and_no_secrets(tmp_path, monkeypatch):
    for name in ("NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "given")
    for name in ("HF_TOKEN", "BURNISH_API_KEY", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "secret")
    given = ray_init_kwargs(config(tmp_path))["runtime_env"]["env_vars"]
    assert {name for name, value in given.items() if value == "given"} == {
        *("NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT", "HF_HUB_OFFLINE")
    }
    assert "secret" not in given.values()
    own = ray_init_kwargs(config(tmp_path, f"{INIT}.runtime_env.env_vars.NCCL_DEBUG=own"))
    assert own["runtime_env"]["env_vars"]["NCCL_DEBUG"] == "own"


def test_rays_folder_is_a_path_like_others(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ray_init_kwargs(config(tmp_path, f"{INIT}._temp_dir='~/ray'"))["_temp_dir"] == str(tmp_path / "ray")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("host:1")
    assert ray_address(config(tmp_path, f"{INIT}._temp_dir='~/ray'")) == "host:1"
    with pytest.raises(ConfigError, match=rf"{INIT}\._temp_dir=~no_such_user/ray: there is no user no_such_user"):
        ray_address(config(tmp_path, f"{INIT}._temp_dir='~no_such_user/ray'"))


def test_workers_elsewhere_find_out_for_themselves_whether_the_hub_answers(tmp_path, monkeypatch):
    def passed_on():
        return ray_init_kwargs(config(tmp_path))["runtime_env"]["env_vars"].get("HF_HUB_OFFLINE")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_state", hub._State())
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hub._set_offline(True)
    assert (env.get("HF_HUB_OFFLINE"), passed_on()) == ("1", None)
    hub._set_offline(False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert passed_on() == "1"


def test_a_submitted_jobs_variables_are_not_given_twice(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    job = {"runtime_env": {"env_vars": {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/code"}}, "metadata": {}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    from ray.runtime_env.runtime_env import _merge_runtime_env

    ours = ray_init_kwargs(config(tmp_path))["runtime_env"]
    merged = _merge_runtime_env(job["runtime_env"], ours)
    assert merged is not None, "Ray refuses a variable that both name"
    assert merged["env_vars"]["PYTHONPATH"] == "/code"
    assert merged["env_vars"]["TOKENIZERS_PARALLELISM"] == "true"


def test_pools_are_those_of_the_roles(tmp_path):
    plain = config(tmp_path, "trainer.nnodes=2", "trainer.n_gpus_per_node=2")
    assert pool_spec(plain) == {"global_pool": [2, 2]}
    gae = ["algorithm.adv_estimator=gae", "critic.nnodes=1", "critic.n_gpus_per_node=4"]
    assert pool_spec(config(tmp_path, *gae)) == {"global_pool": [1], "critic_pool": [4]}
    scorer = ["enable=true", "model.path=x", "enable_resource_pool=true", "nnodes=2", "n_gpus_per_node=1"]
    pools = pool_spec(config(tmp_path, *(f"reward_model.{each}" for each in scorer)))
    assert pools == {"global_pool": [1], "reward_pool": [1, 1]}


HERE = NodeFacts(
    "10.0.0.1", "3.12", "/bin/python", "0.1.0", "/code/burnish", "abc", packages={"torch": "2.11", "ray": "2.60"}
)


def other(**changes):
    return NodeFacts(**(vars(HERE) | {"address": "10.0.0.2"} | changes))


def problems(node, needs=None, marker="/run/.seen"):
    return compare(HERE, [node], needs or Needs("/run", True, ("/models/a",)), marker)


def test_a_node_that_is_alike_has_no_problem():
    found = problems(other())
    assert (found.errors, found.warnings) == ([], [])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"problem": "ModuleNotFoundError: No module named 'burnish'"}, "cannot import burnish .*No module named"),
        (
            {"fingerprint": "xyz", "folder": "/old"},
            r"burnish 0.1.0 \(code xyz, in /old\).*\(code abc, in /code/burnish\)",
        ),
        ({"missing": ("/models/a",)}, "has no /models/a, which its workers read"),
        ({"missing": ("/run/.seen",)}, "trainer.default_local_dir=/run: the node 10.0.0.2 does not see this folder"),
        ({"problem": "it did not start a process", "executable": ""}, "cannot be asked what it has: it did not start"),
    ],
)
def test_what_a_node_lacks_is_an_error_that_names_it_and_the_way_out(changes, said):
    (error,) = problems(other(**changes)).errors
    assert "he node 10.0.0.2" in error
    assert re.search(said, error), error


def test_code_that_a_node_lacks_can_be_sent_along():
    for changes in ({"problem": "ModuleNotFoundError"}, {"fingerprint": "xyz"}):
        (error,) = problems(other(**changes)).errors
        assert "ray_kwargs.ray_init.runtime_env.py_modules=[/code/burnish]" in error


def test_a_folder_that_is_not_shared_matters_only_where_workers_write_to_it():
    away = other(missing=("/run/.seen",))
    assert problems(away, Needs("/run", False, ())).errors == []
    assert problems(away, Needs("/run", True, ()), marker=None).errors == []


def test_other_packages_and_another_folder_are_told():
    found = problems(other(python="3.11", packages={"torch": "2.13", "ray": ""}, missing=(str(Path.cwd()),)))
    assert found.errors == []
    assert "torch 2.13 (here 2.11), ray missing (here 2.60), Python 3.11 (here 3.12)" in found.warnings[0]
    assert "relative paths mean something else" in found.warnings[1]


def test_the_way_out_of_a_message_is_one_that_can_be_typed(tmp_path):
    given = ray_init_kwargs(config(tmp_path, f"{INIT}.runtime_env.py_modules=[/code/burnish]"))
    assert given["runtime_env"]["py_modules"] == ["/code/burnish"]
    assert "PYTHONPATH" in given["runtime_env"]["env_vars"]


def test_what_workers_need_is_what_the_configuration_names(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(**row): return 0.0\n")
    needs = needs_of(config(tmp_path, f"reward.custom_reward_function.path={reward}", "trainer.save_freq=5"))
    assert needs == Needs(str(tmp_path / "run"), True, (str(TINY / "model"), str(reward)))
    hub = needs_of(config(tmp_path, "actor_rollout_ref.model.path=org/model"))
    assert (hub.files, hub.saves) == ((), False)


def test_the_marker_lies_where_the_run_will_write_and_is_gone_afterwards(tmp_path):
    with marked_folder(str(tmp_path / "not" / "yet")) as marker:
        assert marker is not None
        assert Path(marker).parent == tmp_path
        assert Path(marker).exists()
    assert not Path(marker).exists()
