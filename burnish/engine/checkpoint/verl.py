"""Going on from a checkpoint of verl's FSDP workers: weights, and the moments of AdamW where FSDP2 wrote them."""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish.engine import ranks
from burnish.engine.optimizer import MasterOptimizer
from burnish.model.verl_shards import join_parts, load_verl_model, read_verl_files
from burnish.utils.errors import CheckpointError

__all__ = ["load_verl_model", "load_verl_optimizer"]

logger = logging.getLogger("burnish.engine")

_ADAMW = "torch.optim.adamw.AdamW"
_LEFT_OUT = "The optimizer starts with fresh moments."


def load_verl_optimizer(optimizer: MasterOptimizer, folder: Path) -> bool:
    """Takes over the moments in ``optim_world_size_W_rank_r.pt``, whose parameters have numbers in the order of the model.

    What cannot be taken over is left out, which is said: no such files, an optimizer other than AdamW, flat parameters
    (FSDP1), or parameters that do not fit by number and shape.

    Returns:
        whether it was taken over.
    """
    reason = _take_over(optimizer, folder)
    if reason is not None and ranks.rank() == 0:
        logger.warning("%s: the optimizer's state is not taken over, since %s. %s", folder, reason, _LEFT_OUT)
    return reason is None


def _take_over(optimizer: MasterOptimizer, folder: Path) -> str | None:
    """Takes the state over; why not, as a clause."""
    if not any(folder.glob("optim_world_size_*_rank_*.pt")):
        return "there is no optim_world_size_*_rank_*.pt"
    if optimizer.kind != _ADAMW:
        return f"this run trains with {optimizer.kind} and not with AdamW"
    try:
        saved = [_state_of(file) for file in read_verl_files(folder, "optim")]
    except CheckpointError as error:
        return str(error).rstrip(".")
    layout, names = optimizer.layout, list(optimizer.states())
    if any(set(each) != set(range(len(names))) for each in saved):
        return f"it is of {len(saved[0])} parameters without names, and the model has {len(names)}"
    for number, name in enumerate(names):
        moments = saved[0][number]
        if not {"step", "exp_avg", "exp_avg_sq"} <= set(moments):
            return f"its state of parameter {number} is not AdamW's"
        if tuple(moments["exp_avg"].shape) != layout.whole_shape(name):
            return f"its parameter {number} has shape {list(moments['exp_avg'].shape)}, and {name!r} another one"
    for number, name in enumerate(names):
        optimizer.restore(name, _rows(optimizer, name, [each[number] for each in saved]))
    return None


def _state_of(read: Any) -> dict[int, dict[str, Tensor]]:
    if not isinstance(read, dict) or not isinstance(read.get("state"), dict):
        raise CheckpointError("it is no optimizer's state")
    state: dict[int, dict[str, Tensor]] = read["state"]
    return state


def _rows(optimizer: MasterOptimizer, name: str, saved: list[dict[str, Tensor]]) -> dict[str, Any]:
    start, stop = optimizer.layout.rows(name)
    state: dict[str, Any] = {"step": torch.as_tensor(saved[0]["step"], dtype=torch.float32)}
    for key in ("exp_avg", "exp_avg_sq"):
        rows = join_parts([each[key] for each in saved], name)[start:stop]
        state[key] = rows.to(optimizer.master(name).dtype)
    return state
