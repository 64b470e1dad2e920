"""What a policy loss decides over a whole mini-batch, on all ranks, before the first micro-batch of its update.

Which tokens have the highest covariance, or which rows are rejected, must not depend on how a mini-batch is cut into
micro-batches or spread over ranks: a pass without gradient supplies the log-probs of every row first, and the result
travels with the rows to the loss (`burnish.core_algos.policy_losses.preparation_of`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor

from burnish.config import FSDPActorConfig
from burnish.core_algos.policy_losses import get_policy_loss_fn, preparation_of
from burnish.engine import FSDPEngine
from burnish.protocol import DataProto

# Keys of a mini-batch that its policy loss gets as keyword arguments; they never leave the worker.
_PREPARED = "prepared/"


def make_preparation(
    config: FSDPActorConfig, engine: FSDPEngine, *, temperature: float, batching: dict[str, int | None]
) -> Callable[[DataProto], None] | None:
    """The preparation of the actor's policy loss as a function of this rank's rows of a mini-batch, or None if it has none.

    All ranks call the function together. It adds what `prepared_arguments` finds to the rows, and it replaces ``loss_mask``
    where the loss rejects tokens: whoever counts the mask must count it again.

    Args:
        temperature: of the policy that is trained.
        batching: how the pass is cut into micro-batches.
    """
    prepare = preparation_of(get_policy_loss_fn(config.policy_loss.loss_mode), config)
    if prepare is None:
        return None

    def prepare_rows(rows: DataProto) -> None:
        outputs = engine.infer_batch(rows, temperature=temperature, outputs=("log_probs",), **batching)
        log_prob = outputs["log_probs"]
        tensors = rows.tensors
        # Without a pass before the update the policy before it is the policy at hand; NaN in it is for the update to skip.
        old_log_prob = tensors.get("old_log_probs", torch.nan_to_num(log_prob)).to(log_prob.device)
        noise = tensors["choice_noise"].to(log_prob.device) if "choice_noise" in tensors else None
        prepared = prepare(
            old_log_prob,
            log_prob,
            tensors["advantages"].to(log_prob.device),
            tensors["loss_mask"].to(log_prob.device),
            config,
            noise=noise,
            collective=engine.all_ranks,
        )
        for name, tensor in (prepared or {}).items():
            tensors["loss_mask" if name == "response_mask" else _PREPARED + name] = tensor

    return prepare_rows


def prepared_arguments(tensors: TensorDict) -> dict[str, Tensor]:
    """What the preparation has put into these rows, by the names of the policy loss's keyword arguments."""
    keys = (str(key) for key in tensors.keys())  # noqa: SIM118 (no mapping)
    return {key.removeprefix(_PREPARED): tensors[key] for key in keys if key.startswith(_PREPARED)}
