"""Planned updates of a small actor, for the tests of the workers, and a program that makes them on several ranks.

Run as `tests.engine.engine_program` is, with cases as `run_case` takes them.
"""

from pathlib import Path
from typing import Any

import torch

from burnish.config import FSDPActorConfig, RolloutCorrectionConfig, names
from burnish.config.actor_rollout_ref import PolicyLossConfig
from burnish.engine import FSDPEngine
from burnish.protocol import DataProto, object_array
from burnish.trainer.ppo.updates import update_in_passes
from burnish.workers.losses import make_policy_loss
from burnish.workers.preparation import make_preparation
from burnish.workers.updates import run_mini_batches
from tests.engine.engine_program import main, make_batch, make_engine

OUTPUTS = ("log_probs", "entropy")
TEMPERATURE = 0.7

# What a small batch must set for the losses that choose tokens to choose some.
_KEYS: dict[str, dict[str, Any]] = {
    "clip_cov": {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.0, "clip_cov_ub": 50.0},
    "kl_cov": {"kl_cov_ratio": 0.1},
    "bypass_mode": {
        "rollout_correction": RolloutCorrectionConfig(
            bypass_mode=True,
            loss_type="reinforce",
            rollout_is="token",
            rollout_is_batch_normalize=True,
            rollout_rs="token_k1",
            rollout_rs_threshold="0.8_1.3",
        )
    },
}
LOSS_MODES = names.POLICY_LOSSES
PREPARED = ["bypass_mode", "clip_cov", "kl_cov"]


def actor_config(loss_mode: str = "vanilla", **changes: Any) -> FSDPActorConfig:
    """An ``actor`` section with the loss ``loss_mode``, a KL term and an entropy bonus; two mini-batches of two groups."""
    keys = {"loss_mode": loss_mode} | _KEYS.get(loss_mode, {})
    settings: dict[str, Any] = {
        "policy_loss": PolicyLossConfig(**keys),
        "ppo_mini_batch_size": 2,
        "data_loader_seed": 1,
        "entropy_coeff": 0.02,
        "use_kl_loss": True,
        "kl_loss_coef": 0.3,
    }
    return FSDPActorConfig(**(settings | changes))


def update_batch(engine: FSDPEngine, num_rows: int = 8, seed: int = 0) -> DataProto:
    """Groups of two rows whose old log-probs are near the policy's own, as the batch of a second update has them."""
    dtype = torch.float64 if engine.dtype == torch.float64 else torch.float32
    batch = make_batch(num_rows, seed=seed, dtype=dtype)
    own = engine.infer_batch(batch, temperature=TEMPERATURE)["log_probs"].cpu()
    generator = torch.Generator().manual_seed(seed)
    for key in ("old_log_probs", "rollout_log_probs", "ref_log_prob"):
        drift = 0.3 * torch.randn(own.shape, generator=generator, dtype=torch.float64).to(dtype)
        batch.tensors[key] = (own + drift) * batch.tensors["response_mask"]
    batch.non_tensor_batch["uid"] = object_array([f"u{row // 2}" for row in range(num_rows)])
    return batch


def update(
    engine: FSDPEngine,
    batch: DataProto,
    config: FSDPActorConfig,
    *,
    step: int = 1,
    micro_batch_size: int = 8,
    scale: float = 1.0,
) -> tuple[dict[str, float], int]:
    """One trainer step as driver and workers make it: plan, spread over the ranks, prepare, train.

    Args:
        scale: multiplies the loss; NaN makes every gradient NaN.
    """
    batching = {"micro_batch_size": micro_batch_size}
    loss_fn = make_policy_loss(config)

    def scaled(outputs: Any, rows: DataProto, info: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = loss_fn(outputs, rows, info)
        return loss * scale, metrics

    def on_this_rank(planned: DataProto) -> list[dict[str, float]]:
        rows = planned.chunk(engine.dp_size)[engine.dp_rank]
        metrics = run_mini_batches(
            engine,
            rows,
            scaled,
            name="actor",
            outputs=OUTPUTS,
            temperature=TEMPERATURE,
            loss_scale_factor=7.0,
            batching=batching,
            prepare=make_preparation(config, engine, temperature=TEMPERATURE, batching=batching),
        )
        return [metrics]

    metrics, num_updates = update_in_passes(
        on_this_rank, batch, config, dp_size=engine.dp_size, balance=True, step=step, max_response_length=7
    )
    # How rows lie on the ranks is another matter than what the ranks compute.
    return {key: value for key, value in metrics.items() if not key.startswith("global_seqlen/")}, num_updates


def run_case(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """A step of the loss ``case["loss_mode"]``: metrics and weights."""
    device = case.get("device", "cpu")
    engine = make_engine(
        dtype=case["dtype"],
        fsdp_size=case["fsdp_size"],
        device=device,
        sequence_parallel=case.get("sequence_parallel", 1),
    )
    # With seven rows one of the two mini-batches has three, and two ranks need a filler.
    batch = update_batch(engine, num_rows=case["num_rows"])
    metrics, _ = update(engine, batch, actor_config(case["loss_mode"]), micro_batch_size=case["micro_batch_size"])
    return {"metrics": metrics, "weights": {name: weight.cpu().clone() for name, weight in engine.named_weights()}}


if __name__ == "__main__":
    main(run_case)
