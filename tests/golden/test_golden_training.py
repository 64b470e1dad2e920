"""Ten optimizer steps of the training engine alone, number by number, against what an earlier version computed.

There is no sampling in between, so no token can come out another way: what is compared is the forward, the loss, the gradient,
the clipping, the schedule and the optimizer. In float64 the numbers differ by 5e-6 of their size at most, so 1e-4 is far more
than another CPU's rounding. Renewed like the golden runs (see `tests.golden.test_golden_runs`).
"""

from typing import Any

import pytest
import torch

from burnish.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from burnish.engine import FSDPEngine
from burnish.protocol import DataProto
from tests.e2e.runs import TINY
from tests.engine.engine_program import make_batch, policy_loss, value_loss
from tests.golden.test_golden_runs import assert_as_before

# Policy and value function, each with its schedule, so that all but the first are far from constant.
TRAININGS: dict[str, dict[str, Any]] = {
    "training_policy": {"module": "policy", "optim": {"lr_scheduler_type": "cosine", "lr_warmup_steps": 3}},
    "training_value": {
        "module": "value",
        "optim": {"lr_scheduler_type": "wsd", "lr_decay_steps": 4, "min_lr_ratio": 0.1},
    },
}
STEPS = 10


def golden_training(name: str) -> list[dict[str, float]]:
    """The metrics of every step, and afterwards what the trained model says of the first batch, in float32."""
    run = TRAININGS[name]
    policy = run["module"] == "policy"
    engine = FSDPEngine(
        HFModelConfig(path=str(TINY / "model"), enable_gradient_checkpointing=False),
        FSDPEngineConfig(dtype="float32"),
        FSDPOptimizerConfig(lr=1e-3, clip_grad=0.5, weight_decay=0.1, **run["optim"]),
        module=run["module"],
        total_training_steps=STEPS,
    )
    outputs = ("log_probs", "entropy") if policy else ("values",)
    steps = []
    for step in range(1, STEPS + 1):
        batch = make_batch(12, seed=step)
        metrics = engine.train_batch(
            batch,
            with_loss(policy_loss() if policy else value_loss),
            outputs=outputs,
            temperature=0.7,
            max_token_len=40,
        )
        steps.append({"step": float(step), **metrics, **engine.optimizer_step(step)})
    inferred = engine.infer_batch(make_batch(12, seed=1), outputs=outputs, temperature=0.7, max_token_len=40)
    for key, values in inferred.items():
        steps[-1] |= {f"after/{key}/sum": float(values.sum()), f"after/{key}/norm": float(values.norm())}
    return steps


def with_loss(loss_fn: Any) -> Any:
    """``loss_fn`` with the loss among its metrics."""

    def counted(outputs: Any, rows: DataProto, info: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = loss_fn(outputs, rows, info)
        return loss, metrics | {"loss": loss.detach()}

    return counted


@pytest.mark.parametrize("name", TRAININGS)
def test_ten_steps_give_the_numbers_they_gave_before(name: str) -> None:
    assert_as_before(golden_training(name), name, rel=1e-4)


def test_a_training_run_repeats_to_the_bit() -> None:
    assert golden_training("training_policy") == golden_training("training_policy")
