"""The critic: a causal language model with a value head."""

from __future__ import annotations

import time

import torch

from burnish.config import FSDPCriticConfig
from burnish.config.actor_rollout_ref import CheckpointConfig
from burnish.config.profiler import ProfilerConfig
from burnish.config.usage import track_section
from burnish.engine import FSDPEngine
from burnish.protocol import DataProto
from burnish.single_controller import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    make_nd_compute_metric_dispatch_fn,
    register,
)
from burnish.workers.checkpoints import SavesItsModel
from burnish.workers.losses import make_value_loss
from burnish.workers.profiling import ProfiledWorker, profiled
from burnish.workers.updates import perf_metrics, run_mini_batches, update_kwargs, value_kwargs


class CriticWorker(SavesItsModel, ProfiledWorker):
    """One rank of the critic.

    Args:
        config: the ``critic`` section.
        device: "cpu" or "cuda".
        total_training_steps: trainer steps of the run, for the learning-rate schedule.
    """

    profile_name = "critic"

    def __init__(self, config: FSDPCriticConfig, device: str, total_training_steps: int) -> None:
        track_section(config, "critic")
        self.config = config
        self.device = torch.device(device, self.device_index) if device == "cuda" else torch.device(device)
        self.total_training_steps = total_training_steps
        self.pass_metrics: dict[str, float] = {}
        """Pace of the last pass without gradient; the next update reports it."""

    def profilers(self) -> dict[str, ProfilerConfig]:
        """See `ProfiledWorker.profilers`."""
        return {"critic": self.config.profiler}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model and puts a value head on it."""
        self.ensure_process_group(self.device.type)
        self.engine = FSDPEngine(
            self.config.model,
            self.config.model.fsdp_config,
            self.config.optim,
            module="value",
            device=self.device,
            total_training_steps=self.total_training_steps,
            share_prompts=self.config.use_prefix_grouper,
        )
        self._register_dispatch_collect_info("critic", self.engine.dp_rank, self.engine.speaks)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("critic"))
    @profiled("critic")
    def compute_values(self, data: DataProto) -> DataProto:
        """``values`` [batch, response]: the value of the state before each response token."""
        start = time.perf_counter()
        outputs = self.engine.infer_batch(data, temperature=1.0, outputs=("values",), **value_kwargs(self.config))
        values = outputs["values"].cpu()
        self.pass_metrics |= perf_metrics(self.engine, name="values", seconds=time.perf_counter() - start)
        self.engine.park()
        return DataProto.from_dict(tensors={"values": values})

    @register(dispatch_mode=make_nd_compute_metric_dispatch_fn("critic"))
    @profiled("critic")
    def update_critic(self, data: DataProto) -> dict[str, float]:
        """One pass over the planned mini-batches; the metrics are those of all ranks together."""
        start = time.perf_counter()
        metrics = run_mini_batches(
            self.engine,
            data,
            make_value_loss(self.config),
            name="critic",
            outputs=("values",),
            temperature=1.0,
            loss_scale_factor=self.config.loss_scale_factor or data.meta_info["max_response_length"],
            batching=update_kwargs(self.config),
        )
        perf = self.pass_metrics | perf_metrics(self.engine, name="critic", seconds=time.perf_counter() - start)
        self.pass_metrics = {}
        self.engine.park()
        return metrics | perf

    @property
    def checkpoint_config(self) -> CheckpointConfig:
        """Contents of the model's checkpoints."""
        return self.config.checkpoint
