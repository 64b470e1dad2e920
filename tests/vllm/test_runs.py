"""Training with vLLM as the rollout engine is the training with burnish's own, whatever process vLLM runs in."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from burnish.trainer.main_ppo import Parts, TaskRunner
from burnish.utils.errors import BurnishError, ConfigError
from tests.e2e.runs import logged, tiny_run

ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.name=vllm"
LORA = (
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.model.target_modules=all-linear",
    "actor_rollout_ref.actor.optim.lr=0.003",
)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The metrics of the run with burnish's own engine."""
    folder = tmp_path_factory.mktemp("native")
    tiny_run(folder, "trainer.controller=local")
    return logged(folder)


def assert_same_run(run: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Equal tokens give equal scores and lengths; what is computed from log-probs may differ by their rounding."""
    assert len(run) == len(expected)
    for ours, theirs in zip(run, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            if key.startswith("training/rollout_"):
                continue
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key
        assert ours["critic/score/mean"] == theirs["critic/score/mean"]
        assert ours["training/rollout_probs_diff_max"] < 1e-5
        assert ours["training/rollout_actor_probs_pearson_corr"] > 0.9999


def test_three_steps_in_this_process(tmp_path: Path, native: list[dict[str, float]]) -> None:
    tiny_run(tmp_path, VLLM, f"{ROLLOUT}.mode=sync", "trainer.controller=local")
    assert_same_run(logged(tmp_path), native)


def test_three_steps_in_a_worker_of_ray_whose_engine_has_processes_of_its_own(
    tmp_path: Path, native: list[dict[str, float]]
) -> None:
    tiny_run(tmp_path, VLLM, f"{ROLLOUT}.mode=async", "trainer.controller=ray")
    assert_same_run(logged(tmp_path), native)


def test_two_copies_that_are_one_engine_train_as_the_native_engine(
    tmp_path: Path, native: list[dict[str, float]]
) -> None:
    workers = ("trainer.controller=ray", "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.fsdp_config.fsdp_size=1")
    tiny_run(tmp_path, *workers, VLLM, f"{ROLLOUT}.mode=async", f"{ROLLOUT}.data_parallel_size=2")
    # How busy the decode was, and what two workers add up, is another matter.
    same = {"step", "critic/score/mean", "response_length/mean", "actor/pg_loss", "actor/entropy", "actor/grad_norm"}
    for ours, theirs in zip(logged(tmp_path), native, strict=True):
        assert {key: ours[key] for key in same} == pytest.approx({key: theirs[key] for key in same}, rel=1e-3, abs=1e-5)
        assert ours["training/rollout_probs_diff_max"] < 1e-5


@pytest.mark.timeout(900)
def test_a_run_whose_engine_dies_names_it_and_goes_on_from_its_last_checkpoint(
    tmp_path: Path, native: list[dict[str, float]]
) -> None:
    before = {process.pid for process in multiprocessing.active_children()}

    def kill_the_engine(report: Any) -> None:
        if report.step == 2:
            for process in multiprocessing.active_children():
                if process.pid not in before and process.pid is not None:
                    os.kill(process.pid, signal.SIGKILL)

    keys = (VLLM, f"{ROLLOUT}.mode=async", "trainer.controller=local", "trainer.save_freq=1")
    with pytest.raises(BurnishError, match=r"generate_sequences.*The vLLM engine is gone.*SIGKILL"):
        tiny_run(tmp_path, *keys, parts=Parts(callbacks=(kill_the_engine,)))
    assert len(logged(tmp_path)) == 2
    tiny_run(tmp_path, *keys, "trainer.resume_mode=must")
    assert_same_run(logged(tmp_path), native)


def test_adapters_reach_the_engine(tmp_path: Path) -> None:
    tiny_run(tmp_path / "native", *LORA, "trainer.controller=local")
    tiny_run(tmp_path / "vllm", *LORA, VLLM, f"{ROLLOUT}.mode=sync", "trainer.controller=local")
    assert_same_run(logged(tmp_path / "vllm"), logged(tmp_path / "native"))


@pytest.mark.timeout(900)
def test_two_workers_are_one_engine(tmp_path: Path, native: list[dict[str, float]]) -> None:
    size = f"{ROLLOUT}.tensor_model_parallel_size=2"
    tiny_run(tmp_path, VLLM, f"{ROLLOUT}.mode=sync", size, "trainer.n_gpus_per_node=2", "trainer.device=cpu")
    assert_same_run(logged(tmp_path), native)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            ["engine_kwargs.vllm.enforce_eagr=true"],
            r"engine_kwargs\.vllm\.enforce_eagr=True.*Did you mean 'enforce_eager'",
        ),
        (["engine_kwargs.vllm.worker_cls=mine"], r"worker_cls='mine' cannot be set"),
        (["tensor_model_parallel_size=8"], r"tensor_model_parallel_size=8 does not divide the 4 attention heads"),
        (["cudagraph_capture_sizes=[]"], r"cudagraph_capture_sizes=\[\] names no size.*enforce_eager=true"),
        (
            [
                "mode=server",
                "server.url=[http://127.0.0.1:9]",
                "server.max_start_wait_time=0",
                "server.weights_dir=/tmp",
            ],
            r"no server at actor_rollout_ref\.rollout\.server\.url=http://127\.0\.0\.1:9 .*refused",
        ),
        (["max_model_len=4"], r"max_model_len=4 is too short"),
    ],
)
def test_what_vllm_could_not_do_is_refused_before_any_data_is_read(
    tmp_path: Path, keys: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TaskRunner, "build_trainer", lambda *_: pytest.fail("It goes on."))
    workers = ("trainer.n_gpus_per_node=8", "trainer.device=cpu")
    with pytest.raises(ConfigError, match=says):
        tiny_run(tmp_path, VLLM, *workers, *(f"{ROLLOUT}.{key}" for key in keys))
    assert not (tmp_path / "metrics.jsonl").exists()
