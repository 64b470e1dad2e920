"""An engine that was closed leaves nothing behind, so that the next one starts as the first did, wherever either runs."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from burnish.config import RolloutConfig
from burnish.rollout.vllm.arguments import engine_arguments, engine_environment
from burnish.rollout.vllm.in_process import InProcessCore
from burnish.rollout.vllm.launch import launch_environment
from tests.vllm.process_engines import describe, start_core


def start_in_process(folder: Path) -> InProcessCore:
    described, config = describe(str(folder)), RolloutConfig(mode="sync", load_format="auto", max_num_seqs=2)
    arguments = engine_arguments(described, config, torch.device("cpu"), in_process=True)
    return InProcessCore(arguments, engine_environment(in_process=True))


def test_nothing_refers_to_the_model_of_a_closed_engine(tmp_path: Path) -> None:
    core = start_in_process(tmp_path)
    core.call("fingerprints")
    model = weakref.ref(core._client.engine_core.model_executor.driver_worker.worker.get_model())
    core.close()
    assert model() is None
    assert gc.get_freeze_count() == 0
    core.close()


def test_engines_here_and_in_processes_follow_each_other(tmp_path: Path) -> None:
    shapes = []
    for start in (start_in_process, lambda folder: start_core(str(folder), 2), start_in_process):
        core = start(tmp_path)
        shapes.append(core.call("weight_shapes"))
        core.close()
    assert shapes[0] == shapes[1] == shapes[2]


def test_vllm_reads_what_an_engine_is_started_with_also_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    envs.disable_envs_cache()  # Of an engine that another test has started.
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    envs.enable_envs_cache()
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")
    assert envs.VLLM_WORKER_MULTIPROC_METHOD == "fork"
    with launch_environment({}):
        assert envs.VLLM_WORKER_MULTIPROC_METHOD == "spawn"
    os.environ.pop("VLLM_WORKER_MULTIPROC_METHOD")
