"""Supervised fine-tuning: one model that learns the marked tokens of its rows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from burnish.config import SFTTrainerConfig
from burnish.config.actor_rollout_ref import CheckpointConfig
from burnish.config.profiler import ProfilerConfig
from burnish.config.usage import track_section
from burnish.core_algos.aggregation import agg_loss, token_mean
from burnish.engine import FSDPEngine
from burnish.engine.keys import Keys
from burnish.protocol import DataProto
from burnish.single_controller import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    make_nd_compute_metric_dispatch_fn,
    register,
)
from burnish.workers.checkpoints import SavesItsModel
from burnish.workers.profiling import ProfiledWorker, profiled
from burnish.workers.updates import perf_metrics, run_mini_batches, sft_kwargs


def sft_loss(
    outputs: Mapping[str, torch.Tensor], rows: DataProto, global_batch_info: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-sum(log_prob over learnt tokens) / N_tokens, with N_tokens counted over the whole optimizer step and all ranks.

    Dividing by a micro-batch's own tokens instead would weigh tokens by how many others they happen to be computed with.
    """
    log_prob, loss_mask = outputs["log_probs"], rows.tensors["loss_mask"]
    loss = agg_loss(-log_prob, loss_mask, "token-mean", **global_batch_info)
    is_right = log_prob.detach() == outputs["top1_log_probs"]
    return loss, {
        "train/loss": loss.detach() / global_batch_info["dp_size"],
        "train/token_accuracy": token_mean(is_right, loss_mask, global_batch_info["batch_num_tokens"]),
    }


class SFTWorker(SavesItsModel, ProfiledWorker):
    """One rank of the model.

    Args:
        config: the whole configuration of a run of supervised fine-tuning.
        device: "cpu" or "cuda".
        total_training_steps: optimizer steps of the run, for the learning-rate schedule.
    """

    profile_name = "model"

    def __init__(self, config: SFTTrainerConfig, device: str, total_training_steps: int) -> None:
        track_section(config, "")
        self.config = config
        self.device = torch.device(device, self.device_index) if device == "cuda" else torch.device(device)
        self.total_training_steps = total_training_steps

    def profilers(self) -> dict[str, ProfilerConfig]:
        """See `ProfiledWorker.profilers`."""
        return {"model": self.config.profiler}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model."""
        self.ensure_process_group(self.device.type)
        self.engine = FSDPEngine(
            self.config.model,
            self.config.engine,
            self.config.optim,
            module="policy",
            device=self.device,
            total_training_steps=self.total_training_steps,
            keys=Keys.of("sft", trained=True),
        )
        self._register_dispatch_collect_info("actor", self.engine.dp_rank, self.engine.speaks)

    @register(dispatch_mode=make_nd_compute_metric_dispatch_fn("actor"))
    @profiled("model")
    def train_batch(self, data: DataProto) -> dict[str, float]:
        """One optimizer step on the planned rows (`plan_mini_batches`); the metrics are those of all ranks together."""
        start = time.perf_counter()
        metrics = run_mini_batches(
            self.engine,
            data,
            sft_loss,
            name="train",
            outputs=("log_probs", "top1_log_probs"),
            temperature=1.0,
            loss_scale_factor=1.0,
            batching=sft_kwargs(self.config.data),
        )
        perf = perf_metrics(self.engine, name="train", seconds=time.perf_counter() - start)
        self.engine.park()
        return metrics | perf

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def compute_nll(self, data: DataProto) -> DataProto:
        """``nll`` [batch] float64: of each row the negative log-probs of its learnt tokens, summed."""
        outputs = self.engine.infer_batch(data, temperature=1.0, outputs=("log_probs",), **sft_kwargs(self.config.data))
        # Row by row, so that the sum over the whole set depends neither on ranks nor on micro-batches.
        nll = -outputs["log_probs"].cpu().double().sum(dim=1)
        self.engine.park()
        return DataProto.from_dict(tensors={"nll": nll})

    @property
    def checkpoint_config(self) -> CheckpointConfig:
        """Contents of the model's checkpoints."""
        return self.config.checkpoint
