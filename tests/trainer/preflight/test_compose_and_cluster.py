"""Composing tells every mistake; the cluster is asked without starting anything."""

import pytest

from burnish.config import load_config
from burnish.config.schema import leaves
from burnish.trainer.preflight.cluster import check_cluster
from burnish.trainer.preflight.compose import compose, tell_of_validation
from burnish.trainer.preflight.findings import Findings, key_of
from tests.e2e.runs import TINY

BASE = [
    "algorithm.adv_estimator=grpo",
    f"actor_rollout_ref.model.path={TINY / 'model'}",
    "data.train_files=none.jsonl",
    "actor_rollout_ref.rollout.n=2",
    "trainer.n_gpus_per_node=1",
]
BOOLEANS = sorted(key for key, leaf in leaves().items() if isinstance(leaf.default, bool))


# C04
@pytest.mark.parametrize("key", BOOLEANS)
def test_every_switch_that_is_turned_is_kept_or_told(key):
    flipped = not leaves()[key].default
    findings = Findings()
    config = compose([*BASE, f"{key}={str(flipped).lower()}"], None, None, findings)
    told = [finding for finding in findings.items if key.rpartition(".")[2] in finding.message]
    value = config
    for name in key.split("."):
        value = getattr(value, name, None)
    assert value is flipped or told, f"{key}={flipped} is neither kept nor told"


def test_all_wrong_settings_are_told_and_the_rest_is_composed():
    findings = Findings()
    wrong = ["data.shufle=true", "actor_rollout_ref.rollout.n=x", "trainer.seed=-1"]
    config = compose([*BASE, *wrong, "data.max_response_length=16"], None, None, findings)
    assert config is not None
    assert config.data.max_response_length == 16
    messages = [finding.message for finding in findings.of("error")]
    for setting in wrong:
        assert any(setting.partition("=")[0] in message for message in messages)


def test_a_run_without_validation_data_is_told_what_has_no_effect_or_that_it_needs_some():
    keys = ["data.train_files=x.parquet", "data.val_files=null", "trainer.test_freq=5"]
    findings = Findings()
    tell_of_validation(load_config(keys), findings)
    (told,) = [item.message for item in findings.of("warning")]
    assert "trainer.test_freq=5. The reason: there is nothing to validate on" in told
    assert findings.ok
    tell_of_validation(load_config([*keys, "trainer.val_only=true"]), findings)
    assert "nothing to validate on. Set data.val_files" in findings.of("error")[0].message


def test_the_key_of_a_message_is_the_one_it_begins_with():
    assert key_of("data.train_files=[x]: there is no file x") == "data.train_files"
    assert key_of("critic.enable: it is on") == "critic.enable"
    assert key_of("There is no such thing. Set data.shuffle.") is None
    assert key_of("") is None


@pytest.fixture
def no_cluster(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


def cluster_findings(*overrides):
    config = load_config([*BASE, "trainer.device=cpu", "trainer.controller=ray", *overrides])
    findings = Findings()
    check_cluster(config, findings)
    return findings


@pytest.mark.usefixtures("no_cluster")
def test_more_workers_than_this_machine_has_are_an_error():
    findings = cluster_findings("trainer.n_gpus_per_node=100000", "data.train_batch_size=100000",
                                "actor_rollout_ref.actor.ppo_mini_batch_size=100000")  # fmt: skip
    (error,) = findings.of("error")
    assert "100000 workers" in error.message
    assert cluster_findings().ok


@pytest.mark.usefixtures("no_cluster")
def test_several_nodes_need_a_cluster():
    critic = ("algorithm.adv_estimator=gae", "critic.nnodes=2", "critic.n_gpus_per_node=1")
    for given, said in {("trainer.nnodes=2",): "trainer.nnodes=2: ", critic: "critic.nnodes=2: "}.items():
        (error,) = cluster_findings(*given).of("error")
        assert error.message.startswith(said)
        assert "ray_kwargs.ray_init.address" in error.message


@pytest.mark.slow
def test_a_cluster_that_is_there_is_asked_for_what_it_has():
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        address = f"ray_kwargs.ray_init.address='{ray.get_runtime_context().gcs_address}'"
        enough = cluster_findings(address, "trainer.n_gpus_per_node=2")
        assert enough.ok
        assert enough.facts["cluster"]["total"] == 2
        (error,) = cluster_findings(address, "trainer.n_gpus_per_node=4").of("error")
        assert "Asked: 4 CPU on 1 node(s)" in error.message
        assert "2 CPU (of 2)" in error.message
    finally:
        ray.shutdown()
