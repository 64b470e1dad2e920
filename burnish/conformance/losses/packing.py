"""The gradient of the whole loss in the trainer's engine, for any packing of the rows into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from burnish.config import FSDPCriticConfig
from burnish.conformance.comparison import close_in_norm
from burnish.conformance.losses.term import LossTerm
from burnish.conformance.tiny_engine import clear_gradients, tiny_engine, tiny_rows
from burnish.engine import FSDPEngine, LossFn
from burnish.protocol import DataProto
from burnish.workers.losses import make_policy_loss, make_value_loss
from burnish.workers.preparation import make_preparation

_SPLITS: tuple[dict[str, int | None], ...] = ({"micro_batch_size": 1}, {"micro_batch_size": 3}, {"max_token_len": 14})


def packing(term: LossTerm) -> None:
    """The gradient of every parameter is the same for rows one by one, three by three, packed by tokens and all at once."""
    for dtype, tolerance in (("float64", 1e-10), ("float32", 1e-5)):
        engine = tiny_engine("value" if term.actor is None else "policy", dtype)
        rows = tiny_rows(engine)
        whole = _gradient(term, engine, rows, {"micro_batch_size": len(rows)})
        for split in _SPLITS:
            ((key, number),) = split.items()
            what = f"In {dtype}, with {key}={number} instead of all rows at once, the gradient of the model"
            close_in_norm(what, _gradient(term, engine, rows, split), whole, tolerance)


def _gradient(term: LossTerm, engine: FSDPEngine, rows: DataProto, batching: dict[str, int | None]) -> Tensor:
    loss_fn, outputs, prepare = _loss(term, engine, batching)
    # The preparation puts its decisions, and another loss mask, into the rows that it is given.
    mine = rows.select()
    if prepare is not None:
        prepare(mine)
    clear_gradients(engine)
    info = engine.global_batch_info(mine, term.with_settings()["loss_scale_factor"])
    cut: dict[str, Any] = dict(batching)
    engine.train_batch(mine, loss_fn, outputs=outputs, global_batch_info=info, **cut)
    gradient = torch.cat([grad.double().flatten() for grad in engine.full_gradients().values()])
    clear_gradients(engine)
    return gradient


def _loss(
    term: LossTerm, engine: FSDPEngine, batching: dict[str, int | None]
) -> tuple[LossFn, tuple[str, ...], Callable[[DataProto], None] | None]:
    """The loss that the worker makes, the outputs of the model that it reads, and what comes before the first micro-batch."""
    settings = term.with_settings(loss_agg_mode=term.modes[0], **term.variants[0])
    if term.actor is None:
        critic = FSDPCriticConfig(cliprange_value=settings["cliprange_value"], loss_agg_mode=settings["loss_agg_mode"])
        return make_value_loss(critic), ("values",), None
    actor = term.actor(settings)
    prepare = make_preparation(actor, engine, temperature=1.0, batching=batching)
    return make_policy_loss(actor), ("log_probs", "entropy"), prepare
