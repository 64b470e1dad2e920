"""burnish's side of the training benchmark: an engine on each rank, and what its passes take."""

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.train_work import TrainWork
from burnish.config import load_config
from burnish.engine import FSDPEngine
from burnish.model.flops import device_peak_flops
from burnish.protocol import DataProto
from burnish.utils import env
from burnish.workers.losses import make_policy_loss
from burnish.workers.updates import log_prob_kwargs, update_kwargs

# What the worker asks of the module in an update.
OUTPUTS = ("log_probs", "entropy")


def measure(settings: dict[str, Any], world_size: int) -> list[dict[str, Any]]:
    """The figures of every rank, each in a process of its own, so that no memory is held afterwards.

    Args:
        settings: ``model`` (a folder), ``device``, ``work`` (the fields of `TrainWork`), ``overrides`` (configuration by
            dotted key), ``repeats``, ``profile`` (a file or None).
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run_rank, (world_size, port, settings, folder), nprocs=world_size)
        return [json.loads(_file_of(folder, rank).read_text()) for rank in range(world_size)]


def _file_of(folder: str, rank: int) -> Path:
    """Where a rank leaves its figures."""
    return Path(folder) / f"{rank}.json"


def _run_rank(rank: int, world_size: int, port: int, settings: dict[str, Any], folder: str) -> None:
    torch.set_num_threads(max(1, env.num_cpus() // world_size))
    is_cuda = settings["device"] == "cuda"
    if is_cuda:
        torch.cuda.set_device(rank)
    if world_size > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        device_id = torch.device("cuda", rank) if is_cuda else None
        dist.init_process_group("nccl" if is_cuda else "gloo", rank=rank, world_size=world_size, device_id=device_id)
    try:
        figures = Rank(rank, world_size, settings).figures()
        _file_of(folder, rank).write_text(json.dumps(figures))
    finally:
        if world_size > 1:
            dist.destroy_process_group()


class Rank:
    """One rank's engine and its rows."""

    def __init__(self, rank: int, world_size: int, settings: dict[str, Any]) -> None:
        self.device = torch.device("cuda", rank) if settings["device"] == "cuda" else torch.device("cpu")
        self.repeats, self.profile_to = settings["repeats"], settings["profile"]
        self.rank = rank
        config = load_config(
            [
                {
                    "actor_rollout_ref.model.path": settings["model"],
                    "algorithm.adv_estimator": "grpo",
                    "actor_rollout_ref.rollout.n": 8,
                    "data.train_files": None,
                    "data.val_files": None,
                    "trainer.n_gpus_per_node": world_size,
                },
                settings["overrides"],
            ],
            train_rows_given=True,
        ).actor_rollout_ref
        begin = time.perf_counter()
        self.engine = FSDPEngine(
            config.model,
            config.actor.fsdp_config,
            config.actor.optim,
            device=self.device,
            share_prompts=config.actor.use_prefix_grouper,
        )
        self.start_seconds = time.perf_counter() - begin
        self.batching, self.infer_batching = update_kwargs(config.actor), log_prob_kwargs(config.rollout)
        self.work = TrainWork(**settings["work"])
        tensors = self.work.tensors(self.engine.module.model.config.vocab_size)
        # Every other row, whole groups together: all ranks get the same lengths but for one group.
        groups = torch.arange(len(tensors["input_ids"])) // self.work.samples
        mine = groups % world_size == rank
        self.rows = DataProto.from_dict(tensors={name: tensor[mine] for name, tensor in tensors.items()})
        self.policy_loss = make_policy_loss(config.actor)
        self.stamps: list[Any] = []
        self.engine.module.register_forward_pre_hook(lambda *_: self._stamp("forward"), prepend=True)

    def figures(self) -> dict[str, Any]:
        """Seconds of every repeat after one that warms up, operations and memory of one."""
        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        updates: list[dict[str, float]] = []
        passes: list[float] = []
        for repeat in range(self.repeats + 1):
            self.engine.take_flops()
            seconds = self._timed(lambda: self._update())
            update_flops = self.engine.take_flops()
            parts = self._parts()
            if repeat:
                updates.append({"update": seconds, **parts})
        memory = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else None
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        for repeat in range(self.repeats + 1):
            self.engine.take_flops()
            seconds = self._timed(self._log_probs)
            pass_flops = self.engine.take_flops()
            if repeat:
                passes.append(seconds)
        pass_memory = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else None
        if self.profile_to is not None:
            self._profile(Path(self.profile_to))
        plan = self.engine.memory_plan
        return {
            "updates": updates,
            "passes": passes,
            "update_flops": update_flops,
            "pass_flops": pass_flops,
            "peak_flops": device_peak_flops(self.device, self.engine.dtype),
            "memory_gib": memory,
            "pass_memory_gib": pass_memory,
            "start_seconds": self.start_seconds,
            "dtype": str(self.engine.dtype).removeprefix("torch."),
            "grad_norm": self.grad_norm,
            "device": torch.cuda.get_device_name() if is_cuda else None,
            "plan": None if plan is None else str(plan),
        }

    def _update(self) -> None:
        self.stamps.clear()
        self.engine.train_batch(self.rows, self._loss, outputs=OUTPUTS, **self.batching)
        self._stamp("optimizer")
        self.grad_norm = self.engine.optimizer_step(1)["grad_norm"]
        self._stamp("end")

    def _loss(self, *args: Any) -> Any:
        self._stamp("backward")
        return self.policy_loss(*args)

    def _log_probs(self) -> None:
        self.stamps.clear()
        self.engine.infer_batch(self.rows, outputs=("log_probs",), **self.infer_batching)

    def _timed(self, work: Callable[[], Any]) -> float:
        """Wall-clock seconds until all ranks and the device have finished."""
        self._synchronize()
        begin = time.perf_counter()
        work()
        self._synchronize()
        return time.perf_counter() - begin

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()

    def _stamp(self, name: str) -> None:
        """Notes that the part of an update called ``name`` begins here, in the device's order."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.stamps.append((name, event))
        else:
            self.stamps.append((name, time.perf_counter()))

    def _parts(self) -> dict[str, float]:
        """Seconds of forward, backward and optimizer in the last update."""
        seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        for (name, begin), (_, end) in zip(self.stamps, self.stamps[1:], strict=False):
            seconds[name] += begin.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - begin
        return seconds

    def _profile(self, file: Path) -> None:
        """Writes a table of the operations of one update of rank 0; all ranks take part in the update."""
        from torch.profiler import ProfilerActivity, profile

        is_cuda = self.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]) as profiler:
            self._timed(self._update)
        by = "self_cuda_time_total" if is_cuda else "self_cpu_time_total"
        if self.rank == 0:
            table = profiler.key_averages().table(sort_by=by, row_limit=60, max_name_column_width=90)
            file.write_text(f"One update: {self.work.describe()}\n{table}\n")
